"""Models that the bench makes: what their matrices hold, and that they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.bench import format_models, models
from octavo.bench.blocks import SOURCES, random_rows
from octavo.bench.format_models import tensor_bytes
from octavo.bench.hf_folder import as_folder
from octavo.bench.hf_random import HF_FORMATS, write_random
from octavo.bench.models import Shape, made
from octavo.bench.offline import Offline, check
from octavo.config import ConfigError, EngineConfig
from octavo.models import build_graph
from octavo.weights import formats
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf_file import read_gguf

SMALL = Shape(hidden=256, layers=2, heads=4, kv_heads=2, inner=512, vocab=1024, positions=512)


PACKED_AS = {
    "gptq-g32": "w4z", "gptq-g128": "w4z64", "gptq-channel": "w4c", "gptq-8bit": "w8", "awq-g128": "w4z64",
    "w4a16-g128": "w4z64", "w4a16-channel": "w4c", "w8a16-channel": "w8z64", "w8a8": "w8z64", "fp8-channel": "f8",
    "fp8-128x128": "f8", "mxfp4-packed": "w4m",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_random_rows(source: str) -> None:
    """Bytes of the format, the same each time, with values around nothing and of the size that was asked for."""
    data, again = (random_rows(source, 40, 2048, 0.02, np.random.default_rng(3)) for _ in range(2))
    assert data.shape == (40, formats.row_bytes(source, 2048)) and (data == again).all()
    values = formats.dequantise(source, data, 2048)
    size = np.sqrt(np.square(values).mean())
    assert 0.01 < size < 0.05 and abs(values.mean()) < 0.2 * size


@pytest.mark.parametrize("source", ["Q4_0", "BF16"])
def test_random_model(tmp_path: Path, source: str) -> None:
    path = tmp_path / "model.gguf"
    models.write_random(path, SMALL, source, "making it")
    file = read_gguf(path)
    assert {tensor.source for tensor in file.tensors.values()} == {source, "F32"}
    assert file.metadata["general.file_type"] == {"Q4_0": 2, "BF16": 32}[source]
    work = Offline(EngineConfig(model=str(path), num_threads=1, max_model_len=128))
    assert work.weight_bytes >= 256 * 1024 * (2 if source == "BF16" else 0.5)
    assert (
        work.kv_bytes(100) == 100 * work.kv_bytes(1) == 100 * 2 * 2 * 2 * 64 * 2
    )  # layers, K and V, heads, size, bf16
    work.add(work.prompt(20), 5)
    tokens = list(work.steps())
    check(sum(tokens), 5)
    assert tokens == [1] * 5
    with pytest.raises(RuntimeError, match=r"5 tokens came out of 6, 0 were cached"):
        check(sum(tokens), 6)


@pytest.mark.parametrize("name", HF_FORMATS)
def test_random_folder(tmp_path: Path, name: str) -> None:
    """Packed as docs/FORMATS.md says, at most 1.10 of its files, with values of the size that was meant."""
    path = tmp_path / "model"
    path.mkdir()
    shape = Shape(hidden=1024, layers=1, heads=8, kv_heads=2, inner=1024, vocab=32)
    write_random(path, shape.config(), list(shape.modules()), HF_FORMATS[name])
    checkpoint = open_checkpoint(path)
    parts = {part: v.cols for v in build_graph(checkpoint).weights() for part in v.parts if not v.vector}
    del parts[next(part for part in parts if part.name == "model.embed_tokens.weight")]
    assert {part.format for part in parts} == {PACKED_AS[name]}
    packed = sum(formats.packed_bytes(part.format, part.rows, cols) for part, cols in parts.items())
    beside = 2 * shape.hidden * (shape.vocab + 3)  # embedding and norms
    assert packed <= 1.10 * (tensor_bytes(path) - beside)
    for part, cols in parts.items():
        info, data, factor = checkpoint.read(part.name)
        values = formats.dequantise(info.source, data, cols, factor)
        assert 0.4 < np.sqrt(np.square(values).mean()) * cols**0.5 < 2, part.name


def test_vocabulary_is_used_up(data: Path) -> None:
    work = Offline(EngineConfig(model=str(data / "arch" / "llama"), num_threads=1))
    size = work.engine.bounds.vocab_size
    assert {work.prompt(3)[0] for _ in range(size)} == set(range(size))
    with pytest.raises(ConfigError, match=rf"the vocabulary has {size} tokens"):
        work.prompt(3)


def test_a_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an attempt that breaks leaves nothing."""

    def broken(path: Path, name: str) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "write", broken)
    with pytest.raises(KeyboardInterrupt):
        made("demo-bf16", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setattr(models, "write", lambda path, name: path.write_text(name))
    path = made("demo-bf16", tmp_path / "cache")
    assert path.read_text() == "demo-bf16"
    monkeypatch.setattr(models, "write", broken)
    assert made("demo-bf16", tmp_path / "cache") == path


@pytest.mark.parametrize(
    ("name", "matrix", "embedding"), [("demo-bf16", "BF16", "BF16"), ("demo-q4_0", "Q4_0", "Q8_0")]
)
def test_demo_in_other_formats(name: str, matrix: str, embedding: str) -> None:
    demo = models.demo_file()
    tensors = {tensor.name: tensor for tensor in models._rounded(demo, *models.DEMO[name])}
    assert tensors.keys() == demo.tensors.keys()
    sources = {name: tensor.source for name, tensor in tensors.items() if len(tensor.shape) > 1}
    assert sources.pop("token_embd.weight") == embedding and set(sources.values()) == {matrix}
    tensor, old = tensors["blk.3.ffn_down.weight"], demo.tensors["blk.3.ffn_down.weight"]
    data = np.concatenate(list(tensor.rows))
    assert data.shape == (tensor.num_rows, tensor.row_bytes)
    exact = formats.dequantise(old.source, old.file.data[old.start : old.stop].reshape(576, -1), 1536)
    found = formats.dequantise(matrix, data, 1536)
    if matrix == "BF16":
        assert (found == formats.bf16_to_f32(formats.f32_to_bf16(exact))).all()
    else:
        assert np.abs(found - exact).max() <= np.abs(exact).max() / 8  # a step of the largest block


def test_in_hugging_face_layout(tmp_path: Path) -> None:
    """The same model: the graphs' weights have the same values."""
    shape = Shape(hidden=64, layers=1, heads=2, kv_heads=1, inner=64)
    models.write_random(tmp_path / "model.gguf", shape, "BF16", "making it", models.tokenizer_of(models.demo_file()))
    folder = as_folder(tmp_path / "model.gguf")
    assert as_folder(tmp_path / "model.gguf") == folder
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model-hf", "model.gguf"]
    ours, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(folder)
    assert set(ours.names()) == set(theirs.names())
    for name in ours.names():
        (info, data, _), other = ours.read(name), theirs.read(name)
        assert other.info.source == "BF16" and other.info.shape == info.shape
        cols = info.shape[-1]
        assert (formats.dequantise(info.source, data, cols) == formats.dequantise("BF16", other.data, cols)).all()
    graphs = [build_graph(checkpoint) for checkpoint in (ours, theirs)]
    assert [repr(node) for node in graphs[0].nodes] == [repr(node) for node in graphs[1].nodes]


def test_table_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands around it stays, and rows of other models; a second run takes the place of the first."""

    def small(name: str, folder: Path) -> Path:
        models.write_random(folder / "model.gguf", SMALL, models.LARGE[name], "")
        return folder / "model.gguf"

    monkeypatch.setattr(format_models, "made", small)
    page = tmp_path / "page.md"
    old = "| model |\n|---|\n| 1b-q4_k | old |\n| 1b-q5_k | kept |\n"
    page.write_text(f"before\n{format_models.BEGIN}{old}{format_models.END}after\n")
    format_models.main(page, ["1b-q4_k"])
    before, rest = page.read_text().split(format_models.BEGIN)
    found, after = rest.split(format_models.END)
    assert (before, after) == ("before\n", "after\n") and "old" not in found
    row, other = found.splitlines()[2:]
    assert other == "| 1b-q5_k | kept |" and len(set(models.NAMES)) == len(models.NAMES)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "1b-q4_k" and 1 <= float(cells[3]) <= 1.10 and float(cells[4]) > 0
    assert row in capsys.readouterr().out
