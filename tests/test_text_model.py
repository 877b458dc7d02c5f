"""Checkpoints that take images, too: their language model is served as if it were alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models import build_graph
from octavo.quantize.convert import Method, convert
from octavo.quantize.request import Request, open_output
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.end_tokens import end_tokens_of_directory
from octavo.weights.spec import CheckpointError
from octavo.weights.text_model import _GEMMA3, text_model
from tests.random_model import InMemory, random_model, save
from tests.test_models import QWEN2, logits_of

ENCODER = {"hidden_size": 32, "num_hidden_layers": 1}
IDS = np.random.default_rng(1).integers(50, size=19)


def plain(kind: str) -> InMemory:
    if kind.startswith("qwen2"):
        return random_model(**QWEN2)
    return random_model(architectures=["MistralForCausalLM"], sliding_window=5)


def wrapped(model: InMemory, name: str, kind: str, layout: str) -> InMemory:
    """In the layout of the first releases, of later ones, or of Qwen2-VL's first."""
    inner = {key: value for key, value in model.config.items() if key != "architectures"} | {"model_type": kind}
    whole: dict[str, Any] = {"architectures": [name], "vision_config": ENCODER}
    whole |= inner if layout == "flat" else {"model_type": "whole", "text_config": inner}
    vision = {"first": "vision_tower.layers.0.weight", "later": "model.vision_tower.layers.0.weight"}
    tensors = {vision.get(layout, "visual.blocks.0.weight"): np.ones((4, 4), np.float32)}
    for tensor, values in model.tensors.items():
        later = tensor.replace("model.", "model.language_model.", 1)
        tensors[{"first": f"language_model.{tensor}", "later": later, "flat": tensor}[layout]] = values
    return InMemory(whole, tensors)


MISTRAL, QWEN = "Mistral3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [(MISTRAL, "mistral", "first"), (MISTRAL, "mistral", "later"), (QWEN, "qwen2_5_vl", "flat"),
     (QWEN, "qwen2_5_vl_text", "later"), ("Qwen2VLForConditionalGeneration", "qwen2_vl", "flat")],
)  # fmt: skip
def test_the_language_model_is_that_of_its_own_checkpoint(name: str, kind: str, layout: str, tmp_path: Path) -> None:
    alone = plain(kind)
    found = open_checkpoint(save(wrapped(alone, name, kind, layout), tmp_path / "model"))
    assert sorted(found.names()) == sorted(alone.names())
    np.testing.assert_array_equal(logits_of(found, IDS), logits_of(alone, IDS))
    assert any(f"{name} is served as a language model alone: 1 tensors" in notice for notice in found.notices)


def test_one_position_for_the_three_of_images() -> None:
    for rope in ({"type": "mrope", "mrope_section": [2, 3, 3]},
                 {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}):  # fmt: skip
        model = wrapped(plain("qwen2_5_vl"), QWEN, "qwen2_5_vl", "flat")
        model.config["rope_scaling"] = rope
        np.testing.assert_array_equal(logits_of(text_model(model), IDS), logits_of(plain("qwen2"), IDS))


def test_gemma_3(fixtures: Path, tmp_path: Path) -> None:
    """`text_config` says little: the rest is what Gemma 3 has in all sizes, or nearly."""
    source = open_checkpoint(fixtures / "arch/gemma3_text")
    said = {key: value for key, value in source.config.items() if value != _GEMMA3.get(key)}
    assert len(said) < len(source.config)
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**said, "model_type": "gemma3_text"}}
    given = {f"language_model.{name}": name for name in source.names()}

    class Wrapped(InMemory):
        def info(self, name: str) -> Any:
            return source.info(given[name])

        def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
            return source.read(given[name], start, stop)

    model = text_model(Wrapped(whole, dict.fromkeys(given)))  # type: ignore[arg-type]
    np.testing.assert_array_equal(logits_of(model, IDS), logits_of(source, IDS))


def test_other_language_models_are_refused() -> None:
    model = wrapped(plain("mistral"), MISTRAL, "mamba", "first")
    with pytest.raises(
        CheckpointError, match="with a language model of type 'mamba' is not supported; supported: mistral"
    ):
        text_model(model)
    for odd in (None, 3, [], {"model_type": 4}):
        model.config["text_config"] = odd
        with pytest.raises(CheckpointError, match="with a language model of type"):
            text_model(model)


def test_what_is_quantised_is_the_language_model(tmp_path: Path) -> None:
    model = wrapped(random_model(architectures=["MistralForCausalLM"], hidden_size=64), MISTRAL, "mistral", "first")
    source = open_checkpoint(save(model, tmp_path / "model"))
    graph = build_graph(source, "f32")
    (tmp_path / "out").mkdir()
    with open_output(source, graph, tmp_path / "out", Request("w8a16", keep=("*.down_proj",))) as output:
        convert(source, graph, output, Method(), lambda *told: None)
        output.finish()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"] and "text_config" not in config
    assert sorted(open_checkpoint(tmp_path / "out").names()) == sorted(source.names())


def test_end_tokens_and_templates_where_such_checkpoints_have_them(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "tokenizers/tiny-spm", tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": [4]}}))
    assert {3, 4} <= end_tokens_of_directory(tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    described = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}
    file.write_text(json.dumps(described))
    (tmp_path / "model/chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(tmp_path / "model").chat_template == "{{ messages[0].content }}"
