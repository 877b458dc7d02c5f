"""Configs of checkpoints as they are published, without their weights: served whole, or refused for a true reason.

tests/data/published.json has the keys and sizes of each (the factors of LongRoPE are others, and most have their first
layers alone) beside what transformers makes of them: all tensors with their shapes, the scale of attention, the rotation
(`scripts/published-tensors`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from octavo.graph import ops
from octavo.graph.ir import Graph
from octavo.models import ARCHITECTURES, build_graph
from octavo.weights.address import Addressed
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo, base_name
from octavo.weights.text_model import ARCHITECTURES as WITH_IMAGES
from octavo.weights.text_model import text_model
from tests.folded import unfolded

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data/published.json").read_text())


class Hollow:
    """A `Checkpoint` whose tensors have shapes alone."""

    generation: dict[str, Any] = {}
    notices: list[str] = []

    def __init__(self, name: str, config: dict[str, Any], tensors: dict[str, list[int]]) -> None:
        self.path, self.config, self._shapes = name, dict(config), unfolded(tensors)
        self.config.pop("quantization_config", None)  # the formats' to read: tests/test_quant_layouts.py

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return TensorInfo(self._shapes[name], "BF16", self.path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        raise AssertionError("graphs are built of shapes")

    def release(self, name: str) -> None:
        raise AssertionError("nothing was read")

    def files(self) -> list[FileIdentity]:
        return []


@functools.cache
def graph_of(name: str) -> tuple[Graph, Hollow]:
    entry = PUBLISHED[name]
    hollow = Hollow(name, entry["config"], entry["tensors"])
    return build_graph(Addressed(text_model(hollow))), hollow


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_served(name: str) -> None:
    """Every tensor has the shape that the config asks for, and every one of the language model is read (by `build_graph`).
    Attention is scaled and positions are rotated as transformers does."""
    graph, hollow = graph_of(name)
    entry = PUBLISHED[name]
    read = {base_name(part.name) for value in graph.weights() for part in value.parts}
    if entry["config"]["architectures"][0] not in WITH_IMAGES and graph.causal:
        derived = ("embed_positions.weight", ".bias") if name.startswith("Eleuther") else ()
        assert set(hollow.names()) - read <= {n for n in hollow.names() if n.endswith(derived)}
    attentions = [node.attrs for node in graph.nodes if isinstance(node.attrs, ops.Attention)]
    if "scale" in entry and len({a.scale for a in attentions}) == 1:
        assert attentions[0].scale == pytest.approx(entry["scale"], rel=1e-6)
    if "rope" in entry:
        pairs, *frequencies, scale = entry["rope"]
        scaling = entry["config"].get("rope_scaling") or {}
        scale = scaling.get("short_mscale", scale)  # what transformers has of it follows the length of the text
        own = {(len(f), f[len(f) // 3], f[len(f) // 2], f[-1], a.scale) for a in rotations(graph) for f in [a.inv_freq]}
        assert any(each == pytest.approx((pairs, *frequencies, scale), rel=2e-6, abs=0) for each in own), own


def rotations(graph: Graph) -> list[ops.Rope]:
    return [node.attrs for node in graph.nodes if isinstance(node.attrs, ops.Rope)]


WINDOWS = {
    "mistralai/Mistral-7B-v0.1": {4096: 8}, "google/gemma-2-2b-it": {4096: 4, None: 4},
    "google/gemma-3-1b-it": {512: 7, None: 1}, "google/gemma-3-27b-it": {1024: 52, None: 10},
    "allenai/Olmo-3-7B-Instruct": {4096: 6, None: 2}, "openai/gpt-oss-20b": {128: 3, None: 3},
    "CohereForAI/c4ai-command-r7b-12-2024": {4096: 6, None: 2}, "LGAI-EXAONE/EXAONE-4.0-32B": {4096: 6, None: 2},
    "Qwen/Qwen2.5-7B-Instruct with YaRN": {None: 8}, "microsoft/Phi-3-mini-4k-instruct": {2047: 8},
    "bigcode/starcoder2-3b": {4096: 8}, "mistralai/Mistral-Small-3.1-24B-Instruct-2503": {None: 8},
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_published_models(name: str) -> None:
    assert {group.window: len(group.layers) for group in graph_of(name)[0].groups} == WINDOWS[name]


def test_drafts_of_tokens_are_left_out() -> None:
    entry = PUBLISHED["baidu/ERNIE-4.5-21B-A3B-PT"]
    hollow = Hollow("p", entry["config"], {**entry["tensors"], "model.mtp_linear_proj.0.weight": [2560, 5120]})
    assert max(node.layer for node in build_graph(Addressed(text_model(hollow))).nodes) == 5
    hollow = Hollow("p", entry["config"], {**entry["tensors"], "model.linear_proj.0.weight": [2560, 5120]})
    with pytest.raises(CheckpointError, match=r"no place to tensor 'model\.linear_proj"):
        build_graph(Addressed(text_model(hollow)))


BOUNDS = {
    "microsoft/Phi-3-mini-128k-instruct": 4096, "microsoft/Phi-3.5-MoE-instruct": 4096, "openai-community/gpt2": 1024,
    "mistralai/Ministral-3-8B-Instruct-2512": 16384, "BAAI/bge-m3": 8192, "google-bert/bert-base-uncased": 512,
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_contexts_that_end(name: str) -> None:
    graph, _ = graph_of(name)
    assert (graph.max_positions, graph.bounded) == (BOUNDS[name], True)


def test_most_families_are_there() -> None:
    """Those without an entry have a fixture whose config is a published one's, or are spellings of one that has. Of NanoChat
    no published config was at hand: its fixture is what transformers saves."""
    seen = {name for entry in PUBLISHED.values() for name in entry["config"]["architectures"]}
    same = {f"{n}{end}" for n in ("Bert", "Roberta", "XLMRoberta", "Camembert", "ModernBert")
            for end in ("Model", "ForMaskedLM", "ForSequenceClassification")}  # fmt: skip
    others = {
        "Ernie4_5_ForCausalLM",
        "MptForCausalLM",
        "NanoChatForCausalLM",
        "PhimoeForCausalLM",
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
    }
    assert set(ARCHITECTURES) - seen <= same | others
    assert set(WITH_IMAGES) - seen == {"Qwen2VLForConditionalGeneration"}


REFUSED = {
    "state": ("JambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM",
              "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration",
              "Zamba2ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM",
              "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "Rwkv7ForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxForCausalLM", "KimiLinearForCausalLM"),
    "chunks": ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    "encoder reads": ("T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration"),
    "supported: BertModel, .*LlamaForCausalLM": ("InternLM2ForCausalLM", "ChatGLMModel", "QWenLMHeadModel", "DbrxForCausalLM", "BaichuanForCausalLM", "Gemma3nForConditionalGeneration", "GptNeoForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_served_says_what_it_would_need(why: str) -> None:
    for name in REFUSED[why]:
        with pytest.raises(CheckpointError, match=rf"architecture {name} is not supported.*{why}"):
            build_graph(text_model(Hollow("p", {"architectures": [name], "vocab_size": 9}, {})))
    for name in ARCHITECTURES:
        assert not any(name in names for names in REFUSED.values())
