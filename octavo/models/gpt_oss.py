"""gpt-oss (OpenAI 2025): experts with biases and a clamped SwiGLU, attention sinks, every other layer with a window."""

from __future__ import annotations

from typing import Any

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import experts, parts
from octavo.models.config import count, positive, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError

_ALPHA, _LIMIT = 1.702, 7.0  # of the activation


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("sliding_window", "num_local_experts"))
    for key, value in (("swiglu_alpha", _ALPHA), ("swiglu_limit", _LIMIT)):
        if positive(config, key, checkpoint.path, value) != value:
            raise CheckpointError(f"{checkpoint.path}: config has {key} = {config[key]!r}, only {value} is supported")
    c = parts.read({"attention_bias": True, **config}, checkpoint.path)
    route = ops.Route(count(config, "num_experts_per_tok", checkpoint.path), "softmax_top")
    e = experts.Experts(
        experts.read_count(config, checkpoint.path, "num_local_experts"), c.intermediate, "swiglu_oai", route
    )
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.windows(config, c.layers, checkpoint.path, period=2))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        x = layer(b, c, e, find(checkpoint, p, e, c.hidden), p, groups[b.layer], x)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def find(checkpoint: Checkpoint, p: str, e: experts.Experts, hidden: int) -> experts.Weights:
    """Rows of gate and up take turns. MXFP4 weights are [experts, out, in], others [experts, in, out] without ".weight".

    GGUF files have gate and up apart.
    """
    own, each, inner = p + "mlp.experts.", range(e.number), e.intermediate
    if f"{own}gate_proj.weight" in checkpoint:
        return experts.find(checkpoint, p, e, hidden)._replace(
            gate_up_bias=[{f"{own}{m}.bias[{i}]": inner for m in ("gate_proj", "up_proj")} for i in each],
            down_bias=[{f"{own}down_proj.bias[{i}]": hidden} for i in each],
        )
    end, turned = (".weight", "") if f"{own}gate_up_proj.weight" in checkpoint else ("", ".T")
    gate_up, down, gate_up_bias, down_bias = (
        own + m for m in ("gate_up_proj" + end, "down_proj" + end, "gate_up_proj_bias", "down_proj_bias")
    )
    experts.check_count(checkpoint, e, gate_up, down, gate_up_bias, down_bias)
    for name, rows, cols in ((gate_up, 2 * inner, hidden), (down, hidden, inner)):
        experts.check_shape(checkpoint, name, e.number, *((cols, rows) if turned else (rows, cols)))
    return experts.Weights(
        [{f"{gate_up}[{i}]{turned}[{first}::2]": inner for first in (0, 1)} for i in each],
        [{f"{down}[{i}]{turned}": hidden} for i in each],
        [{f"{gate_up_bias}[{i}][{first}::2]": inner for first in (0, 1)} for i in each],
        [{f"{down_bias}[{i}]": hidden} for i in each],
    )


def layer(b: Builder, c: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
    x = b.add(x, attention(b, c, p + "self_attn.", group, h))
    h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
    scores = b.linear(h, {p + "mlp.router": e.number}, bias=True, name="scores")
    return b.add(x, experts.block(b, e, w, h, scores))


def attention(b: Builder, c: parts.Shape, p: str, group: int, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    kv_cols = c.kv_heads * c.head_dim
    q, k, v = b.split(parts.qkv(b, c, p, h), c.heads * c.head_dim, kv_cols, kv_cols)
    q, k = (b.rope(x, c.head_dim, *c.rope, name=name) for x, name in ((q, "q"), (k, "k")))
    y = b.attention(q, k, v, group, c.scale, sinks=p + "sinks")
    return b.linear(y, {p + "o_proj": c.hidden}, c.o_bias, "o")
