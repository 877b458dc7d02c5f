"""Lists of a config with an entry for each layer: of values that are known, and true of the graph that was built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.graph import ops
from octavo.graph.ir import Graph
from octavo.models.config import count
from octavo.models.rope import FULL, SLIDING
from octavo.weights.spec import CheckpointError

_KNOWN: dict[str, tuple[Any, ...]] = {
    "layer_types": (FULL, SLIDING),
    "layers_block_type": ("attention",),
    "attn_type_list": (1,),  # MiniMax: 0 is linear attention
    "mlp_layer_types": ("dense", "sparse"),
    "moe_layer_freq": (0, 1),
    "no_rope_layers": (0, 1),
}


def check_entries(config: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointError where a list has not one entry for each layer, or one that no family knows."""
    layers = None if config.get("num_hidden_layers") is None else count(config, "num_hidden_layers", path)
    for key, known in _KNOWN.items():
        found = config.get(key)
        if found is None or (key == "moe_layer_freq" and found == 1):  # a period
            continue
        if not isinstance(found, list) or layers not in (None, len(found)):
            said = f"{len(found)} {key}" if isinstance(found, list) else f"{key} = {found!r:.100}"
            raise CheckpointError(f"{path}: config has {said}, expected one for each of {layers} layers")
        for i, entry in enumerate(found):
            if entry not in known:
                served = ", ".join(map(str, known))
                raise CheckpointError(
                    f"{path}: config has {key} = {entry!r:.100} of layer {i}, which is not supported (served: {served})"
                )


def check_built(config: Mapping[str, Any], graph: Graph, path: str) -> None:
    """Raise CheckpointError where the family, which may not look at a list, made another layer than it says."""
    windows = {node.layer: node.attrs.window for node in graph.nodes if isinstance(node.attrs, ops.Attention)}
    routed = {node.layer for node in graph.nodes if isinstance(node.attrs, ops.Route)}
    for i, window in windows.items():
        sliding, sparse = window is not None, i in routed
        for key, made in (
            ("layer_types", SLIDING if sliding else FULL),
            ("mlp_layer_types", "sparse" if sparse else "dense"),
            ("moe_layer_freq", int(sparse)),
        ):
            found = config.get(key)
            if isinstance(found, list) and found[i] != made:
                raise CheckpointError(
                    f"{path}: config has {key} = {found[i]!r} of layer {i}, which by all else that it says is {made!r}"
                )
