"""Mixtures of experts: where checkpoints keep the experts' matrices, and the feed-forward block made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from octavo.graph import ops
from octavo.graph.build import Builder
from octavo.graph.ir import Value
from octavo.models.config import count
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


SEPARATE = ("gate_proj", "up_proj", "down_proj")
"""Modules of one expert under their usual names."""


def read_number(config: Mapping[str, Any], path: str, *keys: str) -> int:
    """Of experts, under the first of `keys` that the config has."""
    return count(config, next((key for key in keys if config.get(key) is not None), keys[0]), path)


def find(checkpoint: Checkpoint, p: str, e: Experts, hidden: int, modules: Sequence[str] = SEPARATE) -> Weights:
    """The experts under prefix `p`, in the layout that the checkpoint has.

    A tensor for each expert and module; a tensor for each module, [experts, out, in] (as in GGUF); or gate and up in
    one tensor too, gate_up_proj [experts, 2 intermediate, hidden]. Raises CheckpointError: a tensor is missing, or
    there are more or fewer experts than the config says.
    """
    gate, up, down = modules
    inner, each = e.intermediate, range(e.number)
    if f"{p}{gate}.weight" in checkpoint:
        check_count(checkpoint, e, *(f"{p}{m}.weight" for m in modules))
        return Weights(
            [{f"{p}{gate}.weight[{i}]": inner, f"{p}{up}.weight[{i}]": inner} for i in each],
            [{f"{p}{down}.weight[{i}]": hidden} for i in each],
        )
    if f"{p}gate_up_proj" in checkpoint:
        check_count(checkpoint, e, f"{p}gate_up_proj", f"{p}down_proj")
        return Weights(
            [{f"{p}gate_up_proj[{i}]": 2 * inner} for i in each], [{f"{p}down_proj[{i}]": hidden} for i in each]
        )
    return Weights(
        [{f"{p}{i}.{gate}.weight": inner, f"{p}{i}.{up}.weight": inner} for i in each],
        [{f"{p}{i}.{down}.weight": hidden} for i in each],
    )


def check_count(checkpoint: Checkpoint, e: Experts, *names: str) -> None:
    """Raise CheckpointError where a tensor of all experts has not as many as the config says."""
    for name in names:
        info = checkpoint.info(name)
        if info.shape[0] != e.number:
            raise CheckpointError(f"{info.file}: {name} has {info.shape[0]} experts, the config says {e.number}")


def block(b: Builder, e: Experts, w: Weights, h: Value, scores: Value, bias: str | None = None) -> Value:
    # h[T, hidden], scores[T, experts] -> y[T, hidden]; bias: of the choice alone
    routing = b.route(scores, e.route, bias)
    x = b.dispatch(h, routing, e.number)
    gate_up = b.expert_linear(x, routing, w.gate_up, w.gate_up_bias, name="expert_gate_up")
    gate, up = b.split(gate_up, e.intermediate, e.intermediate)
    y = b.expert_linear(b.act_mul(gate, up, e.act), routing, w.down, w.down_bias, name="expert_down")
    return b.combine(y, routing, e.number)
