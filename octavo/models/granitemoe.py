"""Granite-MoE (IBM 2024): Granite with a mixture of experts in place of the feed-forward block."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, positive, refuse_unknown
from octavo.weights.spec import Checkpoint

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=(*_FACTORS, "num_local_experts"))
    embedded, attended, residual, divisor = (positive(config, key, checkpoint.path, 1.0) for key in _FACTORS)
    c = parts.read(config, checkpoint.path)._replace(scale=attended)
    route = ops.Route(count(config, "num_experts_per_tok", checkpoint.path), "softmax_top")
    e = experts.Experts(experts.read_count(config, checkpoint.path, "num_local_experts"), c.intermediate, c.act, route)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.scale(b.embed(embedding), embedded)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        x = layer(b, c, e, find(checkpoint, p, e, c.hidden), p, group, residual, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, scale=1 / divisor))


def find(checkpoint: Checkpoint, p: str, e: experts.Experts, hidden: int) -> experts.Weights:
    own = p + "block_sparse_moe."
    if f"{own}input_linear.weight" not in checkpoint:
        return experts.find(checkpoint, p, e, hidden)
    return experts.joined(checkpoint, e, hidden, f"{own}input_linear.weight", f"{own}output_linear.weight")


def layer(
    b: Builder, c: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, group: int, residual: float, x: Value
) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    x = b.add(x, b.scale(parts.attention(b, c, p + "self_attn.", group, h), residual))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    scores = b.linear(h, {p + "block_sparse_moe.router.layer": e.number}, name="scores")
    return b.add(x, b.scale(experts.block(b, e, w, h, scores), residual))
