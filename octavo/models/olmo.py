"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights; queries, keys and values may be clipped."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import positive, refuse_unknown
from octavo.weights.spec import Checkpoint

_EPS = 1e-5  # of torch's layer norm: no config has it


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("clip_qkv",))
    c = parts.read({**config, "rms_norm_eps": _EPS}, checkpoint.path)
    clip = 0.0 if config.get("clip_qkv") is None else positive(config, "clip_qkv", checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.mlp.down_proj.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, clip, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), None, None, c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, clip: float, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.layer_norm(x, None, None, c.eps)
    qkv = parts.qkv(b, c, p + "self_attn.", h)
    qkv = b.clamp(qkv, -clip, clip) if clip else qkv
    y = parts.attend(b, c, p + "self_attn.", group, qkv)
    x = b.add(x, b.linear(y, {p + "self_attn.o_proj": c.hidden}, c.o_bias, "o"))
    h = b.layer_norm(x, None, None, c.eps)
    return b.add(x, parts.mlp(b, c, p + "mlp.", h))
