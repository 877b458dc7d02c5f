"""Models that the bench makes itself: the demo's weights in other formats, and random ones of a larger shape.

A model is made once, in seconds to a minute, and kept; the same bytes come out every time. They have the demo's tokenizer.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import LlamaFileType

from octavo.bench import hf_random
from octavo.bench.blocks import SOURCES, random_rows
from octavo.bench.gguf_out import Tensor, write_gguf
from octavo.bench.hf_folder import write_tokenizer
from octavo.bench.hf_random import HF_FORMATS
from octavo.disk import cache_home
from octavo.weights.formats import U8, dequantise, row_bytes
from octavo.weights.gguf_file import GgufFile, read_gguf
from octavo.weights.gguf_names import FAMILIES
from octavo.weights.locate import locate

DEMO = {"demo-f16": ("F16", "F16"), "demo-bf16": ("BF16", "BF16"), "demo-q4_0": ("Q4_0", "Q8_0")}
"""The demo's values rounded to the format of the matrices and that of the embedding."""

LARGE = {f"1b-{source.lower()}": source for source in SOURCES}
"""Random matrices, all of one format, in the shape of a Llama with 1.1e9 weights."""

FOLDERS = {f"1b-{name}": form for name, form in HF_FORMATS.items()}
"""The same shape in Hugging Face layout, matrices of the layers in formats of other checkpoints, the embedding in bf16."""

NAMES = (*DEMO, *LARGE, *FOLDERS)

ROWS = 2048
"""Of a matrix that are made at once."""


class Shape(NamedTuple):
    """A Llama with tied embeddings."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    inner: int = 8192
    vocab: int = 49152
    positions: int = 8192

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """GGUF name, rows and columns of each."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "token_embd", self.vocab, self.hidden
        for i in range(self.layers):
            yield f"blk.{i}.attn_q", self.hidden, self.hidden
            yield f"blk.{i}.attn_k", kv, self.hidden
            yield f"blk.{i}.attn_v", kv, self.hidden
            yield f"blk.{i}.attn_output", self.hidden, self.hidden
            yield f"blk.{i}.ffn_gate", self.inner, self.hidden
            yield f"blk.{i}.ffn_up", self.inner, self.hidden
            yield f"blk.{i}.ffn_down", self.hidden, self.inner

    def norms(self) -> Iterator[str]:
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm"
            yield f"blk.{i}.ffn_norm"
        yield "output_norm"

    def metadata(self) -> dict[str, Any]:
        return {
            "general.architecture": "llama",
            "llama.block_count": self.layers,
            "llama.context_length": self.positions,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.inner,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": self.hidden // self.heads,
            "llama.vocab_size": self.vocab,
        }

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "num_hidden_layers": self.layers,
            "max_position_embeddings": self.positions,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab,
        }

    def modules(self) -> Iterator[tuple[str, int, int]]:
        """Names in Hugging Face layout, rows and columns, of all but the embedding."""
        for name, rows, cols in self.matrices():
            if name.startswith("blk."):
                _, number, stem = name.split(".")
                yield f"model.layers.{number}.{FAMILIES['llama'].layer[stem]}", rows, cols


def made(name: str, folder: Path | None = None) -> Path:
    """The GGUF file, or folder, of one of NAMES, which is written where it is not there yet. folder: default
    ~/.cache/octavo/bench."""
    folder = folder or cache_home() / "bench"
    path = folder / (name if name in FOLDERS else f"{name}.gguf")
    if path.exists():  # it was whole when it got its name
        return path
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{name}.{os.getpid()}"
    try:
        write(scratch, name)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink(missing_ok=True)
    return path


def write(path: Path, name: str) -> None:
    demo = demo_file()
    if name in FOLDERS:
        path.mkdir()
        hf_random.write_random(path, Shape().config(), list(Shape().modules()), FOLDERS[name])
        write_tokenizer(demo.file.path, path)
    elif name in DEMO:
        metadata = demo.metadata | _file_type(DEMO[name][0])
        write_gguf(path, metadata, list(_rounded(demo, *DEMO[name])), f"making {name}")
    else:
        write_random(path, Shape(), LARGE[name], f"making {name}", tokenizer_of(demo))


def demo_file() -> GgufFile:
    return read_gguf(locate("demo", lambda line: print(line, file=sys.stderr)))


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """The metadata that say it."""
    return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}


def write_random(path: Path, shape: Shape, source: str, title: str, tokenizer: dict[str, Any] | None = None) -> None:
    """tokenizer: its metadata; a model without one takes token ids alone."""
    metadata = shape.metadata() | _file_type(source) | (tokenizer or {})
    write_gguf(path, metadata, list(_random(shape, source)), title)


def _file_type(source: str) -> dict[str, Any]:
    """The metadata that say the format of most matrices: OpenVINO reads no file without."""
    return {"general.file_type": int(getattr(LlamaFileType, f"MOSTLY_{source}", LlamaFileType.GUESSED))}


def _rounded(demo: GgufFile, matrix: str, embedding: str) -> Iterator[Tensor]:
    for name, tensor in demo.tensors.items():
        source = "F32" if len(tensor.shape) == 1 else embedding if name == "token_embd.weight" else matrix
        yield Tensor(name, tensor.shape, source, _recoded(demo, name, source))


def _recoded(demo: GgufFile, name: str, source: str) -> Iterator[U8]:
    tensor = demo.tensors[name]
    cols = tensor.shape[-1]
    data = tensor.file.data[tensor.start : tensor.stop].reshape(-1, row_bytes(tensor.source, cols))
    for start in range(0, len(data), ROWS):
        values = dequantise(tensor.source, data[start : start + ROWS], cols)
        yield gguf.quantize(values, gguf.GGMLQuantizationType[source]).view(np.uint8)


def _random(shape: Shape, source: str) -> Iterator[Tensor]:
    """Values of a size at which activations stay ordinary."""
    for name, rows, cols in shape.matrices():
        yield Tensor(f"{name}.weight", (rows, cols), source, _blocks(name, source, rows, cols))
    ones = np.ones((1, shape.hidden), np.float32).view(np.uint8)
    for name in shape.norms():
        yield Tensor(f"{name}.weight", (shape.hidden,), "F32", iter([ones]))


def _blocks(name: str, source: str, rows: int, cols: int) -> Iterator[U8]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for start in range(0, rows, ROWS):
        yield random_rows(source, min(ROWS, rows - start), cols, cols**-0.5, rng)
