"""What `octavo quantize` writes: read back it is the same model, with the values that its rounding gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.backends.reference import ReferenceBackend, forward, forward_logits
from octavo.bench.gguf_out import Tensor as GgufTensor
from octavo.bench.gguf_out import write_gguf
from octavo.bench.models import Shape
from octavo.cli.app import make_app
from octavo.config import ConfigError
from octavo.graph import ops
from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.quantize import blocks
from octavo.quantize.at_load import quantised
from octavo.quantize.calibrate import Calibration
from octavo.quantize.convert import Method, convert, matrix
from octavo.quantize.directory import Tensor, TensorShards
from octavo.quantize.gguf_output import GgufOutput
from octavo.quantize.request import FORMATS, Request, RequestError, open_output, written_beside
from octavo.quantize.roles import Role, roles
from octavo.quantize.same import same_model
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf_file import read_gguf
from octavo.weights.spec import Checkpoint, CheckpointError, base_name
from tests.test_cli import run

Opened = tuple[Checkpoint, Graph]

GGUF_OF = {"arch/llama": "llama", "arch/qwen2": "qwen2", "arch/phi3": "phi3", "arch/smollm3": "smollm3"}
"""Small fixtures with a tokenizer, and the GGUF architecture that they are written as."""


def opened(path: Path) -> Opened:
    checkpoint = open_checkpoint(path)
    return checkpoint, build_graph(checkpoint, "f32")


def written(source: Path, out: Path, request: Request, texts: list[list[int]] | None = None, **method: Any) -> Opened:
    """Opened again, with float32 activations."""
    checkpoint, graph = opened(source)
    with (
        written_beside(out, is_folder=not request.check().is_gguf) as scratch,
        open_output(checkpoint, graph, scratch, request) as output,
    ):
        convert(checkpoint, graph, output, Method(texts or (), num_threads=1, **method), lambda *_: None)
        output.finish()
    return opened(out)


def texts_of(vocab: int, count: int = 4, length: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(vocab, size=length).tolist() for _ in range(count)]


def quantised_names(graph: Graph) -> list[str]:
    return [base_name(part) for part, role in roles(graph).items() if role in (Role.LINEAR, Role.EXPERT)]


@pytest.mark.parametrize("name", [*GGUF_OF, "arch/stablelm_parallel", "arch/minimax_m2"])
@pytest.mark.parametrize("format", ["w4a16", "w8a16", "w8a8", "fp8"])
def test_directories(data: Path, tmp_path: Path, name: str, format: str) -> None:
    """Every matrix of the layers is near what it was; all else has its bytes."""
    source, graph = opened(data / name)
    got, _ = written(data / name, tmp_path / "out", Request(format, 32 if format == "w4a16" else None))
    names, tolerance = quantised_names(graph), {"w4a16": 0.12, "fp8": 0.04}.get(format, 0.012)
    assert sorted(got.names()) == sorted(source.names())
    for tensor in source.names():
        w, v = matrix(source, tensor), matrix(got, tensor)
        error = np.linalg.norm(v - w) / max(float(np.linalg.norm(w)), 1e-9)
        assert 0 < error < tolerance if tensor in names else error == 0, tensor
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert set(config["ignore"]).isdisjoint(n.removesuffix(".weight") for n in names) and "lm_head" in config["ignore"]
    for file in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        if (data / name / file).exists():
            assert (tmp_path / "out" / file).read_bytes() == (data / name / file).read_bytes()


def test_directories_are_those_of_the_field(fixtures: Path, tmp_path: Path) -> None:
    """Names, types and shapes of tensors are those that llm-compressor writes of such a model."""
    for theirs, request in (
        ("w4a16_g128_sym", Request("w4a16")), ("w4a16_g64_asym", Request("w4a16", 64, asymmetric=True)),
        ("w8a16_channel", Request("w8a16")), ("w8a8_int8_dynamic", Request("w8a8")), ("fp8_dynamic", Request("fp8")),
    ):  # fmt: skip
        folder = fixtures / "quant/compressed-tensors" / theirs
        source = restored(folder, tmp_path / f"{theirs}-source")
        written(source, tmp_path / theirs, request)
        assert header(tmp_path / theirs / "model.safetensors") == header(folder / "model.safetensors"), theirs
        ours, want = (
            json.loads((path / "config.json").read_text())["quantization_config"]
            for path in (tmp_path / theirs, folder)
        )
        assert ours["format"] == want["format"] and ours["ignore"] == want["ignore"]
        for key in ("num_bits", "type", "strategy", "symmetric", "group_size", "dynamic"):
            groups = [config["config_groups"]["group_0"] for config in (ours, want)]
            assert groups[0]["weights"][key] == groups[1]["weights"][key]
            inputs = [group["input_activations"] for group in groups]
            assert (inputs[0] is None) == (inputs[1] is None)
            assert inputs[0] is None or inputs[0][key] == inputs[1][key]


def restored(folder: Path, out: Path) -> Path:
    """A quantised directory with its weights as bf16."""
    from octavo.quantize.directory import copy_beside, write_tensors
    from octavo.weights.formats import f32_to_bf16

    checkpoint = open_checkpoint(folder)
    out.mkdir()
    copy_beside(folder, out)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    tensors = {
        n: Tensor("BF16", checkpoint.info(n).shape, f32_to_bf16(matrix(checkpoint, n))) for n in checkpoint.names()
    }
    write_tensors(out / "model.safetensors", tensors)
    return out


def header(path: Path) -> dict[str, tuple[str, list[int]]]:
    with path.open("rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}


@pytest.mark.parametrize("name", GGUF_OF)
def test_gguf_files(data: Path, tmp_path: Path, name: str) -> None:
    """Values, metadata and tokenizer."""
    out = tmp_path / "out.gguf"
    source, graph = opened(data / name)
    got, _ = written(data / name, out, Request("q8_0", embeddings="q4_1"))
    for tensor in {base_name(part.name) for value in graph.weights() for part in value.parts}:
        w, v = matrix(source, tensor), matrix(got, tensor)
        kind, error = got.info(tensor).source, np.linalg.norm(v - w) / np.linalg.norm(w)
        assert kind == ("Q8_0" if tensor in quantised_names(graph) else "Q4_1" if v.shape[0] > 1 else "F32")
        assert error < {"Q8_0": 0.01, "Q4_1": 0.1, "F32": 1e-9}[kind]
    metadata = read_gguf(out).metadata
    assert metadata["general.architecture"] == GGUF_OF[name] and metadata["general.file_type"] == 7
    ours, theirs = load_tokenizer(out), load_tokenizer(data / name)
    text = "Hello <|im_start|>user, 123 naïve\n\tit's"
    assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == theirs.decode(
        theirs.encode(text)
    )
    assert (ours.bos_id, ours.adds_bos, ours.eos_ids) == (theirs.bos_id, theirs.adds_bos, theirs.eos_ids)
    assert ours.chat_templates == theirs.chat_templates


def test_gguf_files_of_gguf_files(data: Path, tmp_path: Path) -> None:
    """Matrices are those that quantising at load makes; all else is what the file says."""
    source, graph = opened(data / "gguf/tiny-llama-f16_bf16.gguf")
    at_load = quantised(source, graph, "int4")
    got, _ = written(Path(source.path), tmp_path / "out.gguf", Request("q4_0", embeddings="q8_0"))
    assert {got.info(name).source for name in got.names()} == {"Q4_0", "Q8_0", "F32"}
    for name in source.names():
        np.testing.assert_array_equal(got.read(name).data, at_load.read(name).data, err_msg=name)
    (before, after) = (read_gguf(path).metadata for path in (Path(source.path), tmp_path / "out.gguf"))
    tokens = [dict(metadata).pop("tokenizer.ggml.tokens").decode() for metadata in (before, after)]
    assert tokens[0] == tokens[1] and after["general.file_type"] == 2
    own = {"general.file_type", "general.quantization_version", "general.alignment"}
    plain = {key: value for key, value in before.items() if key not in own and not hasattr(value, "decode")}
    assert {key: after[key] for key in plain} == plain


@pytest.mark.parametrize("calibrated", [False, True])
def test_gguf_files_of_experts(tmp_path: Path, calibrated: bool) -> None:
    """Experts lie in one tensor. They are rounded to nearest, whatever is calibrated."""
    shape = Shape(hidden=64, layers=2, heads=4, kv_heads=2, inner=32, vocab=96, positions=128)
    tensors = {f"{name}.weight": (rows, cols) for name, rows, cols in shape.matrices() if "ffn" not in name}
    tensors |= {f"{name}.weight": (shape.hidden,) for name in shape.norms()}
    for i in range(shape.layers):
        tensors |= {f"blk.{i}.ffn_{m}_exps.weight": (4, shape.inner, shape.hidden) for m in ("gate", "up")}
        tensors[f"blk.{i}.ffn_down_exps.weight"] = (4, shape.hidden, shape.inner)
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = (4, shape.hidden)
    rng, stored = np.random.default_rng(0), []
    for name, size in tensors.items():
        values = (1 if len(size) == 1 else 0) + rng.standard_normal(size).astype(np.float32) * size[-1] ** -0.5
        stored.append(GgufTensor(name, size, "F32", iter([values.view(np.uint8).reshape(-1, 4 * size[-1])])))
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    write_gguf(tmp_path / "in.gguf", shape.metadata() | experts, stored, "")
    source, graph = opened(tmp_path / "in.gguf")
    at_load = quantised(source, graph, "int4")
    got, _ = written(
        tmp_path / "in.gguf", tmp_path / "out.gguf", Request("q4_0"), texts_of(96, 2) if calibrated else None
    )
    for part, role in roles(graph).items():
        same = np.array_equal(got.read(part).data, at_load.read(part).data)
        if role in (Role.LINEAR, Role.EXPERT):
            assert got.info(part).source == "Q4_0" and same == (role is Role.EXPERT or not calibrated), part
        else:
            assert got.info(part).source == "F32"


def test_gguf_files_quantised_again(data: Path, tmp_path: Path) -> None:
    """What has the type already, and what is kept, has its bytes."""
    source, graph = opened(data / "gguf/tiny-llama-q4_1.gguf")
    got, _ = written(Path(source.path), tmp_path / "q5_1.gguf", Request("q5_1", keep=("*.down_proj",)))
    again, _ = written(tmp_path / "q5_1.gguf", tmp_path / "q4_1.gguf", Request("q4_1"))
    for name in source.names():
        kept = "down_proj" in name or name not in quantised_names(graph)
        assert got.info(name).source == (source.info(name).source if kept else "Q5_1")
        if kept:
            np.testing.assert_array_equal(again.read(name).data, source.read(name).data)
        else:
            w, v = matrix(source, name), matrix(got, name)
            assert 0 < np.linalg.norm(v - w) < 0.05 * np.linalg.norm(w)


@pytest.mark.parametrize("name", sorted(blocks.FORMATS))
def test_every_gguf_type(data: Path, tmp_path: Path, name: str) -> None:
    """Where rows are too short for its blocks, another one stands in for it."""
    got, graph = written(data / "arch/llama", tmp_path / "out.gguf", Request(name.lower(), fallback="q5_1"))
    kinds = {got.info(tensor).source for tensor in quantised_names(graph)}
    assert kinds == {"Q5_1" if blocks.FORMATS[name].cols == 256 else name}


def test_families_as_gguf(fixtures: Path, tmp_path: Path) -> None:
    """As float32 files: the same logits. What llama.cpp's files cannot say is refused."""
    found, refused = set(), {}
    for folder in sorted((fixtures / "arch").iterdir()):
        checkpoint, graph = opened(folder)
        path = tmp_path / f"{folder.name}.gguf"
        try:
            with GgufOutput(checkpoint, graph, path, {}, "F32") as output:
                for name in output.names:
                    output.copy(name)
                output.finish()
        except CheckpointError as error:
            refused[folder.name] = str(error)
            continue
        got, again = opened(path)
        ids = np.load(folder / "expected.npz")["ids_0"]
        want = forward_logits(graph, ReferenceBackend().pack(graph, checkpoint), ids)
        np.testing.assert_allclose(forward_logits(again, ReferenceBackend().pack(again, got), ids), want, atol=1e-4)
        found.add(checkpoint.config["architectures"][0])
    assert "windows of [32] tokens" in refused.pop("mistral_swa")
    for name in ("gemma2", "gemma3_text"):  # of a size whose scale of scores llama.cpp would take to be another
        assert "cannot say what this model is" in refused.pop(name)
    assert all("is not written as GGUF" in line for line in refused.values())
    assert len(found) == 20, found


# ---- calibration


@pytest.mark.parametrize("name", ["arch/llama", "arch/stablelm_parallel"])
def test_calibration_sees_what_linears_see(data: Path, name: str) -> None:
    """Inputs and outputs of layers, computed one by one, are those of the whole model."""
    checkpoint, graph = opened(data / name)
    texts = texts_of(96, 2, 30)
    calibration, weights = (
        Calibration(graph, checkpoint, texts, num_threads=1),
        ReferenceBackend().pack(graph, checkpoint),
    )
    for layer in sorted({node.layer for node in graph.nodes} - {-1}):
        found = calibration.inputs(layer)
        for node in graph.nodes:
            if node.layer == layer and isinstance(node.attrs, ops.Linear):
                want = sum(np.square(input_of(graph, weights, text, node)).sum(axis=0) for text in texts)
                for part in node.ins[1].parts:
                    np.testing.assert_allclose(np.diag(found[base_name(part.name)]), want, rtol=1e-4, atol=1e-5)
        calibration.advance(layer, {})


def input_of(graph: Graph, weights: Any, text: list[int], node: Any) -> np.ndarray:
    kept = node.ins[0].root.kind, node.ins[0].root.name
    try:
        node.ins[0].root.kind, node.ins[0].root.name = type(kept[0]).OUTPUT, "wanted"
        x = forward(graph, weights, text, "wanted")
    finally:
        node.ins[0].root.kind, node.ins[0].root.name = kept
    return x[:, node.ins[0].start : node.ins[0].start + node.ins[0].cols]


@pytest.mark.parametrize("request_", [Request("w4a16", 32), Request("q4_0")], ids=["w4a16", "q4_0"])
def test_gptq_is_nearer_to_the_model(data: Path, tmp_path: Path, request_: Request) -> None:
    """On the text that it was calibrated with."""
    source, graph = opened(data / "arch/llama")
    texts = texts_of(96, 12)
    want = [forward_logits(graph, ReferenceBackend().pack(graph, source), text) for text in texts[:4]]
    errors = []
    for i, given in enumerate((None, texts)):
        got, again = written(data / "arch/llama", tmp_path / f"{i}{'.gguf' * request_.is_gguf}", request_, given)
        weights = ReferenceBackend().pack(again, got)
        logits = [forward_logits(again, weights, text) for text in texts[:4]]
        errors.append(float(np.mean([np.square(a - b).mean() for a, b in zip(logits, want, strict=True)])))
    assert errors[1] < 0.8 * errors[0]


# ---- what is refused


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request("w4a16"), r"q_proj\.weight has rows of 64 weights, no multiple of 128: choose another group size"),
        (Request("q4_k"), r"q_proj\.weight has rows of 64 weights, no multiple of the 256 of a Q4_K block"),
        (Request("q8_0", keep=("*",)), "nothing is left to quantise"),
    ],
    ids=["group", "block", "nothing"],
)
def test_what_a_format_cannot_hold_is_named(data: Path, tmp_path: Path, request_: Request, says: str) -> None:
    out = tmp_path / ("out.gguf" if request_.is_gguf else "out")
    with pytest.raises(CheckpointError, match=says):
        written(data / "arch/llama", out, request_)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request("w3a16"), "format must be one of w4a16, w8a16, w8a8, fp8, q8_0"),
        (Request("w4a16", 48), "group_size is 32, 64 or 128, for w4a16 and w8a16; got 48"),
        (Request("q4_0", 32), "got 32 for q4_0"),
        (Request("w8a8", asymmetric=True), "asymmetric is for w4a16"),
        (Request("w4a16", fallback="q8_0"), "fallback is a GGUF type, for GGUF formats"),
        (Request("q4_0", embeddings="q9"), "embeddings is a GGUF type, for GGUF formats; got 'q9'"),
    ],
    ids=lambda value: value.format if isinstance(value, Request) else "",
)
def test_bad_options_are_named(request_: Request, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        request_.check()


def test_experts_in_one_tensor_are_refused(fixtures: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"experts\.gate_up_proj of shape .* is not the weight of a linear module"
    ):
        written(fixtures / "arch/gpt_oss", tmp_path / "out", Request("w4a16", 32))


def test_what_is_kept_stays(data: Path, tmp_path: Path) -> None:
    source, _ = opened(data / "arch/llama")
    got, _ = written(data / "arch/llama", tmp_path / "out", Request("w8a16", keep=("*.down_proj", "model.layers.0.*")))
    changed = {n for n in source.names() if not np.array_equal(matrix(source, n), matrix(got, n))}
    assert changed and all(n.startswith("model.layers.1.") and "down_proj" not in n for n in changed)


def test_shards_have_an_index(tmp_path: Path) -> None:
    shards = TensorShards(tmp_path, shard_bytes=100)
    values = {f"t{i}": np.arange(20, dtype=np.float32) + i for i in range(5)}
    for name, array in values.items():
        shards.put(name, Tensor("F32", (4, 5), array))
    shards.close()
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    for name, array in values.items():
        np.testing.assert_array_equal(matrix(checkpoint, name), array.reshape(4, 5))
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3


def test_another_model_is_noticed(data: Path) -> None:
    checkpoint, first = opened(data / "arch/llama")
    checkpoint.config["rope_theta"] = 500000.0
    assert same_model(first, first) == "" and "rope" in same_model(first, build_graph(checkpoint, "f32"))


# ---- the command


def test_command(data: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text((data / "gpl-3.txt").read_text()[:9000])
    out = tmp_path / "small.gguf"
    arguments = ["quantize", data / "arch/llama", out, "--format", "q4_0", "--method", "gptq", "--calibration", text,
                 "--num-threads", "1"]  # fmt: skip
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    for words in ("in 14 matrices", "4.50", "perplexity", f"a part of {text}"):
        assert words in done.stdout.replace("\n", " ") or words.split()[0] in done.stdout
    assert quantised_names(opened(out)[1]) and opened(out)[0].info("model.layers.0.mlp.up_proj.weight").source == "Q4_0"
    result = CliRunner().invoke(make_app(), list(map(str, arguments)))
    assert str(result.exception) == f"{out} is there already; nothing is overwritten"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["MODEL"], "name the model and OUT"),
        (["MODEL", "OUT", "--format", "q4_0"], "q4_0 is written to a .gguf file"),
        (["MODEL", "OUT", "--method", "awq"], "method must be rtn or gptq"),
        (["GGUF", "OUT"], "w4a16 is made of a directory in Hugging Face layout"),
        (
            ["MODEL", "OUT", "--format", "w8a8", "--method", "gptq", "--calibration", "SHORT"],
            "tokens, at least 1024",
        ),
    ],
    ids=["no OUT", "no suffix", "method", "GGUF", "short text"],
)
def test_errors_of_the_command(data: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "short").write_text("Too short.")
    names = {"MODEL": data / "arch/llama", "GGUF": data / "gguf/tiny-llama-q4_1.gguf", "OUT": tmp_path / "out",
             "SHORT": tmp_path / "short"}  # fmt: skip
    result = CliRunner().invoke(make_app(), ["quantize", *(str(names.get(word, word)) for word in arguments)])
    assert isinstance(result.exception, ConfigError) and says in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short"]


def test_all_formats_are_told() -> None:
    assert set(FORMATS) == {"w4a16", "w8a16", "w8a8", "fp8", *(name.lower() for name in blocks.FORMATS)}
