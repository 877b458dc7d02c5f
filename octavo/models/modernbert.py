"""ModernBERT (Warner et al. 2024): an encoder with norms before, rotary positions, gated feed-forward, local attention.

Layers of local attention see half a window to either side and have a rotary base of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.graph.build import Builder
from octavo.graph.ir import DType, KvGroup, Value
from octavo.models import encoders, rope
from octavo.models.config import activation, count, flag, positive, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    head_dim: int
    eps: float
    act: str
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool


class Kind(NamedTuple):
    """Of a layer: `window` tokens to either side, itself included."""

    window: int | None
    rope: rope.Rotation


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    path = checkpoint.path
    refuse_unknown(config, path)
    heads, hidden = count(config, "num_attention_heads", path), count(config, "hidden_size", path)
    c = Shape(
        hidden=hidden,
        intermediate=count(config, "intermediate_size", path),
        layers=count(config, "num_hidden_layers", path),
        head_dim=encoders.head_dim(hidden, heads, path),
        eps=positive(config, "norm_eps", path, default=1e-5),
        act=activation(config, "hidden_activation", path, default="gelu"),
        norm_bias=flag(config, "norm_bias", path),
        attention_bias=flag(config, "attention_bias", path),
        mlp_bias=flag(config, "mlp_bias", path),
    )
    p = "model." if "model.final_norm.weight" in checkpoint else ""
    checkpoint.info(f"{p}layers.{c.layers - 1}.mlp.Wo.weight")  # before billions of layers are built
    kinds = read_kinds(config, c, path)
    group = b.kv_group(KvGroup("full", tuple(range(c.layers)), heads, c.head_dim, kv_dtype))
    x = b.embed(b.matrix({p + "embeddings.tok_embeddings.weight": b.graph.vocab_size}, c.hidden))
    x = norm(b, c, p + "embeddings.norm", x)
    for b.layer in range(c.layers):
        x = layer(b, c, f"{p}layers.{b.layer}.", group, kinds[b.layer], x)
    b.layer = -1
    x = b.states(norm(b, c, p + "final_norm", b.gather_rows(x)))
    if encoders.is_classifier(config):
        head(b, c, config, path, x)


def layer(b: Builder, c: Shape, p: str, group: int, kind: Kind, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]; the first has the norm of the embedding
    h = norm(b, c, p + "attn_norm", x) if b.layer else x
    q, k, v = b.split(b.linear(h, {p + "attn.Wqkv": 3 * c.hidden}, c.attention_bias, "qkv"), *[c.hidden] * 3)
    q, k = (b.rope(part, c.head_dim, *kind.rope, name=name) for part, name in ((q, "q"), (k, "k")))
    y = b.attention(q, k, v, group, c.head_dim**-0.5, causal=False, window=kind.window)
    x = b.add(x, b.linear(y, {p + "attn.Wo": c.hidden}, c.attention_bias, "o"))
    h = norm(b, c, p + "mlp_norm", x)
    gate, up = b.split(b.linear(h, {p + "mlp.Wi": 2 * c.intermediate}, c.mlp_bias, "gate_up"), *[c.intermediate] * 2)
    return b.add(x, b.linear(b.act_mul(gate, up, c.act), {p + "mlp.Wo": c.hidden}, c.mlp_bias, "down"))


def norm(b: Builder, c: Shape, name: str, x: Value) -> Value:
    return b.layer_norm(x, f"{name}.weight", f"{name}.bias" if c.norm_bias else None, c.eps)


def head(b: Builder, c: Shape, config: dict[str, Any], path: str, x: Value) -> None:
    if config.get("classifier_pooling") not in (None, "cls"):
        raise CheckpointError(
            f"{path}: config has classifier_pooling = {config['classifier_pooling']!r}, which is not supported (served: cls)"
        )
    h = b.linear(x, {"head.dense": c.hidden}, flag(config, "classifier_bias", path), "dense")
    h = norm(b, c, "head.norm", b.act(h, activation(config, "classifier_activation", path, default="gelu")))
    b.head(b.linear(h, {"classifier": encoders.num_labels(config, path)}, True), "scores")


def read_kinds(config: dict[str, Any], c: Shape, path: str) -> list[Kind]:
    """Of each layer. Older configs say how often a layer is global, and name the two rotary bases."""
    every = count(config, "global_attn_every_n_layers", path, default=3)
    types = config.get("layer_types") or [_LOCAL if i % every else _GLOBAL for i in range(c.layers)]
    if "rope_parameters" not in config:
        config = {**config, "rope_theta": positive(config, "global_rope_theta", path, default=160000.0)}
        config["rope_local_base_freq"] = positive(config, "local_rope_theta", path, default=10000.0)
    window = count(config, "local_attention", path, default=128) // 2 + 1
    rotations = {kind: rope.read(config, c.head_dim, path, kind) for kind in set(types)}
    kinds = {kind: Kind(window if kind == _LOCAL else None, rotation) for kind, rotation in rotations.items()}
    return [kinds[kind] for kind in types]


_GLOBAL, _LOCAL = rope.FULL, rope.SLIDING
