"""NanoChat (Karpathy 2025): norms without weights, one behind the embedding and those of heads after the rotation, which
turns the other way; squared ReLU without a gate, capped logits."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import gemma2, parts
from octavo.models.config import refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("final_logit_softcapping",))
    c = parts.read({"hidden_act": "relu2", "rms_norm_eps": 1e-6, **config}, checkpoint.path)
    c = c._replace(rope=c.rope._replace(inv_freq=tuple(-frequency for frequency in c.rope.inv_freq)))
    checkpoint.info(f"model.layers.{c.layers - 1}.self_attn.q_proj.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.rms_norm(b.embed(embedding), None, c.eps)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), None, c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head, softcap=gemma2.cap(config, "final_logit_softcapping", checkpoint.path)))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    q, k, v = parts.split_heads(b, c, parts.qkv(b, c, p + "self_attn.", b.rms_norm(x, None, c.eps)))
    q, k = (b.rms_norm(heads, None, c.eps, c.head_dim) for heads in parts.rotate(b, c, q, k))
    y = b.attention(q, k, v, group, c.scale)
    x = b.add(x, b.linear(y, {p + "self_attn.o_proj": c.hidden}, c.o_bias, "o"))
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.fc1", p + "mlp.fc2", b.rms_norm(x, None, c.eps)))
