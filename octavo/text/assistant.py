"""MessageOutput: the message of one chat choice as its text arrives."""

from __future__ import annotations

from octavo.request import FinishReason
from octavo.text.chat import ChatPrompt
from octavo.text.detokenizer import Detokenizer
from octavo.text.message import MessageDelta
from octavo.text.output import Delta
from octavo.text.tokenizer import Tokenizer


class MessageOutput:
    """Turns the Deltas of one choice into MessageDeltas, and counts the tokens it reasons with."""

    def __init__(self, tokenizer: Tokenizer, prompt: ChatPrompt, skip_special_tokens: bool = True) -> None:
        self._parser = prompt.new_parser()
        self._counting = prompt.new_parser() if self._parser is not None and self._parser.may_reason else None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, keep=prompt.keep)
        self.num_reasoning_tokens = 0

    def push(self, delta: Delta) -> MessageDelta:
        self._count(delta.token_ids)
        if self._parser is None:
            return MessageDelta(delta.text)
        message = self._parser.feed(delta.text)
        if delta.finish_reason is None:
            return message
        last = self._parser.finish()
        return MessageDelta(
            message.content + last.content, message.reasoning + last.reasoning, message.tool_calls + last.tool_calls
        )

    def pieces(self, delta: Delta) -> list[MessageDelta]:
        """`push` in order: within a piece reasoning comes first, then content, then calls. However the text arrives, the
        pieces of all deltas join to the same parts in the same order."""
        if self._parser is None or len(delta.text) < 2:
            return [self.push(delta)]
        rest = delta._replace(text="")
        pieces = [MessageDelta()]
        for part in (*(Delta(character, [], [], None, None) for character in delta.text), rest):
            news, last = self.push(part), pieces[-1]
            if (last.tool_calls and (news.content or news.reasoning)) or (last.content and news.reasoning):
                pieces.append(news)
            else:
                pieces[-1] = last.followed_by(news)
        return pieces

    def finish_reason(self, delta: Delta) -> str | None:
        """`tool_calls` for an answer that ended by itself and has some."""
        if delta.finish_reason is FinishReason.STOP and self._parser is not None and self._parser.num_calls:
            return "tool_calls"
        return delta.finish_reason

    def _count(self, token_ids: list[int]) -> None:
        """Token by token, since text is held back: where reasoning ends does not depend on how tokens arrive."""
        for token in token_ids:
            if self._counting is None:
                return
            before = self._counting.thinks
            self._counting.feed(self._detokenizer.push([token]))
            self.num_reasoning_tokens += before or self._counting.thinks
            if not self._counting.may_reason:
                self._counting = None
