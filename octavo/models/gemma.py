"""Gemma (Gemma Team 2024): Llama with scaled embeddings, 1 + w in its norms, and a gate of GELU."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import number, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path)
    c = read(config, checkpoint.path)
    plus = number(config, "norm_offset", checkpoint.path, 1.0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.scale(b.embed(embedding), c.hidden**0.5)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, plus, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps, plus)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, plus: float, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps, plus=plus)
    x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps, plus=plus)
    return b.add(x, parts.mlp(b, c, p + "mlp.", h))


def read(config: dict[str, Any], path: str, layer_type: str = "") -> parts.Shape:
    """Of all Gemmas: `hidden_activation` counts, not `hidden_act`, which the oldest files hold beside it."""
    act = {"hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"}
    return parts.read({"head_dim": 256, "tie_word_embeddings": True, **config, **act}, path, layer_type=layer_type)
