"""Chat templates: Jinja, sandboxed, in the dialect of Hugging Face models."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.request import ParameterError


class ChatTemplateError(ParameterError):
    """The model has no chat template, or its template refuses the messages. Carries the template's own message."""

    def __init__(self, message: str) -> None:
        super().__init__("messages", message)


class ChatTemplate:
    """One template. `reads`: the variables that it looks at and does not set."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError where the source is no template."""
        self.source = source
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.reads = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except Exception as error:  # Jinja's parser raises what it likes on odd sources
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(f"the model's chat template is no template: {line}{error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except ChatTemplateError:
            raise
        except Exception as error:  # templates run on whatever the messages hold: any error is theirs
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def read_template(given: str) -> str:
    """The source of a template that is given as such, or as the path of its file. Raises ParameterError, also for one that
    cannot be read as a template."""
    source = given
    if "{{" not in given and "{%" not in given:
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise ParameterError(
                "chat_template", f"chat_template is neither a template nor a file: {given:.200}: {cause}"
            ) from None
    try:
        _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ParameterError("chat_template", f"chat_template is no template: line {error.lineno}: {error}") from None
    return source


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def fault_of(source: str) -> str | None:
    """Why no conversation can be written with a template; None where it can be tried."""
    try:
        compile_template(source)
    except ChatTemplateError as error:
        return " ".join(str(error).split())
    return None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own text, for training; here its body is plain output."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


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
