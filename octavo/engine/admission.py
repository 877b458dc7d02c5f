"""What a request must satisfy to be served at all. Checked by the client before it sends and by the engine again."""

from __future__ import annotations

from typing import NamedTuple

from octavo.engine.messages import Abilities, Add
from octavo.pooling import HEADS
from octavo.request import MAX_LOGPROBS, ParameterError, SamplingParams


class ContextLengthError(ParameterError):
    """Prompt and output together are longer than the context."""


class Bounds(NamedTuple):
    """Limits of a loaded model."""

    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int] = frozenset()  # end tokens that the model can draw
    abilities: Abilities = Abilities()

    def check(self, add: Add) -> None:
        """Raise ParameterError naming the field and the limit; ContextLengthError where it is the length."""
        self._check_abilities(add)
        prompt_len = len(add.prompt_ids)
        if not prompt_len:
            raise ParameterError("prompt", "the prompt is empty: it must have at least one token")
        low, high = min(add.prompt_ids), max(add.prompt_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ParameterError(
                "prompt", f"the prompt has token id {bad}; the vocabulary has ids 0 to {self.vocab_size - 1}"
            )
        add.params.check_vocabulary(self.vocab_size, self.eos_ids)
        if add.params.use_beam_search:
            self._check_width(add.params)
        max_tokens = add.params.max_tokens
        least = 1 if max_tokens is None else min(1, max_tokens)
        if prompt_len + least > self.max_model_len:
            raise ContextLengthError("prompt", self.too_long(prompt_len))
        if max_tokens is not None and prompt_len + max_tokens > self.max_model_len:
            raise ContextLengthError(
                "max_tokens",
                f"max_tokens is {max_tokens} and the prompt has {prompt_len} tokens, together {prompt_len + max_tokens}; "
                f"at most {self.max_model_len} fit: max_tokens {self.max_model_len - prompt_len} would",
            )

    def too_long(self, prompt_len: int) -> str:
        """Why a prompt of so many tokens is refused."""
        if not self.abilities.generates:
            return f"the text has {prompt_len} tokens; this model reads at most {self.max_model_len} at once"
        return f"the prompt has {prompt_len} tokens; prompt and output together may have {self.max_model_len}"

    def _check_abilities(self, add: Add) -> None:
        can = self.abilities
        if add.pooling is None and not can.generates:
            raise ParameterError(
                "model",
                "this model is an encoder and generates no text: /v1/embeddings, /v1/score and /v1/rerank use it",
            )
        if add.pooling in HEADS and add.pooling not in can.heads:
            raise ParameterError("pooling", f"this model has no {add.pooling}: pooling may be last, mean or cls")

    def _check_width(self, params: SamplingParams) -> None:
        """A beam search looks at so many continuations of each beam that its width is left where all end tokens go."""
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_ids)
        most = min(MAX_LOGPROBS, self.vocab_size)
        if params.num_candidates + len(ends) > most:
            raise ParameterError(
                "n" if params.best_of is None else "best_of",
                f"{params.num_candidates} beams and {len(ends)} end tokens and stop_token_ids are "
                f"{params.num_candidates + len(ends)} tokens to look at; a beam search may look at {most} for each beam",
            )
