"""DeepSeek V2 and V3 (DeepSeek-AI 2024): latent attention, and experts in groups beside shared ones.

Keys and values of all heads are linear in one latent vector, kept in the cache with one rotated key. The matrices that
make keys and values of it are multiplied into queries and outputs instead: every query head attends over the latent
vectors themselves, with one key head of latent + rope dimensions whose values are the latent ones. One form for prompts
and for decoding, so that chunks change no bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from octavo.graph.build import Builder
from octavo.graph.ir import DType, KvGroup, Value
from octavo.models import experts, parts, rope
from octavo.models.config import count, flag, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


class Latent(NamedTuple):
    """Dimensions of latent attention: of queries before their heads (None: without), of the latent, of a head."""

    queries: int | None
    latent: int
    nope: int
    rope: int
    values: int


def build_v2(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    """Softmax scores; groups by their best expert, where topk_method asks for groups."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"{checkpoint.path}: config has topk_method = {method!r}, which is not supported")
    if flag(config, "norm_topk_prob", checkpoint.path):
        raise CheckpointError(f"{checkpoint.path}: config has norm_topk_prob = true, which is not supported")
    groups = {} if method == "group_limited_greedy" else {"n_group": None, "topk_group": None}
    build(b, {**config, **groups}, checkpoint, kv_dtype, "softmax", 1)


def build_v3(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    """Sigmoid scores with a correction; groups by their best two. GGUF files of V2 have the same name, no correction."""
    correction = any(name.endswith("e_score_correction_bias") for name in checkpoint.names())
    softmax = config.get("gguf_architecture") == "deepseek2" and not correction
    config = {"norm_topk_prob": not softmax, **config}
    build(b, config, checkpoint, kv_dtype, "softmax" if softmax else "sigmoid", 1 if softmax else 2)


def build(
    b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType, scoring: str, group_best: int
) -> None:
    path = checkpoint.path
    refuse_unknown(config, path, served=experts.GROUPED)
    if kv_dtype is DType.I8:
        raise CheckpointError(f"{path}: latent attention needs the KV type auto: int8 is not supported with it")
    m, c = read(config, path)
    route = experts.read_grouped(config, path, scoring, group_best)
    inner = count(config, "moe_intermediate_size", path)
    e = experts.Experts(experts.read_count(config, path, "n_routed_experts"), inner, c.act, route)
    shared = c._replace(intermediate=inner * count(config, "n_shared_experts", path, default=1))
    dense = count(config, "first_k_dense_replace", path, default=0, least=0)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    group = b.kv_group(KvGroup("latent", tuple(range(c.layers)), 1, m.latent + m.rope, kv_dtype, None, m.latent))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        p = f"model.layers.{b.layer}."
        h = b.rms_norm(x, p + "input_layernorm.weight", c.eps)
        x = b.add(x, attention(b, c, m, checkpoint, p + "self_attn.", group, h))
        h = b.rms_norm(x, p + "post_attention_layernorm.weight", c.eps)
        if b.layer < dense:
            y = parts.mlp(b, c, p + "mlp.", h)
        else:
            y = mixture(b, shared, e, experts.find(checkpoint, p, e, c.hidden), p + "mlp.", h)
        x = b.add(x, y)
    b.layer = -1
    x = b.final_norm(b.gather_rows(x), "model.norm.weight", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def read(config: dict[str, Any], path: str) -> tuple[Latent, parts.Shape]:
    """The Shape has the heads, head size, rotation and scale of queries."""
    latent, rotated, values = (count(config, key, path) for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    whole = None if config.get("qk_head_dim") is None else count(config, "qk_head_dim", path) - rotated  # GGUF's key
    queries = None if config.get("q_lora_rank") is None else count(config, "q_lora_rank", path)
    m = Latent(queries, latent, count(config, "qk_nope_head_dim", path, default=whole), rotated, values)
    for key, size, unit in (
        ("kv_lora_rank", latent, 32),
        ("v_head_dim", values, 32),
        ("qk_rope_head_dim", rotated, 16),
    ):
        if size % unit:
            raise CheckpointError(f"{path}: config has {key} = {size}, which is not supported: a multiple of {unit} is")
    c = parts.read({**config, "head_dim": m.rope, "num_key_value_heads": None}, path)
    c = c._replace(head_dim=m.nope + m.rope, rope=c.rope._replace(neox=config.get("rope_interleave") is False))
    return m, c._replace(scale=(m.nope + m.rope) ** -0.5 * _mscale(config, path) ** 2)


def _mscale(config: dict[str, Any], path: str) -> float:
    """YaRN's factor of queries and of keys, which these models have in the scale of the scores (Peng et al. 2023)."""
    scaling = rope.parameters(config, path, rope.FULL)
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    return 0.1 * weight * math.log(factor) + 1 if weight and factor and factor > 1 else 1.0


def attention(b: Builder, c: parts.Shape, m: Latent, checkpoint: Checkpoint, p: str, group: int, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    q_nope, q_rope, latent, k_rope = inputs(b, c, m, p, h)
    q_rope, k_rope = (b.rope(x, m.rope, *c.rope, name=name) for x, name in ((q_rope, "q_rope"), (k_rope, "k_rope")))
    into, out_of = matrices(b, c, m, checkpoint, p)
    q_latent = b.head_linear(q_nope, into, c.heads, m.latent, "q_latent")
    q = b.concat(q_latent, q_rope, heads=c.heads, name="q")  # [T, heads (latent + rope)]
    k = b.concat(latent, k_rope, name="k")  # [T, latent + rope]
    y = b.attention(q, k, k.slice(0, m.latent), group, c.scale)  # [T, heads latent]
    y = b.head_linear(y, out_of, c.heads, m.values, "values")
    return b.linear(y, {p + "o_proj": c.hidden}, c.o_bias, "o")


def inputs(b: Builder, c: parts.Shape, m: Latent, p: str, h: Value) -> list[Value]:
    # h[T, hidden] -> q_nope[T, heads nope], q_rope[T, heads rope], latent[T, latent], k_rope[T, rope]
    size = m.nope + m.rope
    kv = {p + "kv_a_proj_with_mqa": m.latent + m.rope}
    if m.queries is None:
        x, q = b.linear(h, kv, c.qkv_bias, "kv_a"), h
        name = p + "q_proj"
    else:
        x = b.linear(h, {p + "q_a_proj": m.queries, **kv}, c.qkv_bias, "qkv_a")
        q, x = b.split(x, m.queries, m.latent + m.rope)
        q, name = b.rms_norm(q, p + "q_a_layernorm.weight", c.eps), p + "q_b_proj"
    b.check(f"{name}.weight", c.heads * size, m.queries or c.hidden)
    modules = {f"{name}[0:{m.nope}%{size}]": c.heads * m.nope, f"{name}[{m.nope}:{size}%{size}]": c.heads * m.rope}
    q_nope, q_rope = b.split(b.linear(q, modules, name="q_b"), c.heads * m.nope, c.heads * m.rope)
    root, start = x.root, x.start
    latent, k_rope = root.slice(start, start + m.latent), root.slice(start + m.latent, start + x.cols)
    return [q_nope, q_rope, b.rms_norm(latent, p + "kv_a_layernorm.weight", c.eps), k_rope]


def matrices(b: Builder, c: parts.Shape, m: Latent, checkpoint: Checkpoint, p: str) -> tuple[str, str]:
    """Of all heads, from queries into the latent space [heads latent, nope] and out of it [heads values, latent]."""
    if f"{p}k_b_proj.weight" in checkpoint:
        return f"{p}k_b_proj.weight[:]", f"{p}v_b_proj.weight[:]"
    name, both = f"{p}kv_b_proj.weight", m.nope + m.values
    b.check(name, c.heads * both, m.latent)
    return f"{name}[0:{m.nope}%{both}].T({m.nope})", f"{name}[{m.nope}:{both}%{both}]"


def mixture(b: Builder, shared: parts.Shape, e: experts.Experts, w: experts.Weights, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    scores = b.linear(h, {p + "gate": e.number}, name="scores")
    bias = p + "gate.e_score_correction_bias" if e.route.scoring == "sigmoid" else None
    return b.add(experts.block(b, e, w, h, scores, bias), parts.mlp(b, shared, p + "shared_experts.", h))
