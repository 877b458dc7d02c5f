"""GGUF files of published checkpoints as llama.cpp's converter writes them, without their weights: read, and the same model.

tests/data/published_gguf.json has the metadata of each config of published.json, the shapes of its tensors, and the values
of those that belong to the metadata (`scripts/published-gguf`).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.graph import ops
from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.weights.address import Addressed
from octavo.weights.gguf_checkpoint import hf_name
from octavo.weights.gguf_config import GgufConfig
from octavo.weights.hf_config import ModelConfig
from octavo.weights.spec import CheckpointError
from tests.folded import unfolded
from tests.test_published import Hollow, graph_of, rotations

FILES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/published_gguf.json").read_text())


class HollowGguf:
    """What `GgufConfig` asks of a file."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.metadata = {"general.architecture": entry["architecture"], **entry["metadata"]}
        self.tensors: dict[str, Any] = {n: SimpleNamespace(shape=s) for n, s in unfolded(entry["tensors"]).items()}
        for name, values in entry["tables"].items():
            data = np.array(values, np.float32).view(np.uint8)
            file = SimpleNamespace(data=data)
            self.tensors[name] = SimpleNamespace(shape=(len(values),), file=file, start=0, stop=len(data), source="F32")

    def size(self, key: str) -> int:
        return 0


def graph_of_file(name: str, entry: dict[str, Any] | None = None) -> Graph:
    entry = entry or FILES[name]
    found = GgufConfig(HollowGguf(entry), name)  # type: ignore[arg-type]
    tensors = {hf_name(n, found.family, name): list(shape) for n, shape in unfolded(entry["tensors"]).items()}
    return build_graph(Addressed(Hollow(name, ModelConfig(found.values, name), tensors)))


def described(graph: Graph) -> dict[str, Any]:
    """What of a graph does not depend on the layout of its matrices."""
    attentions = [node.attrs for node in graph.nodes if isinstance(node.attrs, ops.Attention)]
    return {
        "heads": [(a.heads, a.kv_heads, a.head_dim, a.scale, a.softcap) for a in attentions],
        "windows": [a.window for a in attentions],
        "positions": (graph.max_positions, graph.bounded),
        "vocabulary": graph.vocab_size,
    }


WINDOW, CONTEXT, FACTOR = "window", "context", "factor"
LOST = {
    "mistralai/Mistral-7B-v0.1": WINDOW, "bigcode/starcoder2-3b": WINDOW, "THUDM/glm-4-9b-chat-hf": CONTEXT,
    "CohereForAI/c4ai-command-r-v01": CONTEXT, "tencent/Hunyuan-7B-Instruct": CONTEXT,
    "microsoft/Phi-3.5-MoE-instruct": FACTOR,
}  # fmt: skip
"""What the converter leaves out or changes: windows that llama.cpp does not have, the length for which a model was made, and
the factor of cos and sin where it is not LongRoPE's."""
RERANKER = "BAAI/bge-reranker-v2-m3"


@pytest.mark.parametrize("name", [name for name in FILES if name != RERANKER])
def test_files_of_published_models(name: str) -> None:
    own, want = graph_of_file(name), graph_of(name)[0]
    mine, theirs = described(own), described(want)
    lost = LOST.get(name)
    keys = [key for key in mine if key != {WINDOW: "windows", CONTEXT: "positions"}.get(str(lost))]
    assert [mine[key] for key in keys] == [theirs[key] for key in keys]
    assert len(keys) == 4 or any(mine[key] != theirs[key] for key in mine), "nothing is lost"
    for one, other in zip(rotations(own), rotations(want), strict=True):
        assert one.inv_freq == pytest.approx(other.inv_freq, rel=1e-5, abs=0)
        assert one.neox == other.neox
        assert (one.scale == pytest.approx(other.scale, rel=1e-5)) == (lost != FACTOR)


def test_a_reranker_is_refused_by_its_labels() -> None:
    with pytest.raises(
        CheckpointError, match=r"metadata bert\.classifier\.output_labels = \['LABEL_0'\] is not supported"
    ):
        graph_of_file(RERANKER)


def test_layers_for_drafts_are_left_out() -> None:
    """GLM-4.5's files count them among the blocks."""
    name = "zai-org/GLM-4.5-Air"
    entry = FILES[name]
    draft = {
        "blk.6.attn_norm.weight": [4096],
        "blk.6.nextn.eh_proj.weight": [4096, 8192],
        "blk.6.nextn.enorm.weight": [4096],
    }
    assert described(graph_of_file(name, {**entry, "tensors": {**entry["tensors"], **draft}})) == described(
        graph_of(name)[0]
    )
    with pytest.raises(CheckpointError, match=r"'blk\.6\.next\.enorm\.weight' has no known meaning"):
        graph_of_file(name, {**entry, "tensors": {**entry["tensors"], "blk.6.next.enorm.weight": [4096]}})


def test_scales_that_are_not_ones_of_the_family() -> None:
    name = "mistralai/Ministral-3-8B-Instruct-2512"
    entry = FILES[name]
    other = {"mistral3.rope.scaling.yarn_ext_factor": 0.5}
    with pytest.raises(CheckpointError, match=r"mistral3\.rope\.scaling\.yarn_ext_factor is not supported"):
        graph_of_file(name, {**entry, "metadata": {**entry["metadata"], **other}})
