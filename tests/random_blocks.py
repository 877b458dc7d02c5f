"""Random rows of every source format, and a GGUF model whose matrices are of many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from octavo.bench.blocks import HALVES as PLACES
from octavo.weights import formats
from octavo.weights.spec import PACKED

FLOATS = ("F32", "F16", "BF16", "F32D")
HALVES = PLACES | {"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)}
"""Of fp16 numbers in a block; by default the first two bytes."""
MIXED = [source for source in PACKED if source not in ("F32", "I4Z32", "I4Z64", "I4C", "I8Z64", "F8")]
"""The quantised formats of GGUF that have a packed one, F16 and BF16."""


def random_rows(source: str, rows: int, cols: int, seed: int = 0) -> formats.U8:
    """Any bytes are a valid row, as long as the scales are finite and of ordinary size."""
    rng = np.random.default_rng([seed, rows, cols])
    if source in FLOATS:
        numbers = rng.standard_normal((rows, cols)).astype(np.float32)
        if source == "BF16":
            return formats.f32_to_bf16(numbers).view(np.uint8)
        return numbers.astype(np.float16 if source == "F16" else np.float32).view(np.uint8)
    block_cols, block_bytes = formats.BLOCKS[source]
    blocks = rng.integers(0, 256, (rows, -(-cols // block_cols), block_bytes), np.uint8)
    if source in ("F8", "NF4", "FP4"):
        blocks[..., :4] = rng.uniform(-0.1, 0.1, (*blocks.shape[:2], 1)).astype(np.float32).view(np.uint8)
        if source == "F8":
            blocks[..., 4:][blocks[..., 4:] & 0x7F == 0x7F] = 0  # no NaN
    elif source == "MXFP4":
        blocks[..., 0] = rng.choice([0, 1, 2, 3, 117, 120, 124], blocks.shape[:2])
    elif source == "NVFP4":
        blocks[..., :4] = rng.integers(0, 128, (*blocks.shape[:2], 4))
    elif source == "I4C":
        blocks[..., 1:4] = 0
    elif source == "IQ1_M":
        blocks[..., [49, 51, 53, 55]] &= 0x0F  # the nibbles of its scale, highest last: of ordinary size
        blocks[..., 55] |= 0x20
    else:
        for place in HALVES.get(source, (0,)):
            scale = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
            blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
        if source in ("I4Z32", "I4Z64", "I8Z64"):
            blocks[..., 3] = 0
    return blocks.reshape(rows, -1)


def scaled_rows(source: str, rows: int, cols: int, size: float, seed: int) -> formats.U8:
    """The same with values of about the root mean square `size`, at which a model's activations stay ordinary."""
    data = random_rows(source, rows, cols, seed)
    if source in ("F32", "F16", "BF16"):
        numbers = formats.dequantise(source, data, cols) * np.float32(size)
        return formats.f32_to_bf16(numbers).view(np.uint8) if source == "BF16" else numbers.astype(
            np.float16 if source == "F16" else np.float32).view(np.uint8)  # fmt: skip
    rng = np.random.default_rng(seed)
    blocks = data.reshape(rows, -1, formats.BLOCKS[source][1])
    if source == "MXFP4":
        blocks[..., 0] = rng.integers(118, 122, blocks.shape[:2])
    elif source == "NVFP4":
        blocks[..., :4] = rng.integers(4, 20, (*blocks.shape[:2], 4))
    else:
        factor = size / np.sqrt(np.square(formats.dequantise(source, data, cols)).mean())
        for place in HALVES.get(source, (0,)):
            half = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)
            blocks[..., place : place + 2] = (half * np.float16(factor)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_mixed(path: Path, sources: Sequence[str], layers: int = 2, seed: int = 0, inner: int = 256) -> Path:
    """A llama of width 256 with vocabulary 320, whose matrices take the formats of `sources` in turn."""
    hidden, heads, vocab = 256, 4, 320
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    for i in range(layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(hidden, np.float32))
        shapes |= {
            f"blk.{i}.attn_q": (hidden, hidden), f"blk.{i}.attn_k": (hidden // 2, hidden),
            f"blk.{i}.attn_v": (hidden // 2, hidden), f"blk.{i}.attn_output": (hidden, hidden),
            f"blk.{i}.ffn_gate": (inner, hidden), f"blk.{i}.ffn_up": (inner, hidden), f"blk.{i}.ffn_down": (hidden, inner),
        }  # fmt: skip
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i, (name, (rows, cols)) in enumerate(shapes.items()):
        source = sources[i % len(sources)]
        data = scaled_rows(source, rows, cols, 1.5 / cols**0.5, seed + i)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[source])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
