"""A GGUF model as a directory in the Hugging Face layout: bf16 weights, and the tokenizer that its metadata gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from octavo.quantize.directory import Tensor, write_tensors
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.formats import dequantise, f32_to_bf16


def save_dequantised(gguf: Path, folder: Path) -> Path:
    """Returns `folder`, which is made. Rotary scaling that transformers knows by no name is not carried over."""
    checkpoint = open_checkpoint(gguf)
    folder.mkdir(parents=True)
    config = {key: value for key, value in checkpoint.config.items() if value is not None}
    special = load_gguf_tokenizer(gguf)
    config |= {"torch_dtype": "bfloat16", "bos_token_id": special[1].bos_id, "eos_token_id": special[1].eos_id}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for name in checkpoint.names():
        info, data, factor = checkpoint.read(name)
        values = dequantise(info.source, data.reshape(-1, data.shape[-1]), info.shape[-1], factor)
        tensors[name] = Tensor("BF16", info.shape, f32_to_bf16(values).view(np.uint8))
    write_tensors(folder / "model.safetensors", tensors)
    backend, tokens = special
    backend.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = dict(tokens.names)
    described |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bool(tokens.add_bos)}
    if "default" in tokens.chat_templates:
        described["chat_template"] = tokens.chat_templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
    return folder
