"""What the offline class gives for prompts: their outputs, and how these fill while the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from octavo.engine.messages import Add, Progress
from octavo.explain import Explanation
from octavo.request import FinishReason, SamplingParams, TokenLogprobs
from octavo.text.assistant import MessageOutput
from octavo.text.chat import ChatPrompt
from octavo.text.message import AssistantMessage
from octavo.text.output import ChoiceOutput, Delta, best_of
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    logprob: float  # natural logarithm, of the model's own distribution
    rank: int  # 1: most likely
    decoded_token: str


Logprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # where logprobs were asked for, or candidates compete
    logprobs: list[Logprobs] | None = None  # per token: itself and the best alternatives
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # why, where finish_reason is "error"
    message: AssistantMessage | None = None  # of a chat: what `text` says


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None  # per prompt token; nothing predicts the first
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
    explanations: list[Explanation] = field(default_factory=list)  # of all choices generated: candidates too


@dataclass(frozen=True)
class PoolingRequestOutput:
    """What `LLM.embed` gives for one prompt."""

    request_id: str
    embedding: NDArray[Any]  # [hidden size], float32
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


class Result:
    """A RequestOutput as it fills."""

    def __init__(
        self, tokenizer: Tokenizer, add: Add, params: SamplingParams, text: str | None, piece: Callable[[int], str],
        chat: ChatPrompt | None,
    ) -> None:  # fmt: skip
        """`params` are the caller's, those of `add` ask for all candidates."""
        n = add.params.n
        self.output = RequestOutput(add.id, text, add.prompt_ids, None, [CompletionOutput(i) for i in range(n)])
        self.open = n
        self._params = params
        self._piece = piece
        self._tokenizer = tokenizer
        self._chat = chat
        prompt_ids = add.prompt_ids if chat is None or chat.continues else ()
        keep: frozenset[int] = frozenset() if chat is None else chat.keep
        self._choices = [ChoiceOutput(tokenizer, params, prompt_ids, keep) for _ in range(n)]
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        for out in self.output.outputs:
            out.logprobs = None if params.logprobs is None else []
            out.cumulative_logprob = None if add.params.logprobs is None else 0.0

    def finish(self) -> RequestOutput:
        """The whole answer: of candidates the best."""
        outputs = [self.output.outputs[i] for i in best_of(self._choices, self._params.n)]
        if len(outputs) < len(self._choices):
            self.output.outputs = [replace(out, index=i) for i, out in enumerate(outputs)]
        if self._chat is not None:
            for out in self.output.outputs:
                self._read(out, self._chat)
        return self.output

    def _read(self, out: CompletionOutput, chat: ChatPrompt) -> None:
        """The message that the text of a chat is."""
        reader = MessageOutput(self._tokenizer, chat, self._params.skip_special_tokens)
        delta = Delta(out.text, out.token_ids, [], FinishReason(out.finish_reason or "error"), out.stop_reason)
        out.message = AssistantMessage()
        out.message.add(reader.push(delta))
        out.finish_reason = reader.finish_reason(delta)

    def push(self, progress: Progress) -> bool:
        """True: a stop string ended the choice, the engine does not know yet."""
        choice = self._choices[progress.choice]
        if choice.finish_reason is not None:
            return False
        if progress.choice == 0:
            self.output.num_cached_tokens = progress.num_cached
            if self.output.prompt_logprobs is not None:
                self.output.prompt_logprobs += map(self._logprobs, progress.prompt_logprobs)
        delta = choice.push(progress)
        out = self.output.outputs[progress.choice]
        out.text += delta.text
        out.token_ids += delta.token_ids
        if out.logprobs is not None:
            out.logprobs += map(self._logprobs, delta.logprobs)
        if choice.logprob is not None:
            out.cumulative_logprob = choice.logprob
        if delta.finish_reason is None:
            return False
        out.finish_reason, out.stop_reason, out.error = str(delta.finish_reason), delta.stop_reason, delta.error
        self.open -= 1
        return progress.finish_reason is None

    def _logprobs(self, scored: TokenLogprobs) -> Logprobs:
        found = {scored.token_id: Logprob(scored.logprob, scored.rank, self._piece(scored.token_id))}
        for rank, (token, logprob) in enumerate(zip(scored.top_ids, scored.top_logprobs, strict=True), 1):
            found.setdefault(token, Logprob(logprob, rank, self._piece(token)))
        return found
