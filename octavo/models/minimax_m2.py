"""MiniMax-M2 (MiniMax 2025): experts chosen by sigmoid scores and a correction; all heads are normalised together, half of
each is rotated."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    path = checkpoint.path
    refuse_unknown(config, path, served=("num_local_experts", "use_qk_norm", "partial_rotary_factor"))
    for key, served in (("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid")):
        if config.get(key, served) != served:
            raise CheckpointError(f"{path}: config has {key} = {config[key]!r}, only {served!r} is supported")
    c = read(config, path)
    route = ops.Route(count(config, "num_experts_per_tok", path), "sigmoid", normalise=True)
    e = experts.Experts(experts.read_count(config, path, "num_local_experts"), c.intermediate, c.act, route)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        w = experts.find(checkpoint, p, e, c.hidden, "block_sparse_moe.experts.", "w1", "w3", "w2")
        x = layer(b, c, e, w, p, group, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def read(config: dict[str, Any], path: str) -> parts.Shape:
    """Older configs say how many dimensions of a head are rotated, not which part."""
    if config.get("rotary_dim") is None:
        return parts.read(config, path)
    share = count(config, "rotary_dim", path) / count(config, "head_dim", path)
    return parts.read({**config, "partial_rotary_factor": share}, path)


def layer(b: Builder, c: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps)

    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h, norm=norm))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    own = p + "block_sparse_moe."
    scores = b.linear(h, {own + "gate": e.number}, name="scores")
    return b.add(x, experts.block(b, e, w, h, scores, own + "e_score_correction_bias"))
