"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with joined matrices, perhaps a window and part of each head rotated."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window", "partial_rotary_factor"))
    c = parts.read(config, checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.windows(config, c.layers, checkpoint.path))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", groups[b.layer], x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    qkv = b.linear(h, {p + "self_attn.qkv_proj": (c.heads + 2 * c.kv_heads) * c.head_dim}, name="qkv")
    y = parts.attend(b, c, p + "self_attn.", group, qkv)
    x = b.add(x, b.linear(y, {p + "self_attn.o_proj": c.hidden}, name="o"))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    return b.add(x, parts.joined_mlp(b, c, p + "mlp.", h))
