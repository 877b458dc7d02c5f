"""BLOOM (BigScience 2022): layer norms, one behind the embedding, and ALiBi for positions."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("apply_residual_connection_post_layernorm",))
    hidden = count(config, "hidden_size", checkpoint.path)
    usual = {"hidden_act": "gelu_new", "intermediate_size": 4 * hidden, "layer_norm_eps": 1e-5, **config}
    c = parts.read({"tie_word_embeddings": True, **usual}, checkpoint.path, "layer_norm_eps")
    c = c._replace(qkv_bias=True, mlp_bias=True, slopes=parts.alibi_slopes(c.heads))
    p = parts.prefix(checkpoint, "transformer.", "word_embeddings.weight")
    normed = flag(config, "apply_residual_connection_post_layernorm", checkpoint.path)
    per_head = config.get("qkv_order") != "joined"
    checkpoint.info(f"{p}h.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({p + "word_embeddings.weight": c.vocab}, c.hidden)
    x = parts.layer_norm(b, c, b.embed(embedding), p + "word_embeddings_layernorm")
    for b.layer in range(c.layers):
        x = layer(b, c, f"{p}h.{b.layer}.", group, per_head, normed, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), p + "ln_f.weight", p + "ln_f.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, per_head: bool, normed: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]; normed: blocks are added to their input behind its norm
    h = parts.layer_norm(b, c, x, p + "input_layernorm")
    qkv = parts.joined_qkv(b, c, p + "self_attention.query_key_value", h, per_head)
    y = parts.attend(b, c, p, group, qkv, rotated=False)
    x = b.add(h if normed else x, b.linear(y, {p + "self_attention.dense": c.hidden}, True, "o"))
    h = parts.layer_norm(b, c, x, p + "post_attention_layernorm")
    y = parts.plain_mlp(b, c, p + "mlp.dense_h_to_4h", p + "mlp.dense_4h_to_h", h)
    return b.add(h if normed else x, y)
