"""HunYuan without experts (Tencent 2025): Llama that normalises each head of queries and keys after it was rotated."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("use_qk_norm",))
    c = parts.read(config, checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    x = b.add(x, attention(b, c, p + "self_attn.", group, h))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    return b.add(x, parts.mlp(b, c, p + "mlp.", h))


def attention(b: Builder, c: parts.Shape, p: str, group: int, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    q, k, v = parts.split_heads(b, c, parts.qkv(b, c, p, h))
    q, k = parts.rotate(b, c, q, k)
    q = b.rms_norm(q, p + "query_layernorm.weight", c.eps, c.head_dim)
    k = b.rms_norm(k, p + "key_layernorm.weight", c.eps, c.head_dim)
    return b.linear(b.attention(q, k, v, group, c.scale), {p + "o_proj": c.hidden}, c.o_bias, "o")
