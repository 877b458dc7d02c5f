"""A GGUF model in Hugging Face layout, weights in bf16: for engines that read nothing else."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path

from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise, f32_to_bf16
from octavo.weights.spec import Checkpoint

ROWS = 2048
"""Of a matrix that are converted at once."""


def as_folder(model: Path) -> Path:
    """The folder beside the file, which is written where it is not there yet: config.json, model.safetensors and
    tokenizer.json. Values are rounded to bf16; those of a file in bf16 are the same."""
    folder = model.with_name(f"{model.name.removesuffix('.gguf')}-hf")
    if folder.is_dir():  # it was whole when it got its name
        return folder
    scratch = model.with_name(f".{folder.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        checkpoint = open_checkpoint(model)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **checkpoint.config,
            "dtype": "bfloat16",
        }
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(checkpoint, scratch / "model.safetensors")
        write_tokenizer(model, scratch)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_tokenizer(model: Path, folder: Path) -> None:
    """Of a GGUF file."""
    tokenizer, _ = load_gguf_tokenizer(model)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def _write_weights(checkpoint: Checkpoint, path: Path) -> None:
    """The format of safetensors: length of a JSON header, the header, the tensors."""
    header: dict[str, object] = {}
    end = 0
    for name in checkpoint.names():
        shape = checkpoint.info(name).shape
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in checkpoint.names():
            shape = checkpoint.info(name).shape
            rows = math.prod(shape[:-1])
            for row in range(0, rows, ROWS):
                info, data, factor = checkpoint.read(name, row, min(rows, row + ROWS))
                file.write(f32_to_bf16(dequantise(info.source, data, shape[-1], factor)).tobytes())
            checkpoint.release(name)
