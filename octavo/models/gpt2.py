"""GPT-2 (Radford et al. 2019): layer norms, learned positions, matrices stored the other way round."""

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
    p = parts.prefix(checkpoint, "transformer.", "wte.weight")
    transposed = flag({"transposed": True, **config}, "transposed", checkpoint.path)
    by_layer = flag(config, "scale_attn_by_inverse_layer_idx", checkpoint.path)
    checkpoint.info(f"{p}h.{c.layers - 1}.ln_1.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({p + "wte.weight": c.vocab}, c.hidden)
    x = b.add(b.embed(embedding), parts.embed_positions(b, c, p + "wpe.weight"))
    for b.layer in range(c.layers):
        shape = c._replace(scale=c.scale / (b.layer + 1)) if by_layer else c
        x = layer(b, shape, f"{p}h.{b.layer}.", group, transposed, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), p + "ln_f.weight", p + "ln_f.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, transposed: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "ln_1")
    qkv = b.linear(h, {p + "attn.c_attn": 3 * c.hidden}, True, "qkv", transposed)
    y = parts.attend(b, c, p, group, qkv, rotated=False)
    x = b.add(x, b.linear(y, {p + "attn.c_proj": c.hidden}, True, "o", transposed))
    h = parts.layer_norm(b, c, x, p + "ln_2")
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.c_fc", p + "mlp.c_proj", h, transposed))


def read(config: dict[str, Any], path: str) -> parts.Shape:
    """Of GPT-2 and GPT-BigCode."""
    usual = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "tie_word_embeddings": True, **config}
    usual.setdefault("intermediate_size", 4 * count(config, "hidden_size", path))
    c = parts.read(usual, path, "layer_norm_eps")._replace(mlp_bias=True, qkv_bias=True)
    scaled = flag({"scale_attn_weights": True, **config}, "scale_attn_weights", path)
    return c if scaled else c._replace(scale=1.0)
