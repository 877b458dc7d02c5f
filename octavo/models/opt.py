"""OPT (Zhang et al. 2022): layer norms, learned positions from row 2 on, ReLU; the smallest has its norms behind the blocks."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path)
    c = read(config, checkpoint.path)
    p = parts.prefix(checkpoint, "model.", "decoder.embed_tokens.weight") + "decoder."
    before = flag({"do_layer_norm_before": True, **config}, "do_layer_norm_before", checkpoint.path)
    affine = flag({"layer_norm_elementwise_affine": True, **config}, "layer_norm_elementwise_affine", checkpoint.path)
    width = count(config, "word_embed_proj_dim", checkpoint.path, c.hidden)  # of the embeddings
    checkpoint.info(f"{p}layers.{c.layers - 1}.fc1.weight")  # before billions of layers are built

    def norm(x: Value, module: str) -> Value:
        return parts.layer_norm(b, c, x, module) if affine else b.layer_norm(x, None, None, c.eps)

    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({p + "embed_tokens.weight": c.vocab}, width)
    x = b.embed(embedding)
    x = x if width == c.hidden else b.linear(x, {p + "project_in": c.hidden})
    x = b.add(x, parts.embed_positions(b, c, p + "embed_positions.weight", offset=2))
    for b.layer in range(c.layers):
        x = layer(b, c, f"{p}layers.{b.layer}.", group, norm, before, x)
    b.layer = -1
    x = b.gather_rows(x)
    if before and not flag(config, "_remove_final_layer_norm", checkpoint.path):
        x = norm(x, p + "final_layer_norm")
    x = b.states(x if width == c.hidden else b.linear(x, {p + "project_out": width}))
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, width)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, norm: parts.Norm, before: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = norm(x, p + "self_attn_layer_norm") if before else x
    y = parts.attend(b, c, p, group, parts.qkv(b, c, p + "self_attn.", h), rotated=False)
    x = b.add(x, b.linear(y, {p + "self_attn.out_proj": c.hidden}, c.o_bias, "o"))
    x = x if before else norm(x, p + "self_attn_layer_norm")
    h = norm(x, p + "final_layer_norm") if before else x
    x = b.add(x, parts.plain_mlp(b, c, p + "fc1", p + "fc2", h))
    return x if before else norm(x, p + "final_layer_norm")


def read(config: dict[str, Any], path: str) -> parts.Shape:
    usual = {"hidden_act": "relu", "tie_word_embeddings": True, **config, "layer_norm_eps": 1e-5}
    bias = flag({"enable_bias": True, **config}, "enable_bias", path)
    return parts.read(usual, path, "layer_norm_eps")._replace(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
