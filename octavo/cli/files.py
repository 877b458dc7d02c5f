"""`octavo show`, `octavo diff` and `octavo pull`: what is in a model, whether it is computed right, and getting it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.local import resolve, tell
from octavo.cli.options import with_config
from octavo.config import EngineConfig


@with_config(EngineConfig, only=("isa", "activations", "kv_dtype", "max_num_seqs", "fuse", "reuse"))
def show(
    config: EngineConfig,
    all_layers: Annotated[bool, typer.Option("--all", help="Print every layer, also where layers are alike.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Token rows the memory is planned for.")] = 512,
) -> None:
    """Print the operations of a model and the memory they need.

    Example: octavo show demo
    """
    from octavo.backends.cpu import CpuBackend
    from octavo.graph.fuse import fuse
    from octavo.graph.plan import plan
    from octavo.graph.show import render
    from octavo.graph.verify import FUSED, verify
    from octavo.models import build_graph
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.formats import packed_bytes

    config, _ = resolve(config)
    checkpoint = open_checkpoint(Path(config.model))
    dots = CpuBackend(isa=config.isa, num_threads=1).bf16_dots
    graph = build_graph(checkpoint, config.activations, config.kv_dtype, config.max_model_len, dots)
    if config.fuse:
        graph = verify(fuse(graph, FUSED))
    rows = min(tokens, config.max_num_seqs)
    print(render(graph, plan(graph, tokens, rows, config.reuse), packed_bytes, all_layers), end="")


@with_config(EngineConfig, only=("isa", "num_threads", "activations", "kv_dtype"))
def diff(config: EngineConfig) -> None:
    """Compare the native kernels with the reference on a model.

    Operation by operation; exits with 1 at the first value out of tolerance. Example: octavo diff demo
    """
    from octavo.backends.cpu import CpuBackend
    from octavo.backends.diff import Checked
    from octavo.backends.diff import diff as compare
    from octavo.models import build_graph
    from octavo.weights.checkpoint import open_checkpoint

    config, name = resolve(config)
    checkpoint = open_checkpoint(Path(config.model))
    backend = CpuBackend(isa=config.isa, num_threads=config.num_threads, fuse=False, reuse=False)
    graph = build_graph(checkpoint, config.activations, config.kv_dtype, config.max_model_len, backend.bf16_dots)
    worst: dict[str, tuple[int, float]] = {}

    def note(checked: Checked) -> None:
        count, most = worst.get(checked.node.op, (0, 0.0))
        worst[checked.node.op] = count + 1, max(most, checked.worst)

    bad = compare(graph, checkpoint, backend, report=note)
    print(f"{name}: native kernels against the reference, difference in units of the tolerance")
    for op, (count, most) in worst.items():
        print(f"  {op:14} {count:6} values  worst {most:.3f}")
    if bad is not None:
        print(f"out of tolerance: {bad}")
        sys.exit(1)
    print("all within tolerance")


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id as owner/name, or 'demo'.")] = "demo",
) -> None:
    """Fetch a model, so that it is here when it is needed. Prints where it is.

    Example: octavo pull HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from octavo.weights.locate import locate

    print(locate(model, tell))
