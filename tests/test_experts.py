"""Mixtures of experts: the reference against a token at a time, routing by every rule, weights in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends import reference_experts as meaning
from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.graph import ops
from octavo.models import build_graph
from octavo.weights.address import Addressed
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import CheckpointError
from tests.random_model import random_model

RNG = np.random.default_rng(0)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max())
    return e / e.sum()


def chosen(row: Any, a: ops.Route, bias: Any) -> list[tuple[int, float]]:
    """The experts of one token and their weights, written again from the papers."""
    row = row.astype(np.float64)
    p = {"softmax": softmax(row), "sigmoid": 1 / (1 + np.exp(-row)), "softmax_top": row}[a.scoring]
    preferred = p + bias
    size = len(row) // a.groups
    groups = [sorted(preferred[g * size : (g + 1) * size])[-a.group_best :] for g in range(a.groups)]
    best = sorted(range(a.groups), key=lambda g: (-sum(groups[g]), g))[: a.top_groups]
    allowed = [i for i in range(len(row)) if i // size in best]
    ids = sorted(allowed, key=lambda i: (-preferred[i], i))[: a.top_k]
    weights = softmax(row[ids]) if a.scoring == "softmax_top" else p[ids]
    if a.normalise:
        weights = weights / weights.sum()
    return list(zip(ids, weights * a.scale, strict=True))


ROUTES = [
    ops.Route(2),
    ops.Route(1, "softmax", normalise=True),
    ops.Route(8, "softmax", normalise=True, scale=2.5),
    ops.Route(3, "softmax_top"),
    ops.Route(2, "softmax_top", normalise=True),
    ops.Route(2, "sigmoid", normalise=True, scale=1.5),
    ops.Route(3, "sigmoid", True, 2.5, groups=4, top_groups=2, group_best=2),
    ops.Route(3, "softmax", False, 16.0, groups=4, top_groups=3, group_best=1),
]


@pytest.mark.parametrize("a", ROUTES)
@pytest.mark.parametrize("biased", [False, True])
def test_routes_are_those_of_one_token_at_a_time(a: ops.Route, biased: bool) -> None:
    scores = RNG.standard_normal((20, 8)).astype(np.float32)
    bias = RNG.standard_normal((1, 8)).astype(np.float32) if biased else None
    routing = meaning.route(scores, bias, a)
    for row, got in zip(scores, routing, strict=True):
        want = chosen(row, a, 0 if bias is None else bias[0])
        assert [int(i) for i in got[: a.top_k]] == [i for i, _ in want]
        np.testing.assert_allclose(got[a.top_k :], [w for _, w in want], rtol=1e-6)


def test_equal_scores_go_to_the_lowest_expert_and_nan_to_nobody() -> None:
    scores = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [np.nan, 0, 5, 5]], np.float32)
    assert meaning.route(scores, None, ops.Route(2))[:, :2].tolist() == [[1, 2], [0, 1], [0, 1]]
    assert meaning.route(scores[2:], None, ops.Route(2, "softmax_top"))[:, :2].tolist() == [[2, 3]]


def test_sparse_mixer_weighs_among_those_near_the_top() -> None:
    """Scores within 2 jitter of the top, relative to the greater magnitude, share its weight; once for each of two."""
    routing = meaning.route(
        np.array([[1.0, 0.99, 0.5, -3.0]], np.float32), None, ops.Route(2, "sparse_mixer", jitter=0.01)
    )
    assert routing[0, :2].tolist() == [0, 1]
    np.testing.assert_allclose(routing[0, 2:], [softmax(np.array([1.0, 0.99]))[0], 1.0], rtol=1e-6)


def test_experts_of_each_token_alone() -> None:
    """Dispatch, linear and combine give what each token's experts give it, weighted."""
    n, k, experts, inner, cols = 9, 2, 5, 3, 4
    ids = np.array([RNG.permutation([0, 1, 3, 4])[:k] for _ in range(n)])  # nobody goes to expert 2
    weights = RNG.standard_normal((n, k)).astype(np.float32)
    routing = np.concatenate([ids, weights], axis=1).astype(np.float32)
    x = RNG.standard_normal((n, inner)).astype(np.float32)
    w = RNG.standard_normal((experts, cols, inner)).astype(np.float32)
    bias = RNG.standard_normal((experts, cols)).astype(np.float32)
    dispatched = x[meaning.order(routing) // k]
    y = meaning.linear(dispatched, routing, [[m[:1], m[1:]] for m in w], bias.reshape(1, -1))
    want = [sum(weights[t, r] * (w[e] @ x[t] + bias[e]) for r, e in enumerate(ids[t])) for t in range(n)]
    np.testing.assert_allclose(meaning.combine(y, routing), want, rtol=1e-4, atol=1e-5)


MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def mixture(layout: str, experts: int = 4, **changes: Any) -> Addressed:
    """A random Mixtral whose experts lie in the checkpoint in one of three layouts, with the same values."""
    model = random_model(**MIXTRAL, **changes)
    rng = np.random.default_rng(5)
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    for i in range(model.config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for module in ("gate", "up", "down"):
            del model.tensors[f"{p}mlp.{module}_proj.weight"]
        gate, up, down = (
            (rng.standard_normal((experts, *shape)) * shape[1] ** -0.5).astype(np.float32)
            for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        model.tensors[p + "block_sparse_moe.gate.weight"] = rng.standard_normal((4, hidden)).astype(np.float32)
        if layout == "separate":
            for e in range(experts):
                for name, tensor in (("w1", gate), ("w3", up), ("w2", down)):
                    model.tensors[f"{p}block_sparse_moe.experts.{e}.{name}.weight"] = tensor[e]
        elif layout == "stacked":
            for name, tensor in (("gate", gate), ("up", up), ("down", down)):
                model.tensors[f"{p}mlp.experts.{name}_proj.weight"] = tensor
        else:
            model.tensors[p + "mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            model.tensors[p + "mlp.experts.down_proj"] = down
    return Addressed(model)


def test_every_layout_of_the_experts_is_the_same_model() -> None:
    ids = np.random.default_rng(1).integers(50, size=19).tolist()
    found = []
    for layout in ("separate", "stacked", "joined"):
        checkpoint = mixture(layout)
        graph = build_graph(checkpoint, "f32")
        found.append(forward_logits(graph, ReferenceBackend().pack(graph, checkpoint), ids))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_is_dispatched_is_rounded_once_and_scores_are_not() -> None:
    graph = build_graph(mixture("separate", stored="BF16"))
    by_op: dict[str, list[Any]] = {}
    for node in graph.nodes:
        by_op.setdefault(node.op, []).append(node)
    assert {node.ins[0].dtype.value for node in by_op["dispatch"] + by_op["expert_linear"]} == {"bf16"}
    scores = [node for node in by_op["linear"] if node.outs[0] in [r.ins[0] for r in by_op["route"]]]
    assert len(scores) == 2 and all(node.ins[0].dtype.value == "f32" for node in scores)
    assert [str(node.outs[0].rows) for node in by_op["dispatch"]] == ["2T", "2T"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax', only 'sigmoid'"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm = False, only True"),
    ("minimax_m2", {"num_local_experts": 5}, "gate.weight has shape"),
    ("minimax_m2", {"num_local_experts": 65536}, "there is no .*experts.65535.*, the config says 65536 experts"),
    ("deepseek_v3_narrow", {"n_routed_experts": 65536}, "config says 65536 experts"),
    ("minimax_m2", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7, and there are 6 experts"),
    ("minimax_m2", {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0, which is not supported"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3, only 2 is supported"),
    ("phimoe", {"expert_gating_func": 2}, "expert_gating_func 2 is not supported, the family has sparse_mixer"),
    ("deepseek_v3_narrow", {"topk_group": 5}, "3 of 8 experts in 5 of 4 groups cannot be"),
    ("deepseek_v3_narrow", {"n_group": 3}, "of 3 groups cannot be"),
    ("deepseek_v3_narrow", {"kv_lora_rank": 24}, "kv_lora_rank = 24, which is not supported: a multiple of 32 is"),
    ("deepseek_v3_narrow", {"v_head_dim": 64}, "has shape"),
    ("deepseek_v3_narrow", {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob = true"),
    ("deepseek_v3_narrow", {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("ernie4_5_moe", {"moe_k": 7}, "moe_k = 7 of 6 experts: there are not so many"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1, which is not supported"),
    ("ernie4_5_moe", {"moe_layer_end_index": -1}, "there is no .*experts.5.down_proj.weight, the config says 6 experts"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "1 mlp_layer_types, expected one for each of 2 layers"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "a dense layer behind one with experts"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refusals_name_the_cause(data: Path, family: str, changes: dict[str, Any], message: str) -> None:
    checkpoint = open_checkpoint(data / "arch" / family)
    checkpoint.config.update(changes)
    with pytest.raises(CheckpointError, match=message):
        build_graph(checkpoint)


def test_more_experts_than_the_config_says_are_refused() -> None:
    for layout, name in (("stacked", "gate_proj.weight"), ("joined", "gate_up_proj")):
        with pytest.raises(CheckpointError, match=rf"{name} has 5 experts, the config says 4"):
            build_graph(mixture(layout, experts=5))


def test_latent_attention_has_no_int8_cache(data: Path) -> None:
    with pytest.raises(CheckpointError, match="int8 is not supported"):
        build_graph(open_checkpoint(data / "arch/deepseek_v3_narrow"), kv_dtype="int8")


def test_layers_that_only_draft_are_left_out(data: Path) -> None:
    checkpoint = open_checkpoint(data / "arch/deepseek_v3_narrow")
    layers = checkpoint.config["num_hidden_layers"]
    checkpoint.config.update(num_hidden_layers=layers - 1, num_nextn_predict_layers=1)
    assert max(node.layer for node in build_graph(checkpoint).nodes) == layers - 2
    checkpoint.config.update(num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=f"no place to tensor 'model.layers.{layers - 1}"):
        build_graph(checkpoint)


def test_the_cache_of_latent_attention_has_one_head(data: Path) -> None:
    (group,) = build_graph(open_checkpoint(data / "arch/deepseek_v3_narrow")).groups
    assert (group.kv_heads, group.head_dim, group.v_dim) == (1, 48, 32)
