"""EXAONE 3, 3.5 and Deep (LG AI Research 2024): Llama with GPT-2's names."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path)
    eps = "layer_norm_eps" if config.get("rms_norm_eps") is None else "rms_norm_eps"
    c = parts.read(config, checkpoint.path, eps)
    checkpoint.info(f"transformer.h.{c.layers - 1}.ln_1.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"transformer.wte.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"transformer.h.{b.layer}.", group, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "transformer.ln_f.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h, attention = b.rms_norm(x, p + "ln_1.weight", c.eps), p + "attn.attention."
    y = parts.attend(b, c, attention, group, parts.qkv(b, c, attention, h))
    x = b.add(x, b.linear(y, {attention + "out_proj": c.hidden}, c.o_bias, "o"))
    h = b.rms_norm(x, p + "ln_2.weight", c.eps)
    inner = {p + "mlp.c_fc_0": c.intermediate, p + "mlp.c_fc_1": c.intermediate}
    y = parts.gated(b, c, b.linear(h, inner, c.mlp_bias, "gate_up"))
    return b.add(x, b.linear(y, {p + "mlp.c_proj": c.hidden}, c.mlp_bias, "down"))
