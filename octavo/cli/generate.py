"""`octavo generate`: texts that are continued, one or a file of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from octavo.cli.local import LocalModel
from octavo.cli.options import MaxTokens, TopK, TopP, with_config
from octavo.config import ConfigError, EngineConfig, offline

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

FORMATS = ("text", "lines", "jsonl")


@with_config(EngineConfig)
def generate(
    config: EngineConfig,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue. Default: read from standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read prompts from here; '-': standard input.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="text: all of it is one prompt. lines: a prompt a line. jsonl: a line is a text, or an object with prompt "
            "or messages and other fields of the API. Blank lines are passed over. Default: jsonl for *.jsonl, else text.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to standard output.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write each answer as a line of JSON, as the API has it, in the prompts' order."),
    ] = False,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="X", help="0 always takes the likeliest; 1 draws as the model says."),
    ] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. May be repeated.")
    ] = None,
) -> None:
    """Continue a text and print what comes as it comes; or many texts at once.

    Example: octavo generate demo "The capital of France is", or octavo generate demo -f prompts.jsonl --json
    """
    text, format = _input(prompt, file, format)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "stop": stop}
    fields = {name: value for name, value in {**given, "seed": config.seed}.items() if value is not None}
    requests = [_request(entry, fields) for entry in _entries(text, format)]
    single = format == "text" and not as_json
    with LocalModel(config if single else offline(config)) as model, _opened(output) as out:
        if single:
            model.stream(COMPLETIONS, requests[0][1], lambda chunk: _write(out, "".join(_texts(chunk))))
            _write(out, "\n")
        elif as_json:
            model.answer_all(requests, lambda answer: _write(out, msgspec.json.encode(answer).decode() + "\n"))
        else:
            model.answer_all(requests, lambda answer: _write(out, "".join(f"{text}\n" for text in _texts(answer))))


def _input(prompt: str | None, file: Path | None, format: str | None) -> tuple[str, str]:
    """The text with the prompts, and its format. Raises ConfigError."""
    if format is None:
        format = "jsonl" if file is not None and file.suffix == ".jsonl" else "text"
    elif format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    if prompt is not None:
        if file is not None:
            raise ConfigError("give PROMPT or --file, not both")
        return prompt, format
    if file is None and sys.stdin.isatty():
        raise ConfigError('give the text to continue: octavo generate MODEL "Once upon a time"')
    from_stdin = file is None or str(file) == "-"
    try:
        raw = sys.stdin.buffer.read() if file is None or from_stdin else file.read_bytes()
        return raw.decode(), format
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{'standard input' if from_stdin else file} is not UTF-8: {e.reason} at {e.start}") from None


def _entries(text: str, format: str) -> Iterator[str | dict[str, Any]]:
    """Prompts, or objects with the fields of a request. Raises ConfigError naming the line."""
    if format == "text":
        yield text
        return
    found = False
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        found = True
        if format == "lines":
            yield line
            continue
        try:
            yield msgspec.json.decode(line, type=str | dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as e:
            raise ConfigError(f"line {number} is neither a JSON text nor an object: {e}") from None
    if not found:
        raise ConfigError("there are no prompts in the input")


def _request(entry: str | dict[str, Any], fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body; what the entry says wins over the flags."""
    if isinstance(entry, str):
        return COMPLETIONS, {**fields, "prompt": entry}
    if entry.get("stream"):
        raise ConfigError("stream goes with one text: answers to a file come whole")
    if "max_completion_tokens" in entry:
        fields = {name: value for name, value in fields.items() if name != "max_tokens"}
    return (CHAT if "messages" in entry else COMPLETIONS), {**fields, **entry}


def _texts(answer: dict[str, Any]) -> Iterator[str]:
    """Of the choices of an answer or a chunk."""
    for choice in answer["choices"]:
        yield choice["message"]["content"] or "" if "message" in choice else choice["text"]


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as out:
        yield out


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()
