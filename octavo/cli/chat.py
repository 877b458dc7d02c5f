"""`octavo generate` and `octavo chat`: a model in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.local import LocalModel
from octavo.cli.options import with_config
from octavo.config import ConfigError, EngineConfig
from octavo.request import ParameterError, SamplingParams

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[
    float,
    typer.Option("--temperature", metavar="X", help="0 always takes the likeliest token; 1 draws as the model says."),
]
TopP = Annotated[float, typer.Option("--top-p", metavar="X", help="Draw among the likeliest that make up this share.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="N", help="Draw among this many likeliest. 0: all.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. May be repeated.")
]


@with_config(EngineConfig)
def generate(
    config: EngineConfig,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue. Default: read from standard input.")
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
) -> None:
    """Continue a text and print what comes as it comes.

    Example: octavo generate demo "The capital of France is"
    """
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError('give the text to continue: octavo generate MODEL "Once upon a time"')
        prompt = sys.stdin.read()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop or [])
    with LocalModel(config) as model:
        model.generate(model.tokenizer.encode(prompt), params, _write, continues=True)
        _write("\n")


@with_config(EngineConfig)
def chat(
    config: EngineConfig,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told first.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
) -> None:
    """Talk to a model in the terminal. It remembers the conversation until you leave.

    Example: octavo chat demo
    """
    from octavo.text.chat import ChatFormat, ChatOptions

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    first = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    with LocalModel(config) as model:
        form = ChatFormat(model.tokenizer)
        if interactive:
            import readline  # noqa: F401  gives input() its editing and history

            print(f"{model.name}. /clear forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves.")
        messages = list(first)
        while (line := _ask("> " if interactive else "")) is not None:
            if line == "/clear":
                messages = list(first)
            if not line or line == "/clear":
                continue
            messages.append({"role": "user", "content": line})
            written: list[str] = []

            def write(text: str, written: list[str] = written) -> None:
                written.append(text)
                _write(text)

            try:
                prompt_ids = form.encode(form.prompt(messages, ChatOptions()).text)
                model.generate(prompt_ids, params, write, continues=False)
            except ParameterError as e:
                print(f"{e} (/clear begins anew)", file=sys.stderr)
                messages.pop()
                continue
            except KeyboardInterrupt:
                if not interactive:
                    raise
            _write("\n")
            messages.append({"role": "assistant", "content": "".join(written)})


def _ask(prompt: str) -> str | None:
    """A line; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
