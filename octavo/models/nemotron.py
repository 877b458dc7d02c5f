"""Nemotron and Minitron (Parmar et al. 2024): layer norms with 1 + w, squared ReLU without a gate, part of each head rotated."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import number, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("partial_rotary_factor",))
    usual = {"hidden_act": "relu2", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **config}
    c = parts.read(usual, checkpoint.path, "layer_norm_eps")
    plus = number(config, "norm_offset", checkpoint.path, 1.0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, plus, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "model.norm.weight", "model.norm.bias", c.eps, plus)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, plus: float, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "input_layernorm", plus)
    x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h))
    h = parts.layer_norm(b, c, x, p + "post_attention_layernorm", plus)
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.up_proj", p + "mlp.down_proj", h))
