"""Mixtures of experts: where checkpoints keep the experts' matrices, and the feed-forward block made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import Value
from octavo.models.config import count, flag, positive
from octavo.weights.spec import Checkpoint, CheckpointError

Modules = list[dict[str, int]]
"""Of each expert, its matrices (or biases) stacked along the output: {name: output features}."""


class Experts(NamedTuple):
    """Sizes of the routed experts of a model, and how a token's are chosen."""

    number: int
    intermediate: int
    act: str
    route: ops.Route


class Weights(NamedTuple):
    """Names of the experts' tensors in one layer."""

    gate_up: Modules  # gate before up
    down: Modules
    gate_up_bias: Modules = []
    down_bias: Modules = []


def read_count(config: Mapping[str, Any], path: str, *keys: str) -> int:
    """Of experts, under the first of `keys` that the config has."""
    number = count(config, next((key for key in keys if config.get(key) is not None), keys[0]), path)
    if (top_k := count(config, "num_experts_per_tok", path)) > number:
        raise CheckpointError(f"{path}: config has num_experts_per_tok = {top_k}, and there are {number} experts")
    return number


def read_grouped(config: Mapping[str, Any], path: str, scoring: str, group_best: int) -> ops.Route:
    """The routing of configs in the manner of DeepSeek: groups, a factor, weights over their sum."""
    experts, groups = read_count(config, path, "n_routed_experts"), count(config, "n_group", path, default=1)
    top_groups = count(config, "topk_group", path, default=1)
    top_k = count(config, "num_experts_per_tok", path)
    if experts % groups or top_groups > groups or top_k > experts // groups * top_groups:
        raise CheckpointError(
            f"{path}: config has num_experts_per_tok = {top_k}, topk_group = {top_groups} and n_group = {groups}: "
            f"{top_k} of {experts} experts in {top_groups} of {groups} groups cannot be"
        )
    return ops.Route(
        top_k,
        scoring,
        flag(config, "norm_topk_prob", path),
        positive(config, "routed_scaling_factor", path, default=1.0),
        groups,
        top_groups,
        min(group_best, experts // groups),
    )


def find(checkpoint: Checkpoint, p: str, e: Experts, hidden: int, *names: str) -> Weights:
    """The experts of the layer under prefix `p`, in the layout that the checkpoint has.

    A tensor for each expert and module: `names` are the prefix of expert numbers, and the modules gate, up and down.
    A tensor for each module, [experts, out, in], as GGUF files have. Or gate and up in one tensor, too: gate_up_proj
    [experts, 2 intermediate, hidden]. CheckpointError: there are more or fewer experts than the config says.
    """
    _check_scoring(checkpoint, e.route)
    prefix, gate, up, down = names or SEPARATE
    each, inner, stacked = range(e.number), e.intermediate, f"{p}{SEPARATE[0]}"
    if f"{stacked}gate_proj.weight" in checkpoint:
        check_count(checkpoint, e, *(f"{stacked}{m}.weight" for m in SEPARATE[1:]))
        gates = [{f"{stacked}{m}.weight[{i}]": inner for m in ("gate_proj", "up_proj")} for i in each]
        return Weights(gates, [{f"{stacked}down_proj.weight[{i}]": hidden} for i in each])
    if f"{stacked}gate_up_proj" in checkpoint:
        return joined(checkpoint, e, hidden, f"{stacked}gate_up_proj", f"{stacked}down_proj")
    last = f"{p}{prefix}{e.number - 1}.{down}.weight"
    if last not in checkpoint:  # before names of all are made: the config may say any number
        raise CheckpointError(f"{checkpoint.path}: there is no {last}, the config says {e.number} experts")
    return Weights(
        [{f"{p}{prefix}{i}.{m}.weight": inner for m in (gate, up)} for i in each],
        [{f"{p}{prefix}{i}.{down}.weight": hidden} for i in each],
    )


GROUPED = ("routed_scaling_factor", "n_group", "topk_group")
"""Keys that read_grouped serves."""

SEPARATE = ("mlp.experts.", "gate_proj", "up_proj", "down_proj")


def joined(checkpoint: Checkpoint, e: Experts, hidden: int, gate_up: str, down: str) -> Weights:
    """Tensors gate_up [experts, 2 intermediate, hidden] and down [experts, hidden, intermediate]."""
    check_count(checkpoint, e, gate_up, down)
    inner = e.intermediate
    check_shape(checkpoint, gate_up, e.number, 2 * inner, hidden)
    check_shape(checkpoint, down, e.number, hidden, inner)
    return Weights(
        [{f"{gate_up}[{i}][0:{inner}]": inner, f"{gate_up}[{i}][{inner}:]": inner} for i in range(e.number)],
        [{f"{down}[{i}]": hidden} for i in range(e.number)],
    )


def check_count(checkpoint: Checkpoint, e: Experts, *names: str) -> None:
    """Raise CheckpointError where a tensor of all experts has not as many as the config says."""
    for name in names:
        info = checkpoint.info(name)
        if info.shape[0] != e.number:
            raise CheckpointError(f"{info.file}: {name} has {info.shape[0]} experts, the config says {e.number}")


def check_shape(checkpoint: Checkpoint, name: str, *shape: int) -> None:
    """Raise CheckpointError where a tensor of all experts has another shape: parts of it are then there, too."""
    info = checkpoint.info(name)
    if tuple(info.shape) != shape:
        raise CheckpointError(f"{info.file}: {name} has shape {tuple(info.shape)}, the config asks for {shape}")


_GATING = {1: ("softmax", "softmax_top"), 2: ("sigmoid",), 3: ("softmax_top",)}
"""GGUF's expert_gating_func -> what it may mean in Route."""


def _check_scoring(checkpoint: Checkpoint, route: ops.Route) -> None:
    found = checkpoint.config.get("expert_gating_func")
    if found is not None and route.scoring not in (_GATING.get(found, ()) if type(found) is int else ()):
        raise CheckpointError(
            f"{checkpoint.path}: expert_gating_func {found!r} is not supported, the family has {route.scoring}"
        )


def block(b: Builder, e: Experts, w: Weights, h: Value, scores: Value, bias: str | None = None) -> Value:
    # h[T, hidden], scores[T, experts] -> y[T, hidden]; bias: of the choice alone
    routing = b.route(scores, e.route, bias)
    x = b.dispatch(h, routing, e.number)
    gate_up = b.expert_linear(x, routing, w.gate_up, w.gate_up_bias, name="expert_gate_up")
    gate, up = b.split(gate_up, e.intermediate, e.intermediate)
    y = b.expert_linear(b.act_mul(gate, up, e.act), routing, w.down, w.down_bias, name="expert_down")
    return b.combine(y, routing, e.number)


def sparse_layers(config: Mapping[str, Any], layers: int, path: str) -> list[bool]:
    """Of each layer, whether it has experts: every decoder_sparse_step-th but `mlp_only_layers` (Qwen)."""
    step, dense = count(config, "decoder_sparse_step", path, default=1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError(f"{path}: config has mlp_only_layers = {dense!r:.100}, expected a list of layers")
    if (other := next((i for i in dense if not 0 <= i < layers), None)) is not None:
        raise CheckpointError(f"{path}: config has mlp_only_layers with {other}: layers are 0 to {layers - 1}")
    return [(i + 1) % step == 0 and i not in dense for i in range(layers)]
