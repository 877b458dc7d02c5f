"""`--quantize`: what a float checkpoint becomes at load, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.backends.cpu import CpuBackend
from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.config import ConfigError, EngineConfig
from octavo.engine.load import load
from octavo.graph.ir import Graph
from octavo.models import build_graph
from octavo.quantize import at_load
from octavo.quantize.at_load import identity, quantised
from octavo.quantize.roles import Role, roles
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.digest import WeightsDigest
from octavo.weights.formats import dequantise
from octavo.weights.spec import Checkpoint, CheckpointError
from tests.random_model import random_model
from tests.test_cpu_backend import NUM_BLOCKS, logits_of, table
from tests.test_fixtures import LIMITS

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}


def opened(checkpoint: Checkpoint, quantize: str, activations: str = "auto") -> tuple[Checkpoint, Graph]:
    made = quantised(checkpoint, build_graph(checkpoint, activations), quantize)
    return made, build_graph(made, activations)


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    info, data, factor = checkpoint.read(name)
    return dequantise(info.source, data, info.shape[-1], factor)


@pytest.mark.parametrize(("quantize", "packed", "levels"), [("int8", "w8", 127), ("int4", "w4", 7)])
def test_formats_and_errors(quantize: str, packed: str, levels: int) -> None:
    checkpoint = random_model(stored="BF16", **SIZES)
    made, graph = opened(checkpoint, quantize)
    formats = {part.name: part.format for v in graph.weights() for part in v.parts}
    assert {formats[name] for name in formats if name.endswith("_proj.weight")} == {packed}
    assert formats["model.embed_tokens.weight"] == formats["lm_head.weight"] == "w8"
    for name, most in (("model.layers.0.mlp.down_proj.weight", levels), ("lm_head.weight", 127)):
        w, error = values(checkpoint, name), np.abs(values(made, name) - values(checkpoint, name))
        step = np.repeat(np.abs(w.reshape(len(w), -1, 32)).max(axis=2) / most, 32, axis=1)
        assert (np.square(error).mean(axis=1) <= np.square(step).mean(axis=1) / 12 * 1.3).all()


def test_rows_are_the_same_in_any_pieces() -> None:
    made, _ = opened(random_model(stored="BF16", **SIZES), "int4")
    name = "model.layers.1.mlp.up_proj.weight"
    whole, pieces = made.read(name).data, [made.read(name, i, i + 7).data for i in range(0, 96, 7)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_native_and_reference_agree() -> None:
    made, graph = opened(random_model(stored="BF16", **SIZES), "int4", "f32")
    ids = np.random.default_rng(0).integers(50, size=33).astype(np.int32)
    want = forward_logits(graph, ReferenceBackend().pack(graph, made), ids)
    backend = CpuBackend(num_threads=1)
    state = backend.make_state(graph, [NUM_BLOCKS] * len(graph.groups))
    program = backend.compile(graph, backend.pack(graph, made), state, LIMITS)
    got = logits_of(program, ids, [len(ids)], table(len(ids)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_what_experts_are_chosen_by_is_kept(data: Path) -> None:
    checkpoint = open_checkpoint(data / "arch/phimoe")
    found = roles(build_graph(checkpoint))
    gates = [name for name, role in found.items() if role is Role.KEPT]
    assert gates and all("gate.weight" in name or "router" in name for name in gates)
    assert Role.EXPERT in found.values()
    _, graph = opened(checkpoint, "int8")
    formats = {part.name: part.format for v in graph.weights() for part in v.parts}
    assert {formats[name] for name in gates}.isdisjoint({"w8", "w4"})


def test_rows_that_no_block_divides_stay() -> None:
    made, graph = opened(random_model(stored="BF16", vocab_size=50, hidden_size=48, intermediate_size=64), "int8")
    formats = {part.name: part.format for v in graph.weights() for part in v.parts}
    assert formats["model.layers.0.mlp.up_proj.weight"] == "bf16"
    assert formats["model.layers.0.mlp.down_proj.weight"] == "w8"
    assert any("no multiple of 32" in notice for notice in made.notices)


def test_quantised_weights_are_refused_by_name(data: Path) -> None:
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.weight is quantised already \(Q4_1\)"):
        LLM(str(data / "gguf/tiny-llama-q4_1.gguf"), quantize="int8")
    with pytest.raises(ConfigError, match="quantize must be one of none, int8, int4; got 'int2'"):
        EngineConfig(quantize="int2")  # type: ignore[arg-type]


def test_what_is_kept_on_disk_is_of_one_rounding(data: Path, tmp_path: Path) -> None:
    """Packed weights and KV blocks: both are named by this digest, taken or remembered."""
    checkpoint = open_checkpoint(data / "arch/llama")
    roundings = [identity(quantize) for quantize in ("none", "int8", "int4")]
    assert roundings[0] == "" and len(set(roundings)) == 3
    taken = [WeightsDigest(checkpoint, rounding, tmp_path / "digests.json").take() for rounding in roundings]
    known = [WeightsDigest(checkpoint, rounding, tmp_path / "digests.json").known() for rounding in roundings]
    assert taken == known and len(set(taken)) == 3


def test_whatever_line_changes_how_it_is_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = identity("int8")
    assert identity("int8") == usual
    for file in Path(at_load.__file__).parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(at_load, "__file__", str(tmp_path / "at_load.py"))
    assert identity("int8") == usual
    with (tmp_path / "grid.py").open("a") as file:
        file.write("# changed")
    assert identity("int8") != usual and identity("none") == ""


def test_llm_takes_the_option(data: Path) -> None:
    path = str(data / "arch/llama")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(path, quantize="int4", num_threads=1) as llm:
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0]
        size, config = llm.engine.loaded.weights.num_bytes, llm.config
    assert 1 <= len(output.token_ids) <= 8
    assert size < 0.5 * load(dataclasses.replace(config, quantize="none")).weights.num_bytes
