"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in place of the feed-forward block."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window", "num_local_experts"))
    c = parts.read(config, checkpoint.path)
    route = ops.Route(count(config, "num_experts_per_tok", checkpoint.path), "softmax_top")
    e = experts.Experts(experts.read_count(config, checkpoint.path, "num_local_experts"), c.intermediate, c.act, route)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.windows(config, c.layers, checkpoint.path))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        w = experts.find(checkpoint, p, e, c.hidden, "block_sparse_moe.experts.", "w1", "w3", "w2")
        x = layer(b, c, e, w, p, groups[b.layer], x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    y = parts.attention(b, c, p + "self_attn.", group, h)
    x = b.add(x, y)
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    scores = b.linear(h, {p + "block_sparse_moe.gate": e.number}, name="scores")
    return b.add(x, experts.block(b, e, w, h, scores))
