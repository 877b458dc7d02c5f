"""ChoiceOutput: the text of one choice as its tokens arrive, cut at stop strings.

Interval table, in characters of the text decoded so far::

    [0, sent)          given out, final
    [sent, safe)       given out by this push
    [safe, len)        held back: may be the beginning of a stop string
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from octavo.request import FinishReason, SamplingParams, TokenLogprobs
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.messages import Progress


class Delta(NamedTuple):
    """What one push added. Concatenated over all pushes each field is the whole answer, however it was cut."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # stop token id or stop string that ended it; None for the end of sequence
    error: str | None = None
    is_progress: bool = False  # tells of the prompt; nothing was added


class ChoiceOutput:
    """Turns the Progress of one choice into Deltas.

    A stop string ends the choice where it is first complete (the longest, if several end there). Tokens behind it are
    dropped from text, token_ids and logprobs; the caller then aborts the choice in the engine. A stop string must
    end behind the first `min_tokens` tokens. The prompt is never searched.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """prompt_ids: what the text continues, so that a leading space is kept; none for an answer in a chat.

        keep: special tokens that belong to the text.
        """
        continues = any(token not in tokenizer.special_ids for token in prompt_ids)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, continues, keep)
        self._params = params
        self._ends = tokenizer.eos_ids | frozenset(params.stop_token_ids)  # a grammar ends behind a token of its text
        self._longest_stop = max(map(len, params.stop), default=0)
        self._text = ""  # [sent, len)
        self.num_tokens = 0
        self.logprob: float | None = None  # of all tokens together, where they are scored
        self.finish_reason: FinishReason | None = None

    def push(self, progress: Progress) -> Delta:
        """Raises nothing; after the end every push gives an empty Delta."""
        if self.finish_reason is not None:
            return Delta("", [], [], None, None)
        if progress.finish_reason is None and not self._longest_stop:  # as most are: nothing to look for
            self.num_tokens += len(progress.token_ids)
            text = self._detokenizer.push(progress.token_ids)
            delta = Delta(text, progress.token_ids, progress.logprobs, None, None)
        else:
            delta = self._push(progress)
        if progress.logprob is not None:
            self.logprob = progress.logprob
        elif delta.logprobs:
            self.logprob = (self.logprob or 0.0) + sum(score.logprob for score in delta.logprobs)
        return delta

    def _push(self, progress: Progress) -> Delta:
        finish = progress.finish_reason
        stop_reason: int | str | None = None
        count = len(progress.token_ids)
        for i, token in enumerate(progress.token_ids):
            self.num_tokens += 1
            text = ""
            ends_here = finish is FinishReason.STOP and i == count - 1 and token in self._ends
            if ends_here and token in self._params.stop_token_ids:
                stop_reason = token
            if not ends_here or self._params.include_stop_str_in_output:
                text = self._detokenizer.push([token])
            match = self._find(text)
            if match is not None:
                return self._end_at(match, progress, i + 1)
        if finish is not None:
            match = self._find(self._detokenizer.finish())
            if match is not None:
                return self._end_at(match, progress, count)
            self.finish_reason = finish
        text = self._take(flush=finish is not None)
        return Delta(text, progress.token_ids, progress.logprobs, finish, stop_reason, progress.error)

    def _find(self, new: str) -> tuple[int, int, str] | None:
        """Append to the text; (end, start, stop string) of the match that is complete first, in characters of _text."""
        old = len(self._text)
        self._text += new
        if not new or not self._longest_stop or self.num_tokens <= self._params.min_tokens:
            return None
        best: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = self._text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _take(self, flush: bool) -> str:
        """Text that can no longer become part of a stop string."""
        keep = 0 if flush or not self._longest_stop else self._held()
        safe = len(self._text) - keep
        given, self._text = self._text[:safe], self._text[safe:]
        return given

    def _held(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            suffix = self._text[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._params.stop):
                return length
        return 0

    def _end_at(self, match: tuple[int, int, str], progress: Progress, num_kept: int) -> Delta:
        end, start, stop = match
        text = self._text[: end if self._params.include_stop_str_in_output else start]
        self.finish_reason = FinishReason.STOP
        return Delta(text, progress.token_ids[:num_kept], progress.logprobs[:num_kept], FinishReason.STOP, stop)


def best_of(outputs: Sequence[ChoiceOutput], n: int) -> list[int]:
    """Indices of the n candidates with the highest logprob per token, best first; of equal ones the first.

    That is what OpenAI's completions API calls the best. A candidate without tokens has no doubt in it: 0.
    """
    means = [(output.logprob or 0.0) / max(1, output.num_tokens) for output in outputs]
    return sorted(range(len(outputs)), key=lambda i: -means[i])[:n]
