"""What a request asks of its text (`request.Structured`), in the language of llguidance, and why it is refused.

Runs in the process of `trial`, for the text comes from anybody.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from octavo.request import Structured

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"\x20|\n[\x20\x09]{0,32}"
"""Between the parts of JSON, at most once at a place: a small model could go on with blanks for ever."""

MAX_NESTING = 100
"""Levels of a JSON schema; llguidance's reader gives up at 128."""

LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,  # 4 ms of one mask
    step_max_items=20_000,  # 1 ms of one mask
    max_lexer_states=20_000,  # 40 MB
    verbose_errors=False,
)


class Refused(ValueError):
    """The client's fault: a schema or grammar that is wrong, or asks for what cannot be honoured."""


def grammar_of(structured: Structured) -> str:
    """A grammar for `LLMatcher`. Raises Refused where the text is not even well formed."""
    text = structured.text
    if structured.kind == "json_schema":
        return _of_schema(text)
    if structured.kind == "regex":
        regex = regex_to_lark(_unanchored(text), "dws")  # \d, \w and \s are ASCII, as in JSON schemas
        return str(LLMatcher.grammar_from_lark(f"start: /{regex}/"))
    if structured.kind == "choice":
        return str(LLMatcher.grammar_from_lark(_of_choices(text)))
    if structured.kind == "gbnf":
        try:
            text = any_to_lark(text)
        except (GbnfToLarkError, RecursionError) as error:
            raise Refused(f"the grammar is not GBNF: {error}") from None
    return str(LLMatcher.grammar_from_lark(text))


def compiled(structured: Structured, grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher before its first token, the mask of which it has computed once. Raises Refused."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise Refused(_why(structured, grammar, matcher.get_error()))
    ignored = [w for w in matcher.get_grammar_warnings() if "special_token" not in w]
    if ignored:  # x-guidance asked for lenience
        raise Refused(f"the {structured.kind} has what cannot be honoured: {'; '.join(ignored)}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(f"no token can begin the {structured.kind}: {_first_line(matcher.get_error())}")
    return matcher


def _of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise Refused(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise Refused(f"the schema is nested deeper than {MAX_NESTING} levels") from None
    if not isinstance(schema, dict | bool):
        raise Refused("a JSON schema is an object, true or false")
    if _depth(schema) > MAX_NESTING:
        raise Refused(f"the schema is nested deeper than {MAX_NESTING} levels")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance")
    compact = isinstance(options, dict) and "whitespace_flexible" in options
    defaults: JsonCompileOptions = {} if compact else {"whitespace_pattern": WHITESPACE}
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=defaults))


def _of_choices(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise Refused(f"the choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise Refused("the choices must be a list of texts that are not empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _unanchored(regex: str) -> str:
    """The whole output is matched anyway."""
    regex = regex.removeprefix("^")
    return re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", regex)


def _depth(value: object) -> int:
    """Levels of lists and objects."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
    return depth


def _why(structured: Structured, grammar: str, error: str) -> str:
    """All that is not supported, where that is the cause: llguidance stops at the first."""
    if structured.kind == "json_schema":
        lenient = LLMatcher.grammar_from_json_schema(
            json.loads(grammar)["grammars"][0]["json_schema"], overrides={"lenient": True}
        )
        failed, found = LLMatcher.validate_grammar_with_warnings(lenient, limits=LIMITS)
        if not failed and found:
            found = list(dict.fromkeys(message.replace("Unimplemented keys:", "the keywords") for message in found))
            return f"the JSON schema has what is not supported: {'; '.join(found)}"
    what = {"json_schema": "JSON schema", "lark": "grammar", "gbnf": "grammar"}.get(structured.kind, structured.kind)
    return f"the {what} cannot be compiled: {_first_line(error)}"


def _first_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ".join(lines[:4])[:400]
