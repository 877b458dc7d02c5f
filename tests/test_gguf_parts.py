"""GGUF models in several files: any part opens all of them, and a part that does not fit is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType

from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.models import build_graph
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.locate import locate
from octavo.weights.spec import CheckpointError

PARTS = ["model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf"]


@pytest.fixture(scope="module")
def parts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 21 tensors, eight to a part, as the gguf library splits it."""
    folder = tmp_path_factory.mktemp("parts")
    reader = gguf.GGUFReader(data / "gguf/tiny-llama-q4_1.gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=8)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    return folder


def test_any_part_is_the_whole_model(data: Path, parts: Path) -> None:
    whole = open_checkpoint(data / "gguf/tiny-llama-q4_1.gguf")
    ids = np.arange(20, dtype=np.int32)
    logits = []
    for path in (data / "gguf/tiny-llama-q4_1.gguf", parts / PARTS[0], parts / PARTS[2]):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == whole.config
        graph = build_graph(checkpoint)
        logits.append(forward_logits(graph, ReferenceBackend().pack(graph, checkpoint), ids))
        np.testing.assert_array_equal(logits[-1], logits[0])
    checkpoint = open_checkpoint(parts / PARTS[1])
    assert [Path(file.path).name for file in checkpoint.files()] == PARTS
    assert {Path(checkpoint.info(name).file).name for name in checkpoint.names()} == set(PARTS)
    assert load_tokenizer(parts / PARTS[1]).encode("ab") == load_tokenizer(parts / PARTS[0]).encode("ab")
    assert locate(str(parts)) == parts / PARTS[0]


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda f: (f / PARTS[1]).unlink(), PARTS[0], rf"one of 3 parts, of which {PARTS[1]} is not beside it"),
    "another name": (lambda f: (f / PARTS[0]).rename(f / "a.gguf"), "a.gguf", "one of 3 parts, but it is not called NAME-"),
    "twice": (lambda f: shutil.copy(f / PARTS[1], f / PARTS[2]), PARTS[0], r"0003\.gguf: .* not say that it is part 3 of 3"),
    "cut": (lambda f: (f / PARTS[1]).write_bytes((f / PARTS[1]).read_bytes()[:3000]), PARTS[0], r"00002-.*truncated"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_does_not_fit_is_named(parts: Path, tmp_path: Path, fault: str) -> None:
    change, name, message = FAULTS[fault]
    shutil.copytree(parts, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "model" / name)


def test_a_count_of_parts_that_is_no_number(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("split.count", [1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"split.count must be a number; found \[1\]"):
        open_checkpoint(tmp_path / "model.gguf")
