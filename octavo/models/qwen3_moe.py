"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in place of the feed-forward block of most layers."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window", "num_experts", "num_local_experts"))
    c = parts.read({"head_dim": 128, **config}, checkpoint.path)
    route = ops.Route(
        count(config, "num_experts_per_tok", checkpoint.path),
        "softmax",
        flag(config, "norm_topk_prob", checkpoint.path),
    )
    e = experts.Experts(
        experts.read_count(config, checkpoint.path, "num_experts", "num_local_experts"),
        count(config, "moe_intermediate_size", checkpoint.path),
        c.act,
        route,
    )
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.upper_windows(config, c.layers, checkpoint.path))
    sparse = experts.sparse_layers(config, c.layers, checkpoint.path)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        x = attention(b, c, p, groups[b.layer], x)
        h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
        if sparse[b.layer]:
            scores = b.linear(h, {p + "mlp.gate": e.number}, name="scores")
            y = experts.block(b, e, experts.find(checkpoint, p, e, c.hidden), h, scores)
        else:
            y = parts.mlp(b, c, p + "mlp.", h)
        x = b.add(x, y)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def attention(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps, c.head_dim)

    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    return b.add(x, parts.attention(b, c, p + "self_attn.", group, h, norm=norm))
