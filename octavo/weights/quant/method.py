"""From quantization_config, or the files that came before it, to the method that reads the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.weights.hf_config import read_json
from octavo.weights.quant import auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from octavo.weights.quant.found import Found
from octavo.weights.quant.settings import Settings
from octavo.weights.safetensors_file import Tensors
from octavo.weights.spec import CheckpointError

METHODS = {
    "gptq": gptq.find,
    "awq": awq.find,
    "auto-round": auto_round.find,
    "compressed-tensors": compressed_tensors.find,
    "fp8": fp8.find,
    "mxfp4": mxfp4.find,
    "bitsandbytes": bitsandbytes.find,
}

_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Beside config.json, before transformers knew quantization_config -> what writes it."""


def find_quantised(path: Path, config: dict[str, Any], tensors: Tensors) -> tuple[Found, Path] | None:
    """Matrices of a quantised checkpoint, and the file that describes them; None where nothing is quantised.

    Takes quantization_config out of `config`: what it says is served. Raises CheckpointError.
    """
    file = path / "config.json"
    values = config.pop("quantization_config", None)
    if values is None:
        side = next((name for name in _SIDE_FILES if (path / name).is_file()), None)
        packed = next((name for name in tensors.entries if name.endswith(".qweight")), None)
        if packed is None:
            return None
        if side is None:
            raise CheckpointError(
                f"{path}: tensor {packed!r} is quantised, but config.json has no quantization_config, and there is no "
                f"{' or '.join(_SIDE_FILES)}"
            )
        file = path / side
        values = {"quant_method": _SIDE_FILES[side], **read_json(file)}
    settings = Settings(values, f"{file}: quantization_config" if file.name == "config.json" else str(file))
    method = settings.get("quant_method")
    if method is None and ("load_in_4bit" in values or "load_in_8bit" in values):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{settings.where}: quant_method {method!r} is not supported; supported: {', '.join(METHODS)}"
        )
    return METHODS[method](settings, tensors), file
