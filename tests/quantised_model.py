"""Llamas whose projections are quantised, with random codes, as directories that can be opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.quant_writers import Raw, Rng, Written, gptq, save_raw
from tests.random_model import CONFIG, random_tensor, shapes

Write = Callable[[str, Rng, int, int], Written | None]
"""(module, rng, rows, columns) -> how it is written; None: as float32."""


def save_quantised(path: Path, quantization: dict[str, Any], write: Write, seed: int = 0, **changes: Any) -> Path:
    """`changes` are those of random_model.CONFIG."""
    config, rng = {**CONFIG, **changes}, np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        module = name.removesuffix(".weight")
        written = write(module, rng, *shape) if module.endswith("_proj") else None
        if written is None:
            tensors[name] = Raw("F32", random_tensor(rng, name, shape))
        else:
            tensors |= {module + end: raw for end, raw in written.tensors.items()}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "quantization_config": quantization}))
    save_raw(path / "model.safetensors", tensors)
    return path


ACT_ORDER = {"hidden_size": 64, "intermediate_size": 96}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}


_ORDERS = {"o_proj": 1, "gate_proj": 2, "up_proj": 3, "down_proj": 4}


def with_act_order(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Queries, keys and values are sorted alike; gate and up are not, so that they cannot be one weight."""
    return _sorted(module, rng, rows, cols, _ORDERS)


def sorted_alike(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Parts of one weight are sorted alike, as GPTQ sorts them."""
    return _sorted(module, rng, rows, cols, {**_ORDERS, "up_proj": _ORDERS["gate_proj"]})


def _sorted(module: str, rng: Rng, rows: int, cols: int, orders: dict[str, int]) -> Written:
    stem = module.rpartition(".")[2]
    order = np.random.default_rng(orders.get(stem, 0))
    return gptq(rng, rows, cols, 4, 32, symmetric=stem in ("q_proj", "gate_proj"), act_order=order)
