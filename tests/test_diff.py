"""The native backend against the reference, node by node, at every level that this machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import _native
from octavo.backends.cpu import CpuBackend
from octavo.backends.diff import Checked, diff
from octavo.models import build_graph
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import Checkpoint
from tests.random_model import WINDOWS, joined, random_model
from tests.small_fixtures import EXPERTS, FAMILIES, GGUF

MODELS = ["arch/llama", "arch/llama_rope_yarn", *FAMILIES, *EXPERTS, *GGUF]
LEVELS = _native.isa_levels()


def check(checkpoint: Checkpoint, activations: str, isa: str, kv_dtype: str = "auto") -> None:
    backend = CpuBackend(isa=isa, num_threads=2, fuse=False, reuse=False)
    graph = build_graph(checkpoint, activations, kv_dtype, bf16_dots=backend.bf16_dots)
    seen: list[Checked] = []
    found = diff(graph, checkpoint, backend, report=seen.append)
    assert found is None, str(found)
    assert {c.node.op for c in seen} == {n.op for n in graph.nodes} - {"kv_write"}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_level(data: Path, model: str, isa: str) -> None:
    check(open_checkpoint(data / model), "auto", isa)


@pytest.mark.parametrize("activations", ["bf16", "f32"])
@pytest.mark.parametrize("model", GGUF)
def test_strict_modes(data: Path, model: str, activations: str) -> None:
    check(open_checkpoint(data / model), activations, LEVELS[-1])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("stored", ["F32", "BF16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 33, "intermediate_size": 31, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 70, "vocab_size": 33},
        {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 1056},
        {"head_dim": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ],
)
def test_odd_shapes(shape: dict[str, Any], stored: str, isa: str) -> None:
    check(random_model(stored=stored, num_hidden_layers=1, **shape), "auto", isa)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_heads_rotated_in_part(share: float, isa: str) -> None:
    model = random_model(head_dim=32, num_attention_heads=3, num_key_value_heads=1)
    check(joined(model, partial_rotary_factor=share), "auto", isa)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("activations", ["auto", "f32"])
@pytest.mark.parametrize("model", ["arch/llama", "gguf/tiny-llama-q4_1.gguf"])
def test_int8_caches(data: Path, model: str, activations: str, isa: str) -> None:
    check(open_checkpoint(data / model), activations, isa, "int8")


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("window", [1, 16, 40])
def test_windows(window: int, kv_dtype: str, isa: str) -> None:
    check(random_model(**{**WINDOWS, "sliding_window": window}), "auto", isa, kv_dtype)


@pytest.mark.long
def test_demo(demo: Path) -> None:
    check(open_checkpoint(demo), "auto", LEVELS[-1])
