"""`octavo quantize`: a float model as a quantised file for this and other engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from octavo.cli.local import resolve, tell
from octavo.cli.options import with_config
from octavo.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from octavo.quantize.convert import Output, Report
    from octavo.weights.spec import Checkpoint

WINDOW = 512
"""Tokens of a text for calibration, and of a window of those that are scored."""

_HELD_OUT = 8
"""Of the texts every so manieth is scored, where no other text is named."""


@with_config(EngineConfig, only=("num_threads",))
def quantize(
    config: EngineConfig,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="A new directory, or for GGUF formats a new .gguf file.")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="w4a16, w8a16, w8a8, fp8, or a GGUF type: q4_0, q4_k ...")
    ] = "w4a16",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="rtn|gptq",
            help="rtn: to the nearest. gptq: such that the outputs of a text change least.",
        ),
    ] = "rtn",
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", help="Weights that share a scale: 32, 64 or 128. w4a16: 128."),
    ] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="w4a16: with zero points.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="NAME", help="A module that stays as it is, with * and ?. May be repeated."),
    ] = None,
    fallback: Annotated[
        str | None,
        typer.Option("--fallback", metavar="TYPE", help="GGUF: for matrices whose rows are no multiple of its blocks."),
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(
            "--embeddings", metavar="TYPE", help="GGUF: of embeddings and head. Default: they stay as they are."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="gptq: a text. Default: one that the model writes itself."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help=f"gptq: pieces of {WINDOW} tokens of the text.", min=1)
    ] = 32,
    damping: Annotated[
        float,
        typer.Option("--damping", metavar="X", help="gptq: added to the diagonal, as a part of its mean.", min=1e-6),
    ] = 0.1,
    act_order: Annotated[
        bool,
        typer.Option("--act-order/--no-act-order", help="gptq: columns with the largest inputs first. [default: on]"),
    ] = True,
    eval_file: Annotated[
        Path | None,
        typer.Option(
            "--eval", metavar="FILE", help="Text for the perplexity before and after. Default: a part of the other."
        ),
    ] = None,
) -> None:
    """Write a quantised copy of an F32, F16 or BF16 model, and tell what it lost. A GGUF file may be quantised already.

    Example: octavo quantize HuggingFaceTB/SmolLM2-135M-Instruct small.gguf --format q4_0 --method gptq
    """
    from octavo.models import build_graph
    from octavo.quantize.convert import Method, convert
    from octavo.quantize.request import Request, RequestError, open_output, written_beside
    from octavo.weights.checkpoint import open_checkpoint

    if method not in ("rtn", "gptq"):
        raise ConfigError(f"method must be rtn or gptq; got {method!r}")
    if out is None:
        raise ConfigError("name the model and OUT, what is to be written: octavo quantize MODEL OUT")
    request = Request(format, group_size, asymmetric, tuple(keep or ()), fallback, embeddings)
    try:
        request.check()
        if request.is_gguf != (out.suffix == ".gguf"):
            raise RequestError(
                f"OUT is {out}: {format} is written to a {'.gguf file' if request.is_gguf else 'directory'}"
            )
        config, name = resolve(config)
        source = Path(config.model)
        checkpoint = open_checkpoint(source)
        graph = build_graph(checkpoint, "f32")
        with (
            written_beside(out, is_folder=not request.is_gguf) as scratch,
            open_output(checkpoint, graph, scratch, request) as output,  # what it cannot hold is told before all else
        ):
            _warn(checkpoint, output)
            texts = _texts(config, calibration, eval_file, samples, method == "gptq")
            before = _perplexity(config, source, texts.scored)
            with _bar(f"{name} → {format}") as report:
                chosen = Method(texts.calibration, act_order, damping, config.num_threads)
                sizes = convert(checkpoint, graph, output, chosen, report)
                output.finish()
    except RequestError as error:
        raise ConfigError(str(error)) from None
    after = _perplexity(config, out, texts.scored)
    _table(f"{name} → {out}", [
        ("weights quantised", f"{sizes.num_weights / 1e6:,.1f} M in {sizes.num_matrices} matrices"),
        ("their bits a weight", f"{8 * sizes.num_bytes / sizes.num_weights:.2f}"),
        ("size of all tensors", f"{_tensor_bytes(checkpoint) / 1e6:,.1f} MB → {output.num_bytes / 1e6:,.1f} MB"),
        ("perplexity", f"{before:.4f} → {after:.4f} ({after / before - 1:+.2%})" if texts.scored else "not measured"),
        ("of", texts.about),
    ])  # fmt: skip


def _warn(checkpoint: Checkpoint, output: Output) -> None:
    """Where matrices lose a second time."""
    from octavo.quantize.at_load import FLOATS

    again = {checkpoint.info(name).source for name in output.names if output.fit(name)} - set(FLOATS)
    if again:
        tell(f"matrices are quantised already ({', '.join(sorted(again))}): what they lose now comes on top of that")


class _Texts(NamedTuple):
    calibration: list[list[int]]
    scored: list[int]
    about: str  # what is scored


def _texts(
    config: EngineConfig, calibration: Path | None, eval_file: Path | None, samples: int, calibrates: bool
) -> _Texts:
    """Raises ConfigError where a text is too short."""
    from octavo.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(config.model))

    def read(path: Path, least: int) -> list[list[int]]:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        if len(ids) < least:
            raise ConfigError(f"{path} has {len(ids)} tokens, at least {least} are needed")
        return [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]

    scored = [] if eval_file is None else read(eval_file, 2)
    if calibration is not None:
        pieces = read(calibration, 2 * WINDOW)
    elif calibrates:
        pieces = _written(config, samples + -(-samples // (_HELD_OUT - 1)) * (eval_file is None))
    else:
        pieces = []
    if eval_file is None:
        scored = [piece for i, piece in enumerate(pieces) if i % _HELD_OUT == 0]
        pieces = [piece for i, piece in enumerate(pieces) if i % _HELD_OUT]
    pieces = [piece for piece in pieces if len(piece) == WINDOW][:samples] if calibrates else []
    tokens = [token for piece in scored for token in piece]
    kind = eval_file or (f"a part of {calibration}" if calibration else "a part of what the model wrote")
    return _Texts(pieces, tokens, f"{kind}, {len(tokens)} tokens" if tokens else "no text was named (--eval)")


def _written(config: EngineConfig, count: int) -> list[list[int]]:
    """Texts of WINDOW tokens that the model draws, the same at every time."""
    from octavo.llm import LLM
    from octavo.quantize.sentences import BEGINNINGS
    from octavo.request import SamplingParams

    tell(f"the model writes {count} texts of {WINDOW} tokens for calibration")
    with LLM(config.model, num_threads=config.num_threads, max_model_len=WINDOW) as llm:
        prompts = [llm.get_tokenizer().encode(BEGINNINGS[i % len(BEGINNINGS)]) for i in range(count)]
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, seed=i, max_tokens=WINDOW - len(ids), ignore_eos=True)
            for i, ids in enumerate(prompts)
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [ids + list(output.outputs[0].token_ids) for ids, output in zip(prompts, outputs, strict=True)]


def _perplexity(config: EngineConfig, model: Path, token_ids: Sequence[int]) -> float:
    """NaN where there is nothing to score."""
    from octavo.llm import LLM
    from octavo.perplexity import perplexity

    if not token_ids:
        return float("nan")
    tell(f"perplexity of {len(token_ids)} tokens with {model}")
    with LLM(str(model), num_threads=config.num_threads, max_model_len=WINDOW) as llm:
        return perplexity(llm, token_ids, WINDOW, use_tqdm=True)


def _tensor_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.read(name).data.nbytes for name in checkpoint.names())


@contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
