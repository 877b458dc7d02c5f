"""Gemma 2 (Gemma Team 2024): Gemma with norms behind the blocks, capped scores and logits, a window in every second layer."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import gemma, parts
from octavo.models.config import number, positive, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"))
    c = gemma.read(config, checkpoint.path)
    c = capped(c, config, checkpoint.path)
    plus = number(config, "norm_offset", checkpoint.path, 1.0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.windows(config, c.layers, checkpoint.path, period=2))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.scale(b.embed(embedding), c.hidden**0.5)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", groups[b.layer], plus, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps, plus)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, softcap=cap(config, "final_logit_softcapping", checkpoint.path)))


def layer(
    b: Builder, c: parts.Shape, p: str, group: int, plus: float, x: Value, norm: parts.Norm | None = None
) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps, plus=plus)
    y = parts.attention(b, c, p + "self_attn.", group, h, norm=norm)
    x = b.add(x, b.rms_norm(y, p + "post_attention_layernorm.weight", c.eps, plus=plus))
    h = b.rms_norm(x, p + "pre_feedforward_layernorm.weight", c.eps, plus=plus)
    y = parts.mlp(b, c, p + "mlp.", h)
    return b.add(x, b.rms_norm(y, p + "post_feedforward_layernorm.weight", c.eps, plus=plus))


def capped(c: parts.Shape, config: dict[str, Any], path: str) -> parts.Shape:
    """With the scale and the cap of the attention scores."""
    scalar = positive(config, "query_pre_attn_scalar", path, c.head_dim)
    return c._replace(scale=scalar**-0.5, softcap=cap(config, "attn_logit_softcapping", path))


def cap(config: dict[str, Any], key: str, path: str) -> float:
    return 0.0 if config.get(key) is None else positive(config, key, path)
