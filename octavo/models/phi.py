"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): attention and feed-forward side by side behind one norm; a bias in all."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("partial_rotary_factor", "qk_layernorm"))
    usual = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **config}
    c = parts.read(usual, checkpoint.path, "layer_norm_eps")._replace(qkv_bias=True, mlp_bias=True)
    normed = flag(config, "qk_layernorm", checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, normed, x)
    b.layer = -1
    norm = "model.final_layernorm"
    x = b.final_layer_norm(b.gather_rows(x), norm + ".weight", norm + ".bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, "lm_head.bias"))


def layer(b: Builder, c: parts.Shape, p: str, group: int, normed: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        module = name.removesuffix("norm") + "layernorm"
        return b.layer_norm(x, module + ".weight", module + ".bias", c.eps, c.head_dim)

    h = parts.layer_norm(b, c, x, p + "input_layernorm")
    qkv = parts.qkv(b, c, p + "self_attn.", h)
    y = parts.attend(b, c, p + "self_attn.", group, qkv, norm=norm if normed else None)
    x = b.add(x, b.linear(y, {p + "self_attn.dense": c.hidden}, True, "o"))
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.fc1", p + "mlp.fc2", h))
