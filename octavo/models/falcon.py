"""Falcon (Almazrouei et al. 2023): blocks side by side behind one norm or two, few key and value heads; the oldest with ALiBi."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("alibi",))
    path = checkpoint.path
    c = read(config, path)
    newer = flag(config, "new_decoder_architecture", path)
    parallel = newer or flag({"parallel_attn": True, **config}, "parallel_attn", path)
    norms = count(
        {"num_ln_in_parallel_attn": 2 if newer else 1, **config}, "num_ln_in_parallel_attn", path, 2 if newer else 1
    )
    per_head = config.get("qkv_order") != "joined"
    checkpoint.info(f"transformer.h.{c.layers - 1}.mlp.dense_4h_to_h.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"transformer.word_embeddings.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"transformer.h.{b.layer}."
        x = (
            layer(b, c, p, group, per_head, x)
            if not parallel
            else side_by_side(b, c, p, group, per_head, norms == 2, x)
        )
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "transformer.ln_f.weight", "transformer.ln_f.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, per_head: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "input_layernorm")
    x = b.add(x, attention(b, c, p, group, per_head, h))
    h = parts.layer_norm(b, c, x, p + "post_attention_layernorm")
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.dense_h_to_4h", p + "mlp.dense_4h_to_h", h))


def side_by_side(b: Builder, c: parts.Shape, p: str, group: int, per_head: bool, two_norms: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + ("ln_attn" if two_norms else "input_layernorm"))
    y = attention(b, c, p, group, per_head, h)
    h = parts.layer_norm(b, c, x, p + "ln_mlp") if two_norms else h
    return b.add(b.add(x, y), parts.plain_mlp(b, c, p + "mlp.dense_h_to_4h", p + "mlp.dense_4h_to_h", h))


def attention(b: Builder, c: parts.Shape, p: str, group: int, per_head: bool, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    qkv = parts.joined_qkv(b, c, p + "self_attention.query_key_value", h, per_head)
    y = parts.attend(b, c, p, group, qkv, rotated=not c.slopes)
    return b.linear(y, {p + "self_attention.dense": c.hidden}, c.o_bias, "o")


def read(config: dict[str, Any], path: str) -> parts.Shape:
    """Scores and ALiBi are scaled together: (q k + slope distance) / sqrt(D)."""
    heads, hidden = count(config, "num_attention_heads", path), count(config, "hidden_size", path)
    shared = flag({"multi_query": True, **config}, "multi_query", path)
    kv_heads = count(config, "num_kv_heads", path, heads)
    kv_heads = kv_heads if flag(config, "new_decoder_architecture", path) else 1 if shared else heads
    usual = {"hidden_act": "gelu", "intermediate_size": 4 * hidden, "layer_norm_eps": 1e-5, **config}
    usual |= {"num_key_value_heads": kv_heads, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
    c = parts.read(usual, path, "layer_norm_eps")
    bias = flag(config, "bias", path)
    slopes = [slope * c.scale for slope in parts.alibi_slopes(heads)] if flag(config, "alibi", path) else []
    return c._replace(qkv_bias=bias, o_bias=bias, mlp_bias=bias, slopes=tuple(slopes))
