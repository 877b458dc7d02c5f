"""GLM-4.5 (Zeng et al. 2025): experts chosen by sigmoid scores and a correction, and a shared one; the first layers dense."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("use_qk_norm", "partial_rotary_factor", *experts.GROUPED))
    c = parts.read({"partial_rotary_factor": 0.5, **config}, checkpoint.path)._replace(o_bias=False)
    route = experts.read_grouped({"norm_topk_prob": True, **config}, checkpoint.path, "sigmoid", group_best=2)
    inner = count(config, "moe_intermediate_size", checkpoint.path)
    e = experts.Experts(experts.read_count(config, checkpoint.path, "n_routed_experts"), inner, c.act, route)
    shared = c._replace(intermediate=inner * count(config, "n_shared_experts", checkpoint.path, default=1))
    dense = count(config, "first_k_dense_replace", checkpoint.path, default=1, least=0)
    normed = flag(config, "use_qk_norm", checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        x = attention(b, c, p, group, normed, x)
        h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
        if b.layer < dense:
            y = parts.mlp(b, c, p + "mlp.", h)
        else:
            y = mixture(b, shared, e, experts.find(checkpoint, p, e, c.hidden), p + "mlp.", h)
        x = b.add(x, y)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def attention(b: Builder, c: parts.Shape, p: str, group: int, normed: bool, x: Value) -> Value:
    # x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps, c.head_dim)

    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    return b.add(x, parts.attention(b, c, p + "self_attn.", group, h, norm=norm if normed else None))


def mixture(b: Builder, shared: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    scores = b.linear(h, {p + "gate": e.number}, name="scores")
    y = experts.block(b, e, w, h, scores, p + "gate.e_score_correction_bias")
    return b.add(y, parts.mlp(b, shared, p + "shared_experts.", h))
