"""Config groups of compressed-tensors: how the weights of which modules are quantised."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.spec import CheckpointError

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "nvfp4-pack-quantized",
)  # fmt: skip

MIXED = "mixed-precision"
"""The format of a whole config whose groups have formats of their own."""


class Scheme(NamedTuple):
    """Of the weights of a config group."""

    format: str  # one of FORMATS
    kind: str  # int or float
    bits: int
    group: int | None  # inputs that share a scale
    tile: tuple[int, int] | None  # outputs and inputs that do
    symmetric: bool  # else there are zero points


class Schemes:
    """The scheme of each module, by name: targets that are names come first, then patterns, then classes."""

    def __init__(self, settings: Settings) -> None:
        self._ignored = settings.names("ignore")
        self._groups: list[tuple[list[str], Scheme]] = []
        self.notices: list[str] = []
        default = settings.serve("format", *FORMATS, MIXED)
        groups = settings.inner("config_groups")
        for name in groups.items():
            group = groups.inner(name)
            self._groups.append((group.names("targets"), self._scheme(group, default)))
        if not self._groups:
            raise CheckpointError(f"{settings.where}: config_groups is missing or empty")
        for target in [t for targets, _ in self._groups for t in targets] + self._ignored:
            _matches(target, "")  # that patterns can be read

    def _scheme(self, group: Settings, default: Any) -> Scheme:
        format = group.serve("format", *FORMATS, default=default)
        if format not in FORMATS:
            raise group.refused("format", format, f"served: {', '.join(FORMATS)}")
        group.empty("output_activations")
        group.known("input_activations")  # ours are rounded in another way, docs/FORMATS.md
        weights = group.inner("weights")
        kind = weights.serve("type", "int", "float", default="int")
        bits = weights.number("num_bits", 8)
        size, block = weights.get("group_size"), weights.get("block_structure")
        inferred = "tensor" if size is None else "channel" if size == -1 else "group"
        served = ("tensor", "channel", "group", "block", "tensor_group")
        strategy = weights.serve("strategy", *served, default=inferred)
        weights.serve("dynamic", False)
        symmetric = weights.serve("symmetric", True, False, default=True) is not False
        weights.serve("actorder", True, False, "group", "weight", "dynamic", "static")  # g_idx says what it is
        weights.known("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        if isinstance(block, str):
            block = [int(n) if n.isdecimal() else 0 for n in block.split("x")]
        if strategy == "block" and not (
            isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise weights.refused("block_structure", block, "two numbers above 0")
        if strategy in ("group", "tensor_group") and not (type(size) is int and size > 0):
            raise weights.refused("group_size", size, "a number above 0")
        if bits > 8 or (kind == "float" and bits != (8 if format in FORMATS[2:4] or format == FORMATS[5] else 4)):
            raise weights.refused("num_bits", bits, f"not of type {kind} in the format {format}")
        self.notices += unknown_keys(group, {"weights": weights})
        tile = (block[0], block[1]) if strategy == "block" else None
        grouped = size if strategy in ("group", "tensor_group") else None
        return Scheme(format, kind, bits, grouped, tile, symmetric)

    def of(self, module: str) -> Scheme | None:
        """None: the config leaves it as it is."""
        if any(_matches(pattern, module) for pattern in self._ignored):
            return None
        for wanted in (_is_name, _is_pattern, _is_class):
            for targets, scheme in self._groups:
                if any(wanted(target) and _matches(target, module) for target in targets):
                    return scheme
        return None


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target in _CLASSES


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_class(target)


_CLASSES = {"Linear": False, "Embedding": True}
"""Class of a module in torch, as far as a name tells it -> whether it is that of embeddings."""


def _matches(target: str, module: str) -> bool:
    if _is_pattern(target):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error as error:
            raise CheckpointError(f"quantization_config: {target!r} is no regular expression: {error}") from error
    if _is_class(target):
        return _CLASSES[target] == module.endswith("embed_tokens")
    return target == module
