"""LoRA adapters of random matrices, as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.weights.formats import f32_to_bf16

CONFIG: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "base", "bias": "none", "corda_config": None,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 16, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": [], "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""As PEFT 0.17 writes it."""

Targets = Mapping[str, tuple[int, int]]
"""{module: (output, input features)}"""


def tensors_of(
    targets: Targets, rank: int | Mapping[str, int], seed: int, size: float = 0.5
) -> dict[str, np.ndarray[Any, Any]]:
    """A and B of each module; the delta is about `size` times an input of unit variance before the scale."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (n, k) in targets.items():
        r = rank if isinstance(rank, int) else rank[module]
        a, b = rng.standard_normal((r, k)) * k**-0.5, rng.standard_normal((n, r)) * size * r**-0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def save_adapter(
    path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], stored: str = "F32", **changes: Any
) -> Path:  # fmt: skip
    """The adapter as a directory; returns `path`. stored: F32, F16 or BF16."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    header, data = {}, b""
    for name, tensor in tensors.items():
        bits = f32_to_bf16(tensor) if stored == "BF16" else tensor.astype(np.float16 if stored == "F16" else np.float32)
        offsets = [len(data), len(data) + bits.nbytes]
        header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": offsets}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def random_adapter(
    path: Path, targets: Targets, seed: int = 0, rank: int = 8, only: Collection[str] = (), stored: str = "F32",
    size: float = 0.5, **changes: Any,
) -> Path:  # fmt: skip
    """An adapter for all targets, or those whose names end in one of `only`, with alpha twice its rank."""
    chosen = {name: shape for name, shape in targets.items() if not only or name.rpartition(".")[2] in only}
    names = sorted({name.rpartition(".")[2] for name in chosen})
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": names, **changes}
    return save_adapter(path, tensors_of(chosen, rank, seed, size), stored, **options)
