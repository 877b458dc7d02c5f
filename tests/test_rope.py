"""Rotary frequencies of every scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.models import build_graph, rope
from octavo.weights.spec import CheckpointError
from tests.random_model import CONFIG, random_model, save
from tests.test_models import changed


@pytest.mark.parametrize(
    "layout",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_both_layouts_of_rope(layout: dict[str, Any]) -> None:
    got = rope.read({**CONFIG, **layout}, 16, "p").inv_freq
    assert got == pytest.approx([5e5 ** (-i / 8) / 4 for i in range(8)], rel=1e-15)


def test_rope_kinds() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    plain = rope.read(CONFIG, 16, "p").inv_freq
    got = rope.read({**CONFIG, "rope_scaling": llama3}, 16, "p").inv_freq
    turns = [64 * f / (2 * math.pi) for f in plain]
    assert turns[0] > 4 and turns[-1] < 1 and any(1 < t < 4 for t in turns)
    for f, g, t in zip(plain, got, turns, strict=True):
        if t > 4 or t < 1:
            assert g == pytest.approx(f if t > 4 else f / 8, rel=1e-15)
        else:
            assert f / 8 < g < f
    factors = [1.0 + i for i in range(8)]
    got = rope.read({**CONFIG, "rope_scaling": {"rope_type": "factors", "factors": factors}}, 16, "p").inv_freq
    assert got == pytest.approx([f / d for f, d in zip(plain, factors, strict=True)])


def turns(scaling: dict[str, Any], theta: float = 10000.0, **config: Any) -> tuple[list[float], float]:
    """Frequencies as multiples of the plain ones, and the factor of cos and sin; a head of 16."""
    found = rope.read({**CONFIG, "rope_theta": theta, "rope_scaling": scaling, **config}, 16, "p")
    return [f * theta ** (i / 8) for i, f in enumerate(found.inv_freq)], found.scale


def test_yarn() -> None:
    """Pairs that turn 32 times or more in 4096 positions are kept, those that turn once are slowed (Peng et al. 2023).

    With a head of 16 and theta 10000 these are at 8 ln(4096 / (2 pi n)) / ln 10000 = 2.62 (n = 32) and 5.63 (n = 1).
    """
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    kept = [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]  # from 2 to 6
    wanted = [k + (1 - k) / 4 for k in kept]
    found, scale = turns(yarn)
    assert found == pytest.approx(wanted) and scale == pytest.approx(0.1 * math.log(4) + 1)
    found, _ = turns({**yarn, "truncate": False})
    low, high = (8 * math.log(4096 / (2 * math.pi * n)) / math.log(10000) for n in (32, 1))
    assert found[3] == pytest.approx(1 - (3 - low) / (high - low) * 0.75)
    assert turns({**yarn, "attention_factor": 1.5})[1] == 1.5
    assert turns({**yarn, "mscale": 2.0, "mscale_all_dim": 2.0})[1] == 1
    from_length = {k: v for k, v in yarn.items() if k != "factor"}
    assert turns(from_length, max_position_embeddings=16384)[0] == pytest.approx(wanted)
    assert turns({**yarn, "beta_fast": 1e6, "beta_slow": 1e5}) == turns({**yarn, "beta_fast": 1e5, "beta_slow": 1e4})


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_has_its_short_factors(name: str) -> None:
    short = [1.0 + i / 4 for i in range(8)]
    scaling = {"type": name, "short_factor": short, "long_factor": [50.0] * 8}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    found, scale = turns(scaling, **lengths)
    assert found == pytest.approx([1 / f for f in short])
    assert scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    graph = build_graph(changed(rope_scaling=scaling, **lengths))
    assert (graph.max_positions, graph.bounded) == (4096, True)

    longer = {**lengths, rope.LENGTH: 4097}
    found, longer_scale = turns(scaling, **longer)
    assert found == pytest.approx([1 / 50] * 8) and longer_scale == scale
    for length, positions in ((4096, (4096, True)), (4097, (131072, False)), (131072, (131072, False))):
        graph = build_graph(changed(rope_scaling=scaling, **lengths), max_model_len=length)
        assert (graph.max_positions, graph.bounded) == positions


def test_dynamic() -> None:
    """Another base as soon as longer sequences are served (transformers 5.24: base 10000 * 13 ** (16 / 14))."""
    scaling = {"type": "dynamic", "factor": 4.0}
    plain, dynamic = random_model(), changed(rope_scaling=scaling)
    graphs = build_graph(plain), build_graph(dynamic), build_graph(dynamic, max_model_len=256)
    assert [(g.max_positions, g.bounded) for g in graphs] == [(64, False), (64, True), (256, True)]
    ropes = [[n.attrs for n in g.nodes if n.op == "rope"] for g in graphs]
    assert ropes[0] == ropes[1] != ropes[2]
    found = rope.read({**CONFIG, "rope_scaling": scaling, rope.LENGTH: 256}, 16, "p").inv_freq
    assert found == pytest.approx([(10000.0 * 13 ** (16 / 14)) ** (-i / 8) for i in range(8)])


def test_alpha() -> None:
    """As transformers' HunYuan: base 10000 * 1000 ** (16 / 14), whatever the length."""
    config = {**CONFIG, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    for length in (None, 256):
        found = rope.read({**config, rope.LENGTH: length}, 16, "p").inv_freq
        assert found == pytest.approx([(10000.0 * 1000 ** (16 / 14)) ** (-i / 8) for i in range(8)])
    assert rope.positions({**config, rope.LENGTH: 256}, "p") == (64, False)


def test_longer_sequences_where_they_are_asked_for(tmp_path: Path) -> None:
    """Not without being told so: cached keys of shorter sequences would be others."""
    path = save(changed(rope_scaling={"type": "dynamic", "factor": 4.0}), tmp_path / "model")
    engine = Engine(EngineConfig(model=str(path), num_threads=1))
    assert engine.loaded.bounds.max_model_len == 64
    assert "--max-model-len" in "".join(engine.loaded.notices)
    longer = Engine(EngineConfig(model=str(path), max_model_len=100, num_threads=1))
    assert longer.loaded.bounds.max_model_len == 100


def test_rotations_of_layer_types() -> None:
    """Of the newer layout (nested) and the older one: layers within a window have no scaling there."""
    linear = {"rope_type": "linear", "factor": 4.0}
    nested = {
        "full_attention": {**linear, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for layout in (
        {"rope_parameters": {**nested, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear},
    ):
        config = {**CONFIG, "rope_theta": None, **layout}
        assert rope.read(config, 16, "p", rope.FULL).inv_freq == pytest.approx([1e6 ** (-i / 8) / 4 for i in range(8)])
        assert rope.read(config, 16, "p", rope.SLIDING).inv_freq == pytest.approx([1e4 ** (-i / 8) for i in range(8)])
    config = {**CONFIG, "rope_scaling": linear}
    assert rope.read(config, 16, "p", rope.SLIDING) == rope.read(CONFIG, 16, "p")


def test_partial_rotation() -> None:
    config = {**CONFIG, "partial_rotary_factor": 0.75}
    assert rope.read(config, 32, "p").inv_freq == pytest.approx([10000.0 ** (-i / 12) for i in range(12)])


def test_factors_of_long_and_short_sequences() -> None:
    """Phi-3.5-MoE names the factor of cos and sin for both."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.25,
               "long_mscale": 1.5, "original_max_position_embeddings": 32}  # fmt: skip
    assert turns(scaling)[1] == 1.25
    assert turns(scaling, **{rope.LENGTH: 64})[1] == 1.5
    with pytest.raises(CheckpointError, match="short_mscale and the rope type 'yarn'"):
        turns({"rope_type": "yarn", "factor": 2.0, "short_mscale": 1.25})


def test_queries_that_grow_with_their_position() -> None:
    """Below the original context they do not (Ministral 3): that is what is served."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
    graph = build_graph(changed(rope_scaling=yarn))
    assert (graph.max_positions, graph.bounded) == (16, True)
    assert not build_graph(changed(rope_scaling=yarn | {"llama_4_scaling_beta": None})).bounded
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta = 'x', expected a number"):
        build_graph(changed(rope_scaling=yarn | {"llama_4_scaling_beta": "x"}))


def test_a_head_that_is_not_there_is_the_embedding() -> None:
    """Configs are saved without tie_word_embeddings where it is transformers' general default."""
    model = random_model(tie_word_embeddings=True)
    del model.config["tie_word_embeddings"]
    assert not any("lm_head" in w.name for w in build_graph(model).weights())
    model.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        build_graph(model)
