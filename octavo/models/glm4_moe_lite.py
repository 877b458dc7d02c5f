"""GLM-4.7-Flash (Z.ai 2026): DeepSeek V3's layers, whose config may list which of them are dense."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType
from octavo.models import deepseek
from octavo.models.config import count
from octavo.weights.spec import Checkpoint, CheckpointError


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    """Latents are normalised with the epsilon of the other norms, where transformers takes 1e-6 whatever the config says."""
    dense = dense_layers(config, checkpoint.path)
    usual = {"norm_topk_prob": True, "routed_scaling_factor": 1.8, **config, "first_k_dense_replace": dense}
    deepseek.build(b, usual, checkpoint, kv_dtype, "sigmoid", 2)


def dense_layers(config: dict[str, Any], path: str) -> int:
    """How many layers there are before the first with experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return count(config, "first_k_dense_replace", path, default=1, least=0)
    dense: int = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise CheckpointError(f"{path}: config has mlp_layer_types with a dense layer behind one with experts")
    return dense
