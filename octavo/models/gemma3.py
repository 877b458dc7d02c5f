"""Gemma 3, text (Gemma Team 2025): Gemma 2 with norms of queries and keys; five of six layers have a window and a rotation of their own."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import gemma, gemma2, parts, rope
from octavo.models.config import number, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"))
    c = gemma2.capped(gemma.read(config, checkpoint.path, rope.FULL), config, checkpoint.path)
    local = c._replace(rope=rope.read(config, c.head_dim, checkpoint.path, rope.SLIDING))
    plus = number(config, "norm_offset", checkpoint.path, 1.0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    windows = parts.windows(config, c.layers, checkpoint.path, period=6)
    groups = parts.kv_groups(b, c, kv_dtype, windows)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.scale(b.embed(embedding), c.hidden**0.5)
    for b.layer in range(c.layers):
        shape = c if windows[b.layer] is None else local
        x = layer(b, shape, f"model.layers.{b.layer}.", groups[b.layer], plus, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps, plus)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, softcap=gemma2.cap(config, "final_logit_softcapping", checkpoint.path)))


def layer(b: Builder, c: parts.Shape, p: str, group: int, plus: float, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.rms_norm(x, name + ".weight", c.eps, c.head_dim, plus)

    return gemma2.layer(b, c, p, group, plus, x, norm)
