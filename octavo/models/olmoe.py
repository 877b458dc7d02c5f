"""OLMoE (Muennighoff et al. 2024): experts in every layer; queries and keys are normalised over all heads together."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("num_experts",))
    c = parts.read(config, checkpoint.path)
    route = ops.Route(
        count(config, "num_experts_per_tok", checkpoint.path),
        "softmax",
        flag(config, "norm_topk_prob", checkpoint.path),
    )
    e = experts.Experts(experts.read_count(config, checkpoint.path, "num_experts"), c.intermediate, c.act, route)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        x = layer(b, c, e, experts.find(checkpoint, p, e, c.hidden), p, group, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps)

    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h, norm=norm))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    scores = b.linear(h, {p + "mlp.gate": e.number}, name="scores")
    return b.add(x, experts.block(b, e, w, h, scores))
