"""Granite (IBM 2024): Llama with constant factors of embeddings, attention scores, blocks and logits (after Yang et al. 2022)."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import positive, refuse_unknown
from octavo.weights.spec import Checkpoint

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=_FACTORS)
    embedded, attended, residual, divisor = (positive(config, key, checkpoint.path, 1.0) for key in _FACTORS)
    c = parts.read(config, checkpoint.path)._replace(scale=attended)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.scale(b.embed(embedding), embedded)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, residual, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, scale=1 / divisor))


def layer(b: Builder, c: parts.Shape, p: str, group: int, residual: float, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    y = parts.attention(b, c, p + "self_attn.", group, h)
    x = b.add(x, b.scale(y, residual))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    return b.add(x, b.scale(parts.mlp(b, c, p + "mlp.", h), residual))
