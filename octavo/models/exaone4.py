"""EXAONE 4 (LG AI Research 2025): norms behind the blocks and of each head; layers without a window have no positions."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window",))
    c = parts.read(config, checkpoint.path)
    checkpoint.info(
        f"model.layers.{c.layers - 1}.post_attention_layernorm.weight"
    )  # before billions of layers are built
    windows = parts.windows(config, c.layers, checkpoint.path, period=4)
    groups = parts.kv_groups(b, c, kv_dtype, windows)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        rotated = windows[b.layer] is not None or config.get("sliding_window") is None
        x = layer(b, c, f"model.layers.{b.layer}.", groups[b.layer], rotated, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, rotated: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps, c.head_dim)

    y = parts.attention(b, c, p + "self_attn.", group, x, rotated, norm)
    x = b.add(x, b.rms_norm(y, p + "post_attention_layernorm.weight", c.eps))
    y = parts.mlp(b, c, p + "mlp.", x)
    return b.add(x, b.rms_norm(y, p + "post_feedforward_layernorm.weight", c.eps))
