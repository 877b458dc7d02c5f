"""`octavo bench`: speed, with the workload spelled out."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from octavo.cli.local import resolve
from octavo.cli.options import with_config
from octavo.config import ConfigError, EngineConfig

WORKLOADS = ("throughput", "latency", "startup", "restart", "structured", "stall", "overload")


@with_config(EngineConfig, first="workload")
def bench(
    config: EngineConfig,
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}, or all of them.")
    ] = "all",
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs; medians are printed.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    num_prompts: Annotated[int, typer.Option("--num-prompts", metavar="N", help="throughput: prompts.", min=1)] = 64,
    input_len: Annotated[int, typer.Option("--input-len", metavar="N", help="Tokens of each prompt.", min=1)] = 256,
    output_len: Annotated[int, typer.Option("--output-len", metavar="N", help="Tokens of each answer.", min=2)] = 128,
    prompt_len: Annotated[int, typer.Option("--prompt-len", metavar="N", help="stall: the long prompt.", min=1)] = 8000,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="overload: of each rate.", min=1)] = 60,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where a bound on time is not held.")] = False,
) -> None:
    """Measure throughput, one stream, the start, a restart, grammars, streams beside a long prompt, and overload.

    Example: octavo bench throughput demo --json
    """
    from octavo.bench import latency, overload, restart, stall, startup, structured, throughput
    from octavo.bench.report import as_table

    if workload not in (*WORKLOADS, "all"):
        raise ConfigError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)} and all")
    config, name = resolve(config)
    results = []
    if workload in ("throughput", "all"):
        results.append(throughput.measure(config, num_prompts, input_len, output_len, repeat))
    if workload in ("latency", "all"):
        results.append(latency.measure(config, input_len, output_len, repeat))
    if workload in ("startup", "all"):
        results.append(startup.measure(config, repeat))
    if workload in ("restart", "all"):
        results.append(restart.measure(config, repeat))
    if workload in ("structured", "all"):
        results.append(structured.cost(config, num_prompts, input_len, output_len, repeat))
        results.append(structured.slow_grammars(config, output_len, repeat))
    if workload in ("stall", "all"):
        results.append(stall.measure(config, prompt_len, repeat))
    if workload in ("overload", "all"):
        results.append(overload.measure(config, seconds))
    if as_json:
        print(json.dumps({"model": name, "results": [r._asdict() for r in results]}, indent=2))
    else:
        as_table(name, results)
    if check and not all(r.details.get("held", True) for r in results):
        raise typer.Exit(1)
