"""ChatFormat: how conversations are written for a model, and how its answers are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.request import ParameterError, Reasoning, SamplingParams, Structured
from octavo.text.chat_message import for_template
from octavo.text.parser import MessageParser
from octavo.text.reasoning import FORMATS, ReasoningFormat, detect_reasoning
from octavo.text.template import ChatTemplate, ChatTemplateError, compile_template, fault_of
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import FAMILIES, GENERIC, detect
from octavo.text.tools.generic import as_turns, instruct
from octavo.text.tools.grammar import answer_grammar
from octavo.text.tools.offer import Offer
from octavo.text.tools.shape import Shape

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that know no efforts
_OWN = ("messages", "tools", "documents", "add_generation_prompt", "reasoning_effort")  # fields, no template variables
_UNTRUSTED = ("user", "tool")  # roles
_HERE = "\ue000continues here\ue001"  # stands where a final message is to go on


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a request says about its conversation beside the messages."""

    offer: Offer = Offer()
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool = False
    reasoning_effort: str | None = None  # one of EFFORTS
    thinking: bool | None = None  # whether the model reasons before it answers; None: as the template does
    thinking_budget: int | None = None  # most reasoning tokens
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    parse_special: bool = False  # special tokens that a user or a tool writes become those tokens


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it, and what its answer is made of."""

    text: str
    continues: bool  # the answer goes on in the final message
    reasoning: Reasoning | None  # where its end can be seen and forced
    grammar: Callable[[Structured | None], Structured] | None  # of calls, beside what else the text must be
    guided: bool  # the grammar is needed although the text may be any
    keep: frozenset[int]  # special tokens that `parser` wants to see
    parser: type[MessageParser] | None  # None: all of the answer is content
    form: ReasoningFormat | None
    opened: bool  # the prompt has begun to reason
    tools: Mapping[str, Any]  # name -> schema of what may be called

    def params(self, given: SamplingParams) -> SamplingParams:
        """With what the conversation asks of sampling. Raises ParameterError, naming the field, where it cannot be had."""
        structured = given.structured
        if self.grammar is not None and (self.guided or structured is not None):
            structured = self.grammar(structured)
        wanted = structured is not None or (self.reasoning is not None and self.reasoning.budget is not None)
        if not wanted:
            return given
        return msgspec.structs.replace(given, structured=structured, reasoning=self.reasoning)

    def new_parser(self) -> MessageParser | None:
        """For one choice."""
        return self.parser(self.form, self.tools, self.opened) if self.parser is not None else None


class ChatFormat:
    """One per model. `tool_format` and `reasoning_format` are names of families, or auto: what the template shows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        """template: in place of the model's own."""
        self.tokenizer = tokenizer
        self._sources = {"default": template} if template is not None else tokenizer.chat_templates
        self._tool_format = tool_format
        self._specials = {i: token for i in tokenizer.special_ids if (token := tokenizer.id_to_token(i))}
        self.source = source = self._sources.get("default") or next(iter(self._sources.values()), "")
        if reasoning_format == "auto":
            self.reasoning = detect_reasoning(source)
        else:
            self.reasoning = next((form for form in FORMATS if form.name == reasoning_format), None)
        self.notices = [
            f"{fault}: chat requests are refused" + ("" if name == "default" else f" that would use it ({name})")
            for name, each in self._sources.items()
            if (fault := fault_of(each)) is not None
        ]
        """Lines for whoever starts the model: templates that are none, which a model without chat can do without."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """Raises ChatTemplateError or ParameterError, naming the field."""
        template = self._template(bool(options.offer.tools))
        family = self._family(template)
        text = self._render(template, family, messages, options)
        parser, shape = FAMILIES[family]
        if options.offer.mode == "none" and family != "harmony":
            parser = MessageParser
        form = None if family == "harmony" else self.reasoning
        opened, closed = self._state(form, text, messages, options)
        budget = options.thinking_budget
        if options.thinking is False and family == "harmony":
            raise ParameterError("thinking", "the model always thinks: thinking cannot be disabled")
        if options.thinking is False and form is not None and not closed:
            can_be_forced = self._token(form.ends[0]) is not None
            budget = 0 if can_be_forced or _switch(template) is None else None  # else the template's switch must do
        calls = options.offer.mode != "none" or shape.thought is not None
        return ChatPrompt(
            text,
            options.continue_final_message,
            self._reasoning_tokens(form, opened, closed, budget),
            functools.partial(answer_grammar, shape, options.offer, self.tokenizer) if calls else None,
            options.offer.guided,
            self._visible((*parser.markers, *(form.markers if form is not None else ()))),
            None if parser is MessageParser and form is None else parser,
            form,
            opened,
            {tool.name: tool.schema for tool in options.offer.allowed},
        )

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a prompt. add_special_tokens: what the tokenizer asks for; None: BOS alone, where the template
        wrote none."""
        tokenizer = self.tokenizer
        if add_special_tokens is not None:
            return tokenizer.encode(text, add_special_tokens)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            return [tokenizer.bos_id, *ids]
        return ids

    def unread(self, options: ChatOptions) -> list[str]:
        """Template variables of a request that the template does not look at."""
        reads = self._template(bool(options.offer.tools)).reads
        return [name for name in options.variables if name not in reads]

    def _template(self, tools: bool) -> ChatTemplate:
        source = (self._sources.get("tool_use") if tools else None) or self._sources.get("default")
        if source is None:
            raise ChatTemplateError("the model has no chat template; use completions, or name a model made for chat")
        return compile_template(source)

    def _family(self, template: ChatTemplate) -> str:
        if self._tool_format != "auto":
            return self._tool_format
        return detect(template.source)

    def _render(
        self, template: ChatTemplate, family: str, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> str:
        generate = options.add_generation_prompt
        if options.continue_final_message and generate:
            raise ParameterError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude one another"
            )
        if options.documents and "documents" not in template.reads:
            raise ParameterError("documents", "the model's chat template takes no documents")
        for name in _OWN:
            if name in options.variables:
                raise ParameterError("chat_template_kwargs", f"chat_template_kwargs has {name}, a field of its own")
        switch = _switch(template)
        told = [for_template(message, template.source) for message in messages]
        if not options.parse_special:
            told = [self._guarded(message) for message in told]
        if options.continue_final_message:
            told = _continued(told)
        variables: dict[str, Any] = {
            **self.tokenizer.special_token_names,
            "tools": None,
            "documents": options.documents or None,
            **self._effort(template, options.reasoning_effort),
            **({} if options.thinking is None or switch is None else {switch: options.thinking}),
            **options.variables,
            "add_generation_prompt": not options.continue_final_message if generate is None else generate,
        }
        tools = options.offer.tools
        if family == GENERIC and (tools or any(message.get("tool_calls") for message in told)):
            told = as_turns(told)
        if not tools:
            text = template.render({**variables, "messages": told})
        elif family != GENERIC and "tools" in template.reads:
            text = template.render({**variables, "messages": told, "tools": [tool.given for tool in tools]})
        else:
            text = _instructed(template, variables, told, options.offer, FAMILIES[family][1])
        if not options.continue_final_message:
            return text
        before, found, _ = text.rpartition(_HERE)
        if not found:
            raise ChatTemplateError("the chat template does not write the final message, which cannot be continued")
        return before

    def _guarded(self, message: dict[str, Any]) -> dict[str, Any]:
        """What users and tools say becomes no special token, whatever it looks like."""
        content = message.get("content")
        if message.get("role") not in _UNTRUSTED or not isinstance(content, str):
            return message
        return {**message, "content": self.tokenizer.guarded(content)}

    def _effort(self, template: ChatTemplate, effort: str | None) -> dict[str, Any]:
        """The template variables that ask for this effort."""
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise ParameterError("reasoning_effort", f"reasoning_effort must be one of {', '.join(EFFORTS)}")
        if "reasoning_effort" in template.reads:
            return {"reasoning_effort": effort}
        if (switch := _switch(template)) is not None:
            return {switch: effort != "none"}
        if effort == "none" and self.reasoning is None:
            return {}
        raise ParameterError("reasoning_effort", "the model's chat template takes no reasoning_effort")

    def _state(
        self, form: ReasoningFormat | None, text: str, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> tuple[bool, bool]:
        """Whether the prompt ends within reasoning, and whether it ends behind it."""
        if form is None:
            return False, True
        if options.continue_final_message:
            content = str(messages[-1].get("content"))
            start = max(content.rfind(mark) for mark in form.starts)
            opened = start >= 0 and start > max(content.rfind(mark) for mark in form.ends)
            return opened, not opened
        tail = text.rstrip()
        return tail.endswith(form.starts), tail.endswith(form.ends)

    def _reasoning_tokens(
        self, form: ReasoningFormat | None, opened: bool, closed: bool, budget: int | None
    ) -> Reasoning | None:
        start = end = None
        if form is not None:
            start = self._token(form.starts[0])
            end = self._token(form.ends[0])
        if form is None or end is None or (start is None and not opened):
            if budget is not None:
                raise ParameterError(
                    "thinking_token_budget",
                    "thinking_token_budget needs a model that marks its reasoning with tokens, as <think> and </think>",
                )
            return None
        if closed:
            return None
        return Reasoning(start=None if opened else start, end=end, budget=budget)

    def _token(self, mark: str) -> int | None:
        """The token that a mark is, or begins with."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        whole = len(ids) == 1 or (ids and ids[0] in self.tokenizer.special_ids)
        return ids[0] if whole else None

    def _visible(self, markers: Sequence[str]) -> frozenset[int]:
        """Special tokens that the markers are, or hold."""
        return frozenset(i for i, token in self._specials.items() if any(token in marker for marker in markers))


def _switch(template: ChatTemplate) -> str | None:
    """The variable that turns reasoning on and off."""
    return next((name for name in _SWITCHES if name in template.reads), None)


def _instructed(
    template: ChatTemplate, variables: dict[str, Any], messages: list[dict[str, Any]], offer: Offer, shape: Shape
) -> str:
    """The text where the template does not show tools."""
    try:
        return template.render({**variables, "messages": instruct(messages, offer.tools, shape)})
    except ChatTemplateError:  # perhaps it takes no system messages
        if messages and messages[0]["role"] == "system":
            raise
        return template.render({**variables, "messages": instruct(messages, offer.tools, shape, system=False)})


def _continued(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    final = messages[-1] if messages else {}
    content = final.get("content")
    if final.get("role") != "assistant" or not isinstance(content, str) or final.get("tool_calls"):
        raise ParameterError(
            "continue_final_message", "continue_final_message needs a final message of the assistant with text content"
        )
    return [*messages[:-1], {**final, "content": content + _HERE}]
