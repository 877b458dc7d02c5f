"""Every operation: its attributes, and the order of its ins and outs. T tokens, R logit rows, D head size.

`backends.reference` is the meaning of each; a new op needs two users or a line in docs/DECISIONS.md.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Attrs(msgspec.Struct, frozen=True):
    op: ClassVar[str] = ""


# ---- base ops


class Embed(Attrs, frozen=True):
    """(ids i32[T,1], weight[N,H]) -> x[T,H]: rows ids + offset of the table, dequantised to float32.

    ids is the input "token_ids" of the batch (N is the vocabulary), "positions": learned positions, or "token_types".
    """

    op = "embed"
    offset: int = 0


class RmsNorm(Attrs, frozen=True):
    """(x[n,H]) or (x, weight) -> y[n,H]: x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang & Sennrich 2019).

    Over whole rows, weight [1,H]; or, where head_dim D is given, over each D columns, weight [1,D] or [1,H].
    """

    op = "rms_norm"
    eps: float = 1e-5
    head_dim: int | None = None


class LayerNorm(Attrs, frozen=True):
    """(x[n,H]), (x, weight) or (x, weight, bias) -> y: (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias.

    In float32 (Ba et al. 2016). Whole rows or heads, as RmsNorm; bias has the shape of weight.
    """

    op = "layer_norm"
    eps: float = 1e-5
    head_dim: int | None = None


class Round(Attrs, frozen=True):
    """(x f32[n,K]) -> y[n,K] of its out's dtype (A8, A16 or BF16): the rounding of a linear's input.

    An op of its own because the rounded value takes memory and is shared by the linears that read it.
    """

    op = "round"


class Linear(Attrs, frozen=True):
    """(x[n,K], weight[N,K]) or (x, weight, bias[1,N]) -> y f32[n,N]: x @ weight.T + bias.

    x's dtype says how the product is computed: F32 (float32 FMA), BF16 (bf16 products), A8 and A16 (integers
    in groups of 32). The weight keeps its exact value whatever x is rounded to. Reduced over K in one order whatever n (P1).
    """

    op = "linear"


class Rope(Attrs, frozen=True):
    """(x[T,heads*D], positions i32[T,1]) -> y[T,heads*D]: rotary embedding of every head (Su et al. 2021).

    The first 2*len(inv_freq) dimensions of a head are rotated by position * inv_freq, the rest pass.
    neox: dimension i pairs with i + len(inv_freq); otherwise 2i pairs with 2i+1. cos and sin are float32
    roundings of float64 values, times `scale`.
    """

    op = "rope"
    head_dim: int
    inv_freq: tuple[float, ...]
    neox: bool = True
    scale: float = 1.0


class KvWrite(Attrs, frozen=True):
    """(k[T,kv_heads*D], v[T,kv_heads*V], state) -> (): rounds to the KV type and writes each token to its slot.

    V is value_dim, or D without one. Where a head's value is not finite in the KV type, it counts as zeros under a key of
    NaN: a token that sees it gets NaN, and others nothing of it.

    int8: per token and head, scale = max|x| / 127 and q = x / scale to the nearest even.
    """

    op = "kv_write"
    group: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim


class Attention(Attrs, frozen=True):
    """(q[T,heads*D], state) or (q, state, sinks[1,heads]) -> y f32[T,heads*V]: softmax(scale q k^T) v.

    Over the pages of the sequence; a token sees the last `window` tokens, itself included (None: all). Not causal, it
    sees what follows it, too, window - 1 tokens to either side (None: all): the sequence is then in one step.
    softcap c > 0: a score s becomes c tanh(s / c) (Gemma 2, Team Gemma 2024). slopes, one per head: a score gets
    slope * (position of the key - of the query) (ALiBi, Press et al. 2022). sinks: exp(sink of the head) is added to
    the sum of the softmax (gpt-oss, OpenAI 2025; Xiao et al. 2024).
    Reads only values already rounded to the KV type, those of its own chunk included. q * scale * log2(e) is rounded
    to the KV type, probabilities too; where that is int8, both to 16 bits. Splits of 512 tokens by absolute position
    are merged in position order, sinks last (P1).
    """

    op = "attention"
    group: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    causal: bool = True
    softcap: float = 0.0
    slopes: tuple[float, ...] = ()
    value_dim: int | None = None  # V. None: head_dim, D

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim


ACTS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid", "tanh")
"""Activations of `act` and `act_mul`. With s(x) = 1 / (1 + exp(-x)): silu x s(x) (Hendrycks & Gimpel 2016, as are the
next three), gelu x * Phi(x) of the normal distribution, gelu_tanh x s(2 sqrt(2/pi) (x + 0.044715 x^3)), gelu_quick
x s(1.702 x), relu max(0, x), relu2 its square (So et al. 2021), sigmoid s(x), tanh."""

GATED_ACTS = (*ACTS, "swiglu_oai")
"""Of `act_mul` alone: swiglu_oai is g s(1.702 g) (u + 1), g = min(gate, 7), u = up within +-7 (gpt-oss, OpenAI 2025)."""


class Act(Attrs, frozen=True):
    """(x[n,I]) -> y[n,I]: act(x)."""

    op = "act"
    act: str


class ActMul(Attrs, frozen=True):
    """(gate[n,I], up[n,I]) -> y[n,I]: act(gate) * up. The two may be slices of one value."""

    op = "act_mul"
    act: str = "silu"


class Add(Attrs, frozen=True):
    """(a[n,H], b[n,H]) -> y[n,H]."""

    op = "add"


class Mul(Attrs, frozen=True):
    """(a[n,H], b) -> y[n,H]: a * b, where b is [n,H], a scalar per row [n,1] or a weight row [1,H]."""

    op = "mul"


class Scale(Attrs, frozen=True):
    """(x[n,H]) -> y[n,H]: x * factor, factor a float32."""

    op = "scale"
    factor: float


class Softcap(Attrs, frozen=True):
    """(x[n,H]) -> y[n,H]: cap * tanh(x / cap) (Gemma 2, Team Gemma 2024)."""

    op = "softcap"
    cap: float


class Clamp(Attrs, frozen=True):
    """(x[n,H]) -> y[n,H]: x within [low, high]; NaN stays."""

    op = "clamp"
    low: float
    high: float


class GatherCols(Attrs, frozen=True):
    """(x f32[n,K], order[1,K]) -> y f32[n,K]: y[:,i] = x[:,order[i]], for weights whose columns are sorted (act-order).

    order holds each of 0 .. K-1, exact in float32.
    """

    op = "gather_cols"


class Concat(Attrs, frozen=True):
    """(a[n,heads*A], b[n,heads*B], ...) -> y[n,heads*(A+B+...)]: side by side within each head."""

    op = "concat"
    heads: int = 1


class SplitHeads(Attrs, frozen=True):
    """(x[n,heads*K]) -> y[heads*n,K]: row h*n + i holds head h of row i."""

    op = "split_heads"
    heads: int


class HeadLinear(Attrs, frozen=True):
    """(x[heads*n,K] as SplitHeads orders it, weight[heads*N,K]) -> y[n,heads*N]: each head through N rows of its own.

    As Linear. Latent attention (DeepSeek-AI 2024) has one matrix per head into and out of the latent space.
    """

    op = "head_linear"
    heads: int


SCORINGS = ("softmax", "softmax_top", "sigmoid", "sparse_mixer")
"""What Route makes of scores: see there."""


class Route(Attrs, frozen=True):
    """(scores[n,E]) or (scores, bias[1,E]) -> routing[n,2k]: k experts of each row as whole numbers, then k weights.

    p is the softmax of all scores, their sigmoid, or (softmax_top) the scores themselves. Experts stand in the order
    of p + bias, equal ones in that of their ids; the first k are taken. groups > 1: only of the top_groups best among
    `groups` equal runs of experts, by the sum of the group_best greatest of each (DeepSeek-AI 2024). The weights are p
    of the chosen (softmax_top: the softmax of these alone), `normalise`: over their sum, and times `scale`.
    sparse_mixer (Liu et al. 2024), k = 2: each is the greatest of what is left, weighed by its softmax among the
    scores s but those with (top - s) / max(|s|, top) > 2 `jitter`.
    """

    op = "route"
    top_k: int
    scoring: str = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    jitter: float = 0.0


class Dispatch(Attrs, frozen=True):
    """(x[n,K] of any type, routing[n,2k]) -> y[k*n,K]: each row once for each of its experts.

    Rows of one expert stand together, in ascending order of expert, then row: where a row stands depends on the
    others, what is computed of it does not.
    """

    op = "dispatch"
    experts: int


class ExpertLinear(Attrs, frozen=True):
    """(x[k*n,K] as Dispatch orders it, routing[n,2k], weight[E*N,K]) or with bias[1,E*N] -> y[k*n,N].

    Each row through the N rows of its expert in the weight, as Linear.
    """

    op = "expert_linear"
    experts: int


class GatherExpertCols(Attrs, frozen=True):
    """(x f32[k*n,K] as Dispatch orders it, routing[n,2k], order[1,E*K]) -> y f32[k*n,K]: y[r,i] = x[r,order[e*K+i]].

    e is the expert of the row: GatherCols where each expert has an order of its own.
    """

    op = "gather_expert_cols"
    experts: int


class Combine(Attrs, frozen=True):
    """(x[k*n,H] as Dispatch orders it, routing[n,2k]) -> y[n,H]: weighted sum of each row's experts.

    In the order of the routing, so that no other row changes it (P1).
    """

    op = "combine"
    experts: int


class GatherRows(Attrs, frozen=True):
    """(x[T,H], logit_rows i32[R,1]) -> y[R,H]."""

    op = "gather_rows"


class Sample(Attrs, frozen=True):
    """(logits[R,vocab]) -> (): draws and scores by the batch's sampling arrays (`sampling.definition`)."""

    op = "sample"


class LoraShrink(Attrs, frozen=True):
    """(x f32[T,K], adapters i32[T,1]) -> h f32[T, targets * rank]: inputs of low-rank deltas (Hu et al. 2021).

    Columns [i * rank, i * rank + r) of a row whose adapter has a matrix A [r,K] for target i are scale * (A x); all other
    columns are 0, and whole rows where `adapters` is -1. Which adapters there are is state of the program, not structure.
    """

    op = "lora_shrink"
    targets: tuple[str, ...]  # modules of the checkpoint, those of the linear beside it
    rank: int  # the most that an adapter may have


class LoraExpand(Attrs, frozen=True):
    """(h[T, targets * rank], y[T,N], adapters i32[T,1]) -> z[T,N]: y + B h in the columns of each target.

    A row without an adapter, or columns whose target its adapter does not have, keep the bits of y. z may overlay y.
    """

    op = "lora_expand"
    targets: tuple[str, ...]
    sizes: tuple[int, ...]  # columns of each target, side by side in y


# ---- fused kinds; each is bit-equal to its expansion


class NormRound(Attrs, frozen=True):
    """The ins of its norm, over whole rows -> y[n,H] rounded = rms_norm or layer_norm, + round."""

    op = "norm_round"
    norm: RmsNorm | LayerNorm


class LinearAdd(Attrs, frozen=True):
    """(x[n,K], weight[N,K], residual f32[n,N]), perhaps bias[1,N] -> y f32[n,N] = linear + add.

    y may overlay residual exactly.
    """

    op = "linear_add"


class LinearActRound(Attrs, frozen=True):
    """(x[n,K], weight[I,K]), perhaps bias[1,I] -> y[n,I] rounded = linear + act + round."""

    op = "linear_act_round"
    act: str


class LinearActMulRound(Attrs, frozen=True):
    """(x[n,K], gate_up[2I,K]), perhaps bias[1,2I] -> y[n,I] rounded = linear + act_mul(its halves) + round."""

    op = "linear_act_mul_round"
    act: str = "silu"


class RopeKvWrite(Attrs, frozen=True):
    """(q, k, v, positions, state) -> q rotated = rope(q), rope(k), kv_write(k, v)."""

    op = "rope_kv_write"
    rope: Rope
    kv_write: KvWrite


class AttentionRound(Attrs, frozen=True):
    """(q, state) -> y rounded = attention + round. Needs heads/kv_heads * D to be a multiple of 32."""

    op = "attention_round"
    attention: Attention


class LinearSample(Attrs, frozen=True):
    """(x[R,K], weight[vocab,K]), perhaps bias -> logits[R,vocab] = linear, times `scale`, softcap where > 0; and sample.

    The same tokens and scores. A backend may leave out logits of rows whose draw needs none: `Program.logits`.
    """

    op = "linear_sample"
    scale: float = 1.0
    softcap: float = 0.0
