"""GPT-BigCode: SantaCoder and StarCoder (Li et al. 2023): GPT-2 with one key and value head for all queries."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import gpt2, parts
from octavo.models.config import flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path)
    c = gpt2.read(config, checkpoint.path)
    shared = flag({"multi_query": True, **config}, "multi_query", checkpoint.path)
    c = c._replace(kv_heads=1 if shared else c.heads)
    p = parts.prefix(checkpoint, "transformer.", "wte.weight")
    checkpoint.info(f"{p}h.{c.layers - 1}.ln_1.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({p + "wte.weight": c.vocab}, c.hidden)
    x = b.add(b.embed(embedding), parts.embed_positions(b, c, p + "wpe.weight"))
    for b.layer in range(c.layers):
        x = layer(b, c, f"{p}h.{b.layer}.", group, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), p + "ln_f.weight", p + "ln_f.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "ln_1")
    y = parts.attend(b, c, p, group, parts.joined_qkv(b, c, p + "attn.c_attn", h, per_head=True), rotated=False)
    x = b.add(x, b.linear(y, {p + "attn.c_proj": c.hidden}, True, "o"))
    h = parts.layer_norm(b, c, x, p + "ln_2")
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.c_fc", p + "mlp.c_proj", h))
