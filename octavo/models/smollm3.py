"""SmolLM3 (Bakouch et al. 2025): Llama of which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    unused = () if flag(config, "use_sliding_window", checkpoint.path) else ("sliding_window",)
    refuse_unknown(config, checkpoint.path, served=("no_rope_layers", *unused))
    c = parts.read(config, checkpoint.path)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    rotated = rotated_layers(config, c.layers, checkpoint.path)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, rotated[b.layer], x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, rotated: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    y = parts.attention(b, c, p + "self_attn.", group, h, rotated)
    x = b.add(x, y)
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    return b.add(x, parts.mlp(b, c, p + "mlp.", h))


def rotated_layers(config: dict[str, Any], layers: int, path: str) -> list[bool]:
    """Of each layer, whether it has positions: 1 in `no_rope_layers` says yes, 0 no. Without: all but every fourth."""
    switches = config.get("no_rope_layers")
    if switches is None:
        interval = count(config, "no_rope_layer_interval", path, default=4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    return [bool(s) for s in switches]
