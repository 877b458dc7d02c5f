"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): encoders.

Norms behind the sums, learned positions; RoBERTa's begin behind the padding token's id. A pooler or a classifier makes
something of the first token: a pair's score, of those that are trained to rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.graph.build import Builder
from octavo.graph.ir import DType, KvGroup, Value
from octavo.models import encoders
from octavo.models.config import activation, count, positive, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    eps: float
    act: str
    norm: tuple[str, str]  # ends of the names of a norm's tensors


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    path = checkpoint.path
    refuse_unknown(config, path)
    for key, served in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if config.get(key) not in (None, served):
            raise CheckpointError(
                f"{path}: config has {key} = {config[key]!r}, which is not supported (served: {served})"
            )
    prefix = next((p for p in ("bert.", "roberta.") if f"{p}{_WORDS}" in checkpoint), "")
    c = read(config, path, older=f"{prefix}embeddings.LayerNorm.gamma" in checkpoint)
    checkpoint.info(f"{prefix}encoder.layer.{c.layers - 1}.output.dense.weight")  # before billions of layers are built
    offset = 0 if config.get("model_type") == "bert" else count(config, "pad_token_id", path, least=0) + 1
    rows = count(config, "max_position_embeddings", path)
    b.graph.max_positions, b.graph.bounded = rows - offset, True
    group = b.kv_group(KvGroup("full", tuple(range(c.layers)), c.heads, c.head_dim, kv_dtype))
    e = prefix + "embeddings."
    x = b.embed(b.matrix({prefix + _WORDS: b.graph.vocab_size}, c.hidden))
    positions = b.embed(b.matrix({e + "position_embeddings.weight": rows}, c.hidden), "positions", offset)
    x = b.add(x, positions)
    kinds = count(config, "type_vocab_size", path, default=checkpoint.info(e + "token_type_embeddings.weight").shape[0])
    x = b.add(x, b.embed(b.matrix({e + "token_type_embeddings.weight": kinds}, c.hidden), "token_types"))
    x = norm(b, c, e, x)
    for b.layer in range(c.layers):
        x = layer(b, c, f"{prefix}encoder.layer.{b.layer}.", group, x)
    b.layer = -1
    x = b.states(b.gather_rows(x))
    head(b, c, prefix, config, checkpoint, x)


_WORDS = "embeddings.word_embeddings.weight"


def read(config: dict[str, Any], path: str, older: bool) -> Shape:
    """older: the file has the names of the first release."""
    heads, hidden = count(config, "num_attention_heads", path), count(config, "hidden_size", path)
    return Shape(
        hidden=hidden,
        intermediate=count(config, "intermediate_size", path),
        layers=count(config, "num_hidden_layers", path),
        heads=heads,
        head_dim=encoders.head_dim(hidden, heads, path),
        eps=positive(config, "layer_norm_eps", path, default=1e-12),
        act=activation(config, "hidden_act", path),
        norm=("gamma", "beta") if older else ("weight", "bias"),
    )


def layer(b: Builder, c: Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    a = p + "attention."
    qkv = b.linear(x, {a + f"self.{name}": c.hidden for name in ("query", "key", "value")}, True, "qkv")
    q, k, v = b.split(qkv, c.hidden, c.hidden, c.hidden)
    y = b.attention(q, k, v, group, c.head_dim**-0.5, causal=False)
    x = norm(b, c, a + "output.", b.add(x, b.linear(y, {a + "output.dense": c.hidden}, True, "o")))
    h = b.act(b.linear(x, {p + "intermediate.dense": c.intermediate}, True, "up"), c.act)
    return norm(b, c, p + "output.", b.add(x, b.linear(h, {p + "output.dense": c.hidden}, True, "down")))


def norm(b: Builder, c: Shape, p: str, x: Value) -> Value:
    scale, shift = c.norm
    return b.layer_norm(x, f"{p}LayerNorm.{scale}", f"{p}LayerNorm.{shift}", c.eps)


def head(b: Builder, c: Shape, prefix: str, config: dict[str, Any], checkpoint: Checkpoint, x: Value) -> None:
    """BERT's pooler, and a classifier behind it; RoBERTa's classifier has a layer of its own instead."""
    own, pooler = "classifier.dense", prefix + "pooler.dense"
    if not encoders.is_classifier(config):
        if f"{pooler}.weight" in checkpoint:
            b.head(b.act(b.linear(x, {pooler: c.hidden}, True, "dense"), "tanh"), "pooler")
        return
    dense, last = (own, "classifier.out_proj") if f"{own}.weight" in checkpoint else (pooler, "classifier")
    h = b.act(b.linear(x, {dense: c.hidden}, True, "dense"), "tanh")
    b.head(b.linear(h, {last: encoders.num_labels(config, checkpoint.path)}, True), "scores")
