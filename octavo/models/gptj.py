"""GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward side by side behind one norm; neighbouring dimensions rotate."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path)
    c = read(config, checkpoint.path)
    checkpoint.info(f"transformer.h.{c.layers - 1}.ln_1.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"transformer.wte.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"transformer.h.{b.layer}.", group, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "transformer.ln_f.weight", "transformer.ln_f.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, None if c.tied else "lm_head.bias"))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "ln_1")
    y = parts.attend(b, c, p, group, parts.qkv(b, c, p + "attn.", h))
    x = b.add(x, b.linear(y, {p + "attn.out_proj": c.hidden}, name="o"))
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.fc_in", p + "mlp.fc_out", h))


def read(config: dict[str, Any], path: str) -> parts.Shape:
    hidden, heads = count(config, "hidden_size", path), count(config, "num_attention_heads", path)
    usual = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, **config}
    if usual.get("intermediate_size") is None:
        usual["intermediate_size"] = 4 * hidden
    usual["partial_rotary_factor"] = count(config, "rotary_dim", path, 64) * heads / hidden
    c = parts.read(usual, path, "layer_norm_eps")
    return c._replace(qkv_bias=False, mlp_bias=True, rope=c.rope._replace(neox=False))
