"""Chat templates: Jinja, sandboxed, in the dialect of Hugging Face models."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.text.tokenizer import Tokenizer


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses the messages. Carries the template's own message."""


def render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **kwargs: Any
) -> str:
    """The prompt text of a conversation.

    `kwargs` are variables of the template (`tools`, `enable_thinking`, ...). Message contents that are lists of text
    parts are joined by newlines. Raises ChatTemplateError.
    """
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") if kwargs.get("tools") else None
    source = source or templates.get("default")
    if source is None:
        raise ChatTemplateError("the model has no chat template; use completions, or name a model made for chat")
    variables = {**tokenizer.special_token_names, "tools": None, "documents": None, **kwargs}
    try:
        variables["messages"] = [_with_text(message) for message in messages]
        variables["add_generation_prompt"] = add_generation_prompt
        return _compile(source).render(variables)
    except ChatTemplateError:
        raise
    except Exception as error:  # templates run on whatever the messages hold: any error is theirs
        raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **kwargs: Any
) -> list[int]:
    """Token ids of `render`."""
    return encode_rendered(tokenizer, render(tokenizer, messages, add_generation_prompt, **kwargs))


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered conversation. BOS is added where the tokenizer asks for it and the template wrote none."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def _with_text(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f'a message is {{"role": ..., "content": ...}}; got {message!r:.80}')
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(f"content parts must be of type text; got {kind!r}")
    return {**message, "content": "\n".join(part["text"] for part in content)}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own text, for training; here its body is plain output."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise ChatTemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
