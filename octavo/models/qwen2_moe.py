"""Qwen2-MoE (Yang et al. 2024): Qwen2 with routed experts and a shared one behind a gate; some layers may be dense."""

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
    c = parts.read({"qkv_bias": True, **config}, checkpoint.path)
    c = c._replace(qkv_bias=flag({"qkv_bias": True, **config}, "qkv_bias", checkpoint.path), o_bias=False)
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
    shared = c._replace(intermediate=count(config, "shared_expert_intermediate_size", checkpoint.path))
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
            y = mixture(b, shared, e, experts.find(checkpoint, p, e, c.hidden), p + "mlp.", h)
        else:
            y = parts.mlp(b, c, p + "mlp.", h)
        x = b.add(x, y)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def attention(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    return b.add(x, parts.attention(b, c, p + "self_attn.", group, h))


def mixture(b: Builder, shared: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]; one product gives the scores of the experts and of the gate of the shared one
    gates = b.linear(h, {p + "gate": e.number, p + "shared_expert_gate": 1}, name="scores")
    scores, gate = b.split(gates, e.number, 1)
    y = experts.block(b, e, w, h, scores)
    return b.add(y, b.mul(parts.mlp(b, shared, p + "shared_expert.", h), b.act(gate, "sigmoid")))
