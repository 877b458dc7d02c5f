"""Command R and Aya (Cohere 2024): attention and feed-forward side by side behind one layer norm; neighbouring dimensions rotate."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import flag, positive, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("logit_scale", "use_qk_norm"))
    c = parts.read({"tie_word_embeddings": True, **config}, checkpoint.path, "layer_norm_eps")
    c = c._replace(mlp_bias=False, rope=c.rope._replace(neox=False))
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    normed = flag(config, "use_qk_norm", checkpoint.path)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, normed, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "model.norm.weight", None, c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, scale=positive(config, "logit_scale", checkpoint.path, 0.0625)))


def layer(b: Builder, c: parts.Shape, p: str, group: int, normed: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        return b.layer_norm(x, name + ".weight", None, c.eps, c.head_dim)

    h = b.layer_norm(x, p + "input_layernorm.weight", None, c.eps)
    y = parts.attention(b, c, p + "self_attn.", group, h, norm=norm if normed else None)
    return b.add(b.add(x, y), parts.mlp(b, c, p + "mlp.", h))
