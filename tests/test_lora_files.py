"""Adapters in PEFT's layout: what their config means, and refusals that name the key or the tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.weights.adapter import read_adapter
from octavo.weights.adapter_config import AdapterError
from octavo.weights.formats import dequantise
from tests.random_adapter import random_adapter, save_adapter, tensors_of

TARGETS = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(3)
    for module, shape in (
        ("self_attn.q_proj", (48, 32)), ("self_attn.v_proj", (16, 32)), ("mlp.gate_proj", (40, 32)), ("mlp.down_proj", (32, 40)),
    )
}  # fmt: skip
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def chosen(*ends: str, layers: tuple[int, ...] = (0, 1, 2)) -> dict[str, tuple[int, int]]:
    return {n: shape for n, shape in TARGETS.items() if n.endswith(ends) and int(n.split(".")[2]) in layers}


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_matrices_and_scale(stored: str, tmp_path: Path) -> None:
    tensors = tensors_of(chosen("q_proj"), 4, seed=0)
    adapter = read_adapter(
        save_adapter(tmp_path, tensors, stored, r=4, lora_alpha=6, target_modules=["q_proj"]), TARGETS, 8
    )
    assert sorted(adapter.modules) == sorted(chosen("q_proj")) and adapter.rank == 4
    module = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert (module.rank, module.rows, module.cols, module.scale) == (4, 48, 32, 1.5)
    error = {"F32": 0, "F16": 2.0**-11, "BF16": 2.0**-8}[stored]
    for data, end, cols in ((module.a, "A", 32), (module.b, "B", 4)):
        np.testing.assert_allclose(dequantise(stored, data, cols), tensors[f"{Q}{end}.weight"], rtol=error)


def test_ranks_and_scales_by_pattern(tmp_path: Path) -> None:
    """By the end of a name, or by a regular expression; scaled by the rank of the module, or its root."""
    ranks = {name: 2 if "layers.1." in name else 6 if name.endswith("down_proj") else 4 for name in TARGETS}
    config: dict[str, Any] = {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": {r".*\.layers\.1\..*": 2, "down_proj": 6},
        "alpha_pattern": {"mlp.gate_proj": 12.0},
    }  # fmt: skip
    for rslora in (False, True):
        path = save_adapter(tmp_path, tensors_of(TARGETS, ranks, seed=0), use_rslora=rslora, **config)
        for name, module in read_adapter(path, TARGETS, 8).modules.items():
            alpha = 12.0 if name.endswith("gate_proj") else 8.0
            assert module.rank == ranks[name]
            assert module.scale == alpha / (math.sqrt(module.rank) if rslora else module.rank)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, chosen("q_proj", "down_proj")),
        ({"target_modules": r".*\.(q|v)_proj"}, chosen("q_proj", "v_proj")),
        ({"target_modules": ["self_attn.v_proj", "model.layers.2.mlp.down_proj"]}, chosen("v_proj") | chosen("down_proj", layers=(2,))),
        ({"target_modules": "all-linear", "exclude_modules": ["gate_proj"]}, chosen("q_proj", "v_proj", "down_proj")),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 2]}, chosen("q_proj", layers=(0, 2))),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, chosen("q_proj", layers=(1,))),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1.*"}, chosen("q_proj", layers=(0, 2))),
    ],
)  # fmt: skip
def test_modules(config: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    """Exactly those that PEFT would adapt: with one tensor less or more, the adapter is refused."""
    tensors = tensors_of(found, 8, seed=0)
    assert set(read_adapter(save_adapter(tmp_path, tensors, **config), TARGETS, 8).modules) == set(found)
    first = next(iter(found))
    less = {name: t for name, t in tensors.items() if f".{first}." not in name}
    with pytest.raises(AdapterError, match=rf"{first}.lora_A.weight' is missing, though target_modules ask for it"):
        read_adapter(save_adapter(tmp_path, less, **config), TARGETS, 8)
    other = next(name for name in TARGETS if name not in found)
    more = tensors | tensors_of({other: TARGETS[other]}, 8, seed=1)
    with pytest.raises(AdapterError, match=rf"{other}.lora_A.weight' is of a module that target_modules do not name"):
        read_adapter(save_adapter(tmp_path, more, **config), TARGETS, 8)


def test_a_module_in_parts(tmp_path: Path) -> None:
    """Each part has A of the whole and its own rows of B, also where a weight is stored the other way round."""
    a, b = np.arange(8.0, dtype=np.float32).reshape(1, 8), np.arange(24.0, dtype=np.float32).reshape(24, 1)
    for names in (["[0:4%12]", "[4:8%12]", "[8:12%12]"], [".T[0:10]", ".T[10:24]"], [".T"], ["[0::2]", "[1::2]"]):
        parts = {f"h.0.attn.c_attn{name}": (0, 8) for name in names}
        rows = {part: np.arange(24) for part in parts}
        if "%" in names[0]:
            rows = {part: np.arange(24).reshape(2, 3, 4)[:, i].ravel() for i, part in enumerate(parts)}
        elif ".T[" in names[0]:
            rows = dict(zip(parts, (np.arange(10), np.arange(10, 24)), strict=True))
        elif "::" in names[0]:
            rows = dict(zip(parts, (np.arange(0, 24, 2), np.arange(1, 24, 2)), strict=True))
        parts = {part: (len(rows[part]), 8) for part in parts}
        start = "base_model.model.transformer.h.0.attn.c_attn.lora_"  # the checkpoint's names may lack a first name
        path = save_adapter(tmp_path, {f"{start}A.weight": a, f"{start}B.weight": b}, r=1, target_modules=["c_attn"])
        adapter = read_adapter(path, parts, 8)
        assert set(adapter.modules) == set(parts)
        for part, module in adapter.modules.items():
            np.testing.assert_array_equal(dequantise("F32", module.a, 8), a)
            np.testing.assert_array_equal(dequantise("F32", module.b, 1)[:, 0], rows[part])
    for names in (["[0:4]", "[2:22]"], ["[0:8].T", "[8:24]"]):
        with pytest.raises(AdapterError, match="is stored in another order in this model"):
            read_adapter(path, {f"h.0.attn.c_attn{names[0]}": (4, 8), f"h.0.attn.c_attn{names[1]}": (20, 8)}, 8)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    digests = [
        read_adapter(random_adapter(tmp_path / name, TARGETS, seed, rank=4, lora_alpha=alpha), TARGETS, 8).digest
        for name, seed, alpha in (("a", 1, 8), ("b", 1, 8), ("c", 2, 8), ("d", 1, 16))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, r"peft_type = 'LOHA' is not supported \(served: LORA\)"),
    ({"peft_type": None}, "peft_type is missing"),
    ({"bias": "all"}, "bias = 'all' is not supported"),
    ({"use_dora": True}, "use_dora = True is not supported"),
    ({"use_qalora": True}, "use_qalora = True"),
    ({"lora_bias": True}, "lora_bias = True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported \(it must be absent\)"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    ({"megatron_config": {"a": 1}}, "megatron_config"),
    ({"a_new_switch": True}, "a_new_switch = True is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": "("}, r"target_modules has '\(', no regular expression"),
    ({"target_modules": [1]}, "expected a list of names, or a regular expression"),
    ({"layers_to_transform": ["a"]}, "layers_to_transform is"),
    ({"r": 0}, "r has 0, expected a whole number above 0"),
    ({"r": 2.5}, "r has 2.5"),
    ({"lora_alpha": "x"}, "lora_alpha has 'x', expected a number above 0"),
    ({"rank_pattern": [1]}, "rank_pattern is"),
    ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern has 'x'"),
    (
        {"r": 16, "lora_alpha": 32},
        r"q_proj has rank 16; this server takes adapters of rank 8 at most \(max_lora_rank\)",
    ),
    ({"r": 4, "lora_alpha": 32}, r"q_proj.lora_A.weight has shape \(8, 32\), model and config ask for \(4, 32\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_configs_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = random_adapter(tmp_path, TARGETS, only=["q_proj"], **change)
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(path, TARGETS, 8)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    good = tensors_of(chosen("q_proj"), 8, seed=0)

    def refused(message: str, tensors: dict[str, Any], stored: str = "F32") -> None:
        with pytest.raises(AdapterError, match=message):
            read_adapter(save_adapter(tmp_path, tensors, stored, target_modules=["q_proj"]), TARGETS, 8)

    square = np.zeros((8, 8), np.float32)
    for name in ("base_model.model.lm_head.lora_A.weight", "base_model.model.model.embed_tokens.lora_embedding_A",
                 Q + "magnitude_vector", "base_model.model.score.weight", Q + "B.bias", "model.layers.0.self_attn.q_proj.lora_A.weight",
                 "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"):  # fmt: skip
        refused("has no place in this model", good | {name: square})
    refused(
        r"lora_A.weight has shape \(8, 31\), model and config ask for \(8, 32\)",
        good | {Q + "A.weight": np.zeros((8, 31))},
    )
    refused(
        r"lora_B.weight has shape \(47, 8\), model and config ask for \(48, 8\)",
        good | {Q + "B.weight": np.zeros((47, 8))},
    )
    for value in (np.inf, np.nan):
        for stored in ("F32", "F16", "BF16"):
            bad = good[Q + "B.weight"].copy()
            bad[5, 3] = value
            refused("lora_B.weight has a value that is infinite or no number", good | {Q + "B.weight": bad}, stored)
    refused("lora_B.weight' is missing", {n: t for n, t in good.items() if n != Q + "B.weight"})
    refused("tensor .* is missing, though target_modules", {})
    twice = {name.replace("model.model.layers", "model.layers"): tensor for name, tensor in good.items()}
    refused("is the second name of one module of this model, model.layers.", good | twice)


def test_files_that_are_refused(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = random_adapter(tmp_path / name, TARGETS)
        (path / name).write_bytes((path / name).read_bytes()[:-20])
        with pytest.raises(AdapterError, match=name):
            read_adapter(path, TARGETS, 8)
        (path / name).unlink()
        (path / "adapter_model.bin").touch()
        with pytest.raises(AdapterError, match=f"{name} is missing; found adapter_model.bin"):
            read_adapter(path, TARGETS, 8)
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path / "nothing", TARGETS, 8)
