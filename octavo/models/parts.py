"""What model files share: the sizes in a config, KV groups, the attention and feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from octavo.graph.build import Builder
from octavo.graph.ir import DType, KvGroup, Value
from octavo.models import rope
from octavo.models.config import activation, count, flag, positive
from octavo.weights.spec import Checkpoint, CheckpointError


class Shape(NamedTuple):
    """Sizes and switches of a decoder in the manner of Llama."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    act: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    rope: rope.Rotation
    scale: float  # of attention scores
    softcap: float = 0.0  # of attention scores, as
    slopes: tuple[float, ...] = ()  # of ALiBi, per head


def read(config: dict[str, Any], path: str, eps: str = "rms_norm_eps", layer_type: str = "") -> Shape:
    """The Shape of a config, whose norms have the key `eps`, of one layer type where rotations differ.

    CheckpointError names what cannot be.
    """
    heads, hidden = count(config, "num_attention_heads", path), count(config, "hidden_size", path)
    kv_heads = count(config, "num_key_value_heads", path, default=heads)
    derived = config.get("head_dim") is None
    head_dim = hidden // heads if derived else count(config, "head_dim", path)
    if heads % kv_heads:
        raise CheckpointError(f"{path}: {heads} attention heads cannot share {kv_heads} key-value heads")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        why = f" (num_attention_heads = {heads} of hidden_size = {hidden})" if derived else ""
        raise CheckpointError(f"{path}: head_dim {head_dim}{why} is not supported: a multiple of 16 up to 256 is")
    return Shape(
        vocab=count(config, "vocab_size", path),
        hidden=hidden,
        intermediate=count(config, "intermediate_size", path),
        layers=count(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=positive(config, eps, path),
        act=activation(config, "hidden_act", path),
        qkv_bias=flag(config, "attention_bias", path),
        o_bias=flag(config, "attention_bias", path),
        mlp_bias=flag(config, "mlp_bias", path),
        tied=flag(config, "tie_word_embeddings", path),
        rope=rope.read(config, head_dim, path, layer_type),
        scale=head_dim**-0.5,
    )


def windows(config: dict[str, Any], layers: int, path: str, period: int = 0) -> list[int | None]:
    """Tokens that a query of each layer sees, itself included: `sliding_window` where `layer_types` says so.

    None: all. Without `layer_types` all layers have the window, where there is one, but every period-th where period
    is above 0; config.json may name another one, or a pattern of letters. Raises CheckpointError.
    """
    window = None if config.get("sliding_window") is None else count(config, "sliding_window", path)
    types = config.get("layer_types")
    if types is None:
        sliding = _pattern(config, layers, path, period)
        return [window if slides else None for slides in sliding]
    if window is None and rope.SLIDING in types:
        raise CheckpointError(f"{path}: config has layers of type {rope.SLIDING} and no sliding_window")
    return [window if kind == rope.SLIDING else None for kind in types]


def _pattern(config: dict[str, Any], layers: int, path: str, period: int) -> list[bool]:
    pattern = config.get("sliding_window_pattern")
    if not period or pattern is None or isinstance(pattern, int):
        period = count(config, "sliding_window_pattern", path, default=period, least=0) if period else 0
        return [not period or (i + 1) % period != 0 for i in range(layers)]
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("LG"):
        raise CheckpointError(
            f"{path}: config has sliding_window_pattern = {pattern!r:.100}, expected a number or L and G"
        )
    return [pattern[i % len(pattern)] == "L" for i in range(layers)]


def upper_windows(config: dict[str, Any], layers: int, path: str) -> list[int | None]:
    """As `windows`, only where `use_sliding_window` is set; without `layer_types`, from layer max_window_layers on."""
    if not flag(config, "use_sliding_window", path):
        return [None] * layers
    found = windows(config, layers, path)
    if config.get("layer_types") is not None or None in found:
        return found
    below = count(config, "max_window_layers", path, least=0)
    return [None if i < below else window for i, window in enumerate(found)]


def kv_groups(b: Builder, c: Shape, kv_dtype: DType, windows: Sequence[int | None] = (None,)) -> list[int]:
    """One KV group per size of window, in order of first use: its index for each entry of `windows`.

    `windows` has one entry per layer, or a single one for all of them.
    """
    groups = {}
    for window in dict.fromkeys(windows):
        name = "full" if window is None else f"window{window}"
        layers = tuple(i for i in range(c.layers) if windows[i % len(windows)] == window)
        groups[window] = b.kv_group(KvGroup(name, layers, c.kv_heads, c.head_dim, kv_dtype, window))
    return [groups[window] for window in windows]


Norm = Callable[[Value, str], Value]
"""Of all heads of queries or keys; the string is the module: its weight has the name string + ".weight"."""


def attention(
    b: Builder, c: Shape, p: str, group: int, h: Value, rotated: bool = True, norm: Norm | None = None
) -> Value:
    # h[T, hidden] -> y[T, hidden]
    y = attend(b, c, p, group, qkv(b, c, p, h), rotated, norm)
    return b.linear(y, {p + "o_proj": c.hidden}, c.o_bias, "o")


def qkv(b: Builder, c: Shape, p: str, h: Value) -> Value:
    # h[T, hidden] -> qkv[T, (heads + 2 kv_heads) D]
    q_cols, kv_cols = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return b.linear(h, {p + "q_proj": q_cols, p + "k_proj": kv_cols, p + "v_proj": kv_cols}, c.qkv_bias, "qkv")


def joined_qkv(b: Builder, c: Shape, module: str, h: Value, per_head: bool) -> Value:
    """qkv of one module: its rows are those of q, of k and of v, or per_head, of each kv head its q, its k and its v."""
    # h[T, hidden] -> qkv[T, (heads + 2 kv_heads) D]
    group, d = c.heads // c.kv_heads, c.head_dim
    if not per_head or c.kv_heads == 1:
        return b.linear(h, {module: (c.heads + 2 * c.kv_heads) * d}, c.qkv_bias, "qkv")
    b.check(f"{module}.weight", (c.heads + 2 * c.kv_heads) * d, c.hidden)
    k, v, end = group * d, (group + 1) * d, (group + 2) * d
    rows = {(0, k): c.heads * d, (k, v): c.kv_heads * d, (v, end): c.kv_heads * d}
    modules = {f"{module}[{start}:{stop}%{end}]": n for (start, stop), n in rows.items()}
    return b.linear(h, modules, c.qkv_bias, "qkv")


def attend(
    b: Builder, c: Shape, p: str, group: int, qkv: Value, rotated: bool = True, norm: Norm | None = None
) -> Value:
    # qkv[T, (heads + 2 kv_heads) D] -> y[T, heads D]; queries and keys without positions where not rotated
    q, k, v = split_heads(b, c, qkv)
    if norm:
        q, k = norm(q, p + "q_norm"), norm(k, p + "k_norm")
    if rotated:
        q, k = rotate(b, c, q, k)
    return b.attention(q, k, v, group, c.scale, c.softcap, c.slopes)


def split_heads(b: Builder, c: Shape, qkv: Value) -> list[Value]:
    # qkv[T, (heads + 2 kv_heads) D] -> q[T, heads D], k[T, kv_heads D], v[T, kv_heads D]
    return b.split(qkv, c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)


def rotate(b: Builder, c: Shape, q: Value, k: Value) -> tuple[Value, Value]:
    return b.rope(q, c.head_dim, *c.rope, name="q"), b.rope(k, c.head_dim, *c.rope, name="k")


def mlp(b: Builder, c: Shape, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    gate_up = b.linear(h, {p + "gate_proj": c.intermediate, p + "up_proj": c.intermediate}, c.mlp_bias, "gate_up")
    return b.linear(gated(b, c, gate_up), {p + "down_proj": c.hidden}, c.mlp_bias, "down")


def plain_mlp(b: Builder, c: Shape, up: str, down: str, h: Value, transposed: bool = False) -> Value:
    # h[T, hidden] -> y[T, hidden], without a gate
    y = b.act(b.linear(h, {up: c.intermediate}, c.mlp_bias, "up", transposed), c.act)
    return b.linear(y, {down: c.hidden}, c.mlp_bias, "down", transposed)


def joined_mlp(b: Builder, c: Shape, p: str, h: Value) -> Value:
    # h[T, hidden] -> y[T, hidden]
    gate_up = b.linear(h, {p + "gate_up_proj": 2 * c.intermediate}, name="gate_up")
    return b.linear(gated(b, c, gate_up), {p + "down_proj": c.hidden}, name="down")


def gated(b: Builder, c: Shape, gate_up: Value) -> Value:
    # gate_up[T, 2 intermediate] -> y[T, intermediate]
    gate, up = b.split(gate_up, c.intermediate, c.intermediate)
    return b.act_mul(gate, up, c.act)


def layer_norm(b: Builder, c: Shape, x: Value, module: str, plus: float = 0.0) -> Value:
    # x[n, hidden] -> y[n, hidden], with weight and bias
    return b.layer_norm(x, module + ".weight", module + ".bias", c.eps, plus=plus)


def embed_positions(b: Builder, c: Shape, table: str, offset: int = 0) -> Value:
    """Learned positions: rows of the table from `offset` on, as many as the model was made for. The last is its end."""
    # -> x[T, hidden]
    b.graph.bounded = True
    return b.embed(b.matrix({table: b.graph.max_positions + offset}, c.hidden), "positions", offset)


def prefix(checkpoint: Checkpoint, prefix: str, tensor: str) -> str:
    """`prefix`, or nothing where the checkpoint holds the model without its head: `tensor` is one of its names."""
    return prefix if prefix + tensor in checkpoint or tensor not in checkpoint else ""


def alibi_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Of ALiBi (Press et al. 2022): powers of 2^(-most/n), n a power of two; what is missing between those for 2n."""
    n = 2 ** (heads.bit_length() - 1)
    first = [2.0 ** (-most * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-most * (2 * i + 1) / (2 * n)) for i in range(heads - n)]
    return tuple(first + between)
