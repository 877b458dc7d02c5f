"""OLMo 2 and 3 (OLMo team 2024, 2025): norms behind the blocks and of all queries and keys; most layers of OLMo 3 have a window."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts, rope
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window",))
    c = parts.read(config, checkpoint.path, layer_type=rope.FULL)
    local = c._replace(rope=rope.read(config, c.head_dim, checkpoint.path, rope.SLIDING))
    checkpoint.info(
        f"model.layers.{c.layers - 1}.post_attention_layernorm.weight"
    )  # before billions of layers are built
    windows = parts.windows(config, c.layers, checkpoint.path, period=4)
    groups = parts.kv_groups(b, c, kv_dtype, windows)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        shape = c if windows[b.layer] is None else local
        x = layer(b, shape, f"model.layers.{b.layer}.", groups[b.layer], x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps)

    y = parts.attention(b, c, p + "self_attn.", group, x, norm=norm)
    x = b.add(x, b.rms_norm(y, p + "post_attention_layernorm.weight", c.eps))
    y = parts.mlp(b, c, p + "mlp.", x)
    return b.add(x, b.rms_norm(y, p + "post_feedforward_layernorm.weight", c.eps))
