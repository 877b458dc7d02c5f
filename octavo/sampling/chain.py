"""Chains: samplers in an order of their own, for the rows that the usual order does not serve.

The usual order is the one of `DEFAULT_ORDER`; what of it is plain (penalties, DRY, temperature, top-k, min-p, top-p) has
a path of its own, without a chain. Names are those of llama.cpp's field `samplers`.
"""

from __future__ import annotations

from enum import IntEnum

from octavo.request import SamplingParams


class Op(IntEnum):
    """The numbers of native/sampler.h's ChainOp, and what the two values beside it are."""

    PENALTIES = 0
    DRY = 1
    TEMPERATURE = 2  # dynatemp_range, dynatemp_exponent
    TOP_N_SIGMA = 3  # top_n_sigma
    TOP_K = 4
    MIN_P = 5
    TYPICAL = 6  # typical_p
    TOP_P = 7
    XTC = 8  # xtc_probability, xtc_threshold


NAMES: dict[str, Op] = {
    "penalties": Op.PENALTIES,
    "dry": Op.DRY,
    "temperature": Op.TEMPERATURE,
    "top_n_sigma": Op.TOP_N_SIGMA,
    "top_k": Op.TOP_K,
    "min_p": Op.MIN_P,
    "typ_p": Op.TYPICAL,
    "top_p": Op.TOP_P,
    "xtc": Op.XTC,
}

DEFAULT_ORDER = tuple(Op)
_PLAIN = frozenset({Op.PENALTIES, Op.DRY, Op.TEMPERATURE, Op.TOP_K, Op.MIN_P, Op.TOP_P})


def chain(params: SamplingParams) -> list[tuple[Op, float, float]]:
    """The steps of `params` that change anything, in their order, with their values; empty where the usual path serves."""
    order = DEFAULT_ORDER if params.samplers is None else [NAMES[name] for name in params.samplers]
    steps = [(op, *_values(op, params)) for op in order if _changes(op, params)]
    ops = [op for op, _, _ in steps]
    greedy = params.temperature == 0 and params.dynatemp_range == 0
    if params.samplers is None and greedy:
        return []
    if params.dynatemp_range == 0 and _PLAIN.issuperset(ops) and ops == sorted(ops):
        return []
    return steps


def _values(op: Op, params: SamplingParams) -> tuple[float, float]:
    values = {
        Op.TEMPERATURE: (params.dynatemp_range, params.dynatemp_exponent),
        Op.TOP_N_SIGMA: (params.top_n_sigma, 0.0),
        Op.TYPICAL: (params.typical_p, 0.0),
        Op.XTC: (params.xtc_probability, params.xtc_threshold),
    }
    return values.get(op, (0.0, 0.0))


def _changes(op: Op, params: SamplingParams) -> bool:
    """Whether a sampler with these values can change a draw."""
    changes = {
        Op.PENALTIES: has_penalty(params),
        Op.DRY: has_dry(params),
        Op.TEMPERATURE: params.temperature != 1 or params.dynatemp_range != 0,
        Op.TOP_N_SIGMA: params.top_n_sigma > 0,
        Op.TOP_K: params.top_k > 0,
        Op.MIN_P: params.min_p > 0,
        Op.TYPICAL: params.typical_p < 1,
        Op.TOP_P: params.top_p < 1,
        Op.XTC: params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
    }
    return changes[op]


def has_penalty(params: SamplingParams) -> bool:
    """Whether draws depend on which tokens came before."""
    changed = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return changed and params.repeat_last_n != 0


def has_dry(params: SamplingParams) -> bool:
    """Whether draws depend on which sequences of tokens came before."""
    return params.dry_multiplier > 0 and params.dry_base >= 1 and params.dry_penalty_last_n != 0
