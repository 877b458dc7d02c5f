"""FP8 checkpoints with `quant_method: fp8`: DeepSeek-V3's tiles, and one scale per tensor.

X.weight e4m3 [N, K] with X.weight_scale_inv (or X.weight_scale), by which it is multiplied: one number, or one for each
tile of weight_block_size. Scales of activations (input_scale) are not needed: ours are rounded to bf16.
"""

from __future__ import annotations

from octavo.weights.quant.floats import fp8
from octavo.weights.quant.found import Found
from octavo.weights.quant.matrix import Matrix
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of names of scales for an 8-bit KV cache. Ours takes its own for every token and head, or none."""


def find(settings: Settings, tensors: Tensors) -> Found:
    settings.serve("fmt", "e4m3", "float8_e4m3fn")
    settings.serve("activation_scheme", "dynamic", "static")
    settings.known(
        "quant_method", "scale_fmt", "modules_to_not_convert", "ignored_layers", "kv_cache_scheme", "dequantize"
    )
    size = settings.get("weight_block_size")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        raise settings.refused("weight_block_size", size, "two numbers above 0")
    tile = None if size is None else (size[0], size[1])
    matrices: dict[str, Matrix] = {}
    idle: set[str] = set()
    for name, entry in tensors.entries.items():
        if entry.dtype == "F8_E4M3":
            module = name.removesuffix(".weight")
            names = [f"{module}.{end}" for end in ("weight_scale_inv", "weight_scale")]
            scale = next((s for s in names if s in tensors), names[0])
            inputs = tuple(s for s in (f"{module}.input_scale", f"{module}.activation_scale") if s in tensors)
            matrices[name] = fp8(tensors, name, scale, tile, inputs)
    if not matrices:
        raise CheckpointError(f"{settings.where}: no tensor is quantised: none has type F8_E4M3")
    notices = unknown_keys(settings) + kv_scales(tensors, idle)
    return Found(matrices, idle, notices)


def kv_scales(tensors: Tensors, idle: set[str]) -> list[str]:
    """Adds the scales of a KV cache to `idle`. A notice, where there are any."""
    found = {name for name in tensors.entries if name.endswith(KV_SCALES)}
    idle |= found
    if not found:
        return []
    return [
        f"{len(found)} scales for an 8-bit KV cache ({min(found)}, ...) are not used: kv_dtype says what ours holds"
    ]
