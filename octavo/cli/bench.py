"""`octavo bench`: speed, with the workload spelled out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from octavo.cli.local import resolve
from octavo.cli.options import with_config
from octavo.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from octavo.bench.report import Result


class Options(NamedTuple):
    repeat: int
    num_prompts: int | None
    shared_len: int
    input_len: int | None
    output_len: int | None
    prompt_len: int
    rate: float | None
    seconds: float
    url: str | None
    api_key: str | None
    served_model: str | None


def _throughput(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import throughput

    yield throughput.measure(config, o.num_prompts or 64, o.input_len or 256, o.output_len or 128, o.repeat)


def _latency(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import latency

    yield latency.measure(config, o.input_len or 256, o.output_len or 128, o.repeat)


def _prefill(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import prefill

    yield prefill.measure(config, o.input_len or 512, o.repeat)


def _decode(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import decode

    yield decode.measure(config, o.num_prompts or 64, o.input_len or 320, o.repeat)


def _overhead(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import overhead

    yield from overhead.measure(config, o.num_prompts or 64, o.input_len or 256, o.output_len or 128)


def _serve(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench.serve import Server, Workload, measure

    load = Workload(o.num_prompts or 64, 0, o.input_len or 256, o.output_len or 128, o.rate)
    yield measure(config, Server(o.url, o.api_key, o.served_model), load, o.repeat)


def _prefix(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench.serve import Server, Workload, shared_prefix

    load = Workload(o.num_prompts or 32, o.shared_len, o.input_len or 64, o.output_len or 64)
    yield shared_prefix(config, Server(o.url, o.api_key, o.served_model), load, o.repeat)


def _startup(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import startup

    yield from startup.measure(config, o.repeat)


def _restart(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import restart

    yield restart.measure(config, o.repeat)


def _structured(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import structured

    yield structured.cost(config, o.num_prompts or 64, o.input_len or 256, o.output_len or 128, o.repeat)
    yield structured.slow_grammars(config, o.output_len or 128, o.repeat)


def _stall(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import stall

    yield stall.measure(config, o.prompt_len, o.repeat)


def _overload(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import overload

    yield overload.measure(config, o.seconds, o.repeat)


def _kernels(config: EngineConfig, o: Options) -> Iterator[Result]:
    from octavo.bench import kernels

    yield from kernels.measure(config, o.repeat)


WORKLOADS: dict[str, Callable[[EngineConfig, Options], Iterator[Result]]] = {
    "throughput": _throughput,
    "latency": _latency,
    "prefill": _prefill,
    "decode": _decode,
    "overhead": _overhead,
    "serve": _serve,
    "prefix": _prefix,
    "startup": _startup,
    "restart": _restart,
    "structured": _structured,
    "stall": _stall,
    "overload": _overload,
    "kernels": _kernels,
}


def _with_made(config: EngineConfig) -> EngineConfig:
    """With the path of a model that the bench makes, where it names one."""
    from octavo.bench.models import NAMES, made

    return dataclasses.replace(config, model=str(made(config.model))) if config.model in NAMES else config


@with_config(EngineConfig, first="workload")
def bench(
    config: EngineConfig,
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}, or all of them.")
    ] = "all",
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs; medians are printed.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the runs: .png, .svg or .pdf.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", metavar="N", help="Prompts at once: 64, prefix 32.", min=1)
    ] = None,
    shared_len: Annotated[
        int, typer.Option("--shared-len", metavar="N", help="prefix: tokens that all prompts share.", min=1)
    ] = 1024,
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len",
            metavar="N",
            help="Tokens of each prompt: 256, prefill 512, prefix 64. decode: the context, 320.",
            min=1,
        ),
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--output-len", metavar="N", help="Tokens of each answer: 128, prefix 64.", min=2)
    ] = None,
    prompt_len: Annotated[int, typer.Option("--prompt-len", metavar="N", help="stall: the long prompt.", min=1)] = 8000,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="X", help="serve: requests a second. Default: all at once.", min=0.001),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="overload: of each rate.", min=1)] = 60,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="serve, prefix: a server that runs, of any kind.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Of the server at URL.")] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", metavar="NAME", help="At URL. Default: the first that it serves.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a bound on time is not held.")] = False,
) -> None:
    """Measure throughput, one stream, a prompt, many streams, what a step and a stream cost beside the model, streams over
    HTTP, shared prefixes, the start, a restart, grammars, streams beside a long prompt, overload, and the kernels,
    which need no model.

    MODEL may also be one that is made for the purpose: demo-bf16, demo-q4_0, or random weights as 1b-q4_0, 1b-bf16 and
    1b-awq-g128.
    Examples: octavo bench throughput demo --json; octavo bench serve --url http://127.0.0.1:8080
    """
    from octavo.bench.plot import check_plot, draw
    from octavo.bench.report import as_table

    if workload not in (*WORKLOADS, "all"):
        raise ConfigError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)} and all")
    if plot is not None:
        check_plot(plot)
    name = url or config.model
    if workload == "kernels":
        name = workload
    elif url is None:
        config, name = resolve(_with_made(config))
    if url is not None and workload not in ("serve", "prefix"):
        raise ConfigError("--url goes with the workloads serve and prefix")
    options = Options(
        repeat, num_prompts, shared_len, input_len, output_len, prompt_len, rate, seconds, url, api_key, served_model
    )
    chosen = WORKLOADS if workload == "all" else [workload]
    results = [found for each in chosen for found in WORKLOADS[each](config, options)]
    if as_json:
        print(json.dumps({"model": name, "results": [r._asdict() for r in results]}, indent=2))
    else:
        as_table(name, results)
    if plot is not None:
        draw(plot, name, results)
    if check and not all(r.details.get("held", True) for r in results):
        raise typer.Exit(1)
