"""ERNIE 4.5 with experts (Baidu 2025): chosen by corrected softmax scores in some of the layers, beside shared ones."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, flag, number, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    path = checkpoint.path
    refuse_unknown(config, path)
    c = parts.read(config, path)
    bias = flag(config, "use_bias", path)
    c = c._replace(qkv_bias=bias, o_bias=bias, mlp_bias=bias, rope=c.rope._replace(neox=False))
    e, sparse = read_experts(config, c, path), sparse_layers(config, c.layers, path)
    shared = count(config, "moe_num_shared_experts", path, default=2, least=0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
        x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h))
        h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
        if sparse[b.layer]:
            y = mixture(b, checkpoint, e, experts.find(checkpoint, p, e, c.hidden), p + "mlp.", h)
            if shared:
                own = c._replace(intermediate=shared * e.intermediate)
                y = b.add(y, parts.mlp(b, own, p + "mlp.shared_experts.", h))
        else:
            y = parts.mlp(b, c, p + "mlp.", h)
        x = b.add(x, y)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def read_experts(config: dict[str, Any], c: parts.Shape, path: str) -> experts.Experts:
    number_of, top_k = count(config, "moe_num_experts", path), count(config, "moe_k", path)
    if top_k > number_of:
        raise CheckpointError(f"{path}: config has moe_k = {top_k} of {number_of} experts: there are not so many")
    if not 0 <= number(config, "moe_norm_min", path, default=1e-12) <= 1e-6:
        raise CheckpointError(f"{path}: config has moe_norm_min = {config['moe_norm_min']}, which is not supported")
    inner = count(config, "moe_intermediate_size", path)
    return experts.Experts(number_of, inner, c.act, ops.Route(top_k, "softmax", normalise=True))


def sparse_layers(config: dict[str, Any], layers: int, path: str) -> list[bool]:
    """Of each layer, whether it has experts: every moe_layer_interval-th from a first to a last one (-1: of all)."""
    step = count(config, "moe_layer_interval", path, default=1)
    first = count(config, "moe_layer_start_index", path, default=1, least=0)
    last = count(config, "moe_layer_end_index", path, default=-1, least=-1)
    return [(i + 1) % step == 0 and first <= i and (last == -1 or i <= last) for i in range(layers)]


def mixture(b: Builder, checkpoint: Checkpoint, e: experts.Experts, w: experts.Weights, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    scores = b.linear(h, {p + "gate": e.number}, name="scores")
    bias = p + "moe_statics.e_score_correction_bias"
    one_row = len(checkpoint.info(bias).shape) == 2  # a vector in GGUF files
    return experts.block(b, e, w, h, scores, bias + "[0]" * one_row)
