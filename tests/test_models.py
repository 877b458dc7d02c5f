"""Model files: every fixture against its expected values, an independent forward pass, and configs that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.reference import ReferenceBackend, forward_logits
from octavo.graph.ir import DType
from octavo.models import ARCHITECTURES, build_graph, parts
from octavo.weights import gguf_names, text_model
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.spec import Checkpoint, CheckpointError
from tests.random_model import WINDOWS, InMemory, joined, random_model
from tests.small_fixtures import EXPERTS, FAMILIES, GGUF, ROPES

F32 = NDArray[np.float32]
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "attention_bias": True, "attention_out_bias": False,
}  # fmt: skip


def naive_logits(model: InMemory, ids: list[int], inv_freq: list[float]) -> NDArray[np.float64]:
    """Llama written again from its papers, in float64, a token and a head at a time."""
    c, w = model.config, {name: tensor.astype(np.float64) for name, tensor in model.tensors.items()}
    d, group = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
    neighbours = c["architectures"] == ["Ernie4_5ForCausalLM"]
    half = len(inv_freq)
    partners = [(2 * i, 2 * i + 1) if neighbours else (i, i + half) for i in range(half)]
    every = c.get("no_rope_layer_interval", c["num_hidden_layers"] + 1)

    def norm(x: Any, name: str) -> Any:
        return x / math.sqrt(float(np.mean(x * x)) + c["rms_norm_eps"]) * w[name]

    def apply(name: str, x: Any) -> Any:
        return w[name + ".weight"] @ x + w.get(name + ".bias", 0.0)

    def rotate(head: Any, position: int) -> Any:
        pairs = [complex(head[i], head[j]) for i, j in partners]
        turned = [
            z * complex(math.cos(position * f), math.sin(position * f)) for z, f in zip(pairs, inv_freq, strict=True)
        ]
        result = np.array(head)
        for (i, j), z in zip(partners, turned, strict=True):
            result[i], result[j] = z.real, z.imag
        return result

    caches: list[list[tuple[Any, Any]]] = [[] for _ in range(c["num_hidden_layers"])]
    logits = []
    for position, token in enumerate(ids):
        x = w["model.embed_tokens.weight"][token]
        for i, cache in enumerate(caches):
            p = f"model.layers.{i}."
            h = norm(x, p + "input_layernorm.weight")
            q, k, v = (apply(f"{p}self_attn.{name}_proj", h).reshape(-1, d) for name in "qkv")
            at = position if (i + 1) % every else 0
            cache.append((np.array([rotate(head, at) for head in k]), v))
            heads = []
            for j, head in enumerate(q):
                kinds = c.get("layer_types") or ["sliding_attention"] * len(caches)
                windowed = kinds[i] == "sliding_attention" and i >= c.get("max_window_layers", 0)
                window = c.get("sliding_window") if windowed else None
                seen = cache[-window:] if window else cache
                scores = np.array([rotate(head, at) @ keys[j // group] for keys, _ in seen]) / math.sqrt(d)
                p_j = np.exp(scores - scores.max())
                heads.append(sum(a * values[j // group] for a, (_, values) in zip(p_j / p_j.sum(), seen, strict=True)))
            x = x + apply(p + "self_attn.o_proj", np.concatenate(heads))
            h = norm(x, p + "post_attention_layernorm.weight")
            gate = apply(p + "mlp.gate_proj", h)
            x = x + apply(p + "mlp.down_proj", gate / (1 + np.exp(-gate)) * apply(p + "mlp.up_proj", h))
        head_name = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        logits.append(w[head_name] @ norm(x, "model.norm.weight"))
    return np.array(logits)


def logits_of(checkpoint: Checkpoint, ids: Any, activations: str = "f32") -> F32:
    graph = build_graph(checkpoint, activations)
    return forward_logits(graph, ReferenceBackend().pack(graph, checkpoint), ids)


def check_expected(checkpoint: Checkpoint, expected: Any) -> None:
    """The README's float32 row: 2e-3 and cosine 0.99999; greedy equal up to a margin under 0.01."""
    graph = build_graph(checkpoint, "f32")
    weights = ReferenceBackend().pack(graph, checkpoint)
    for i in range(3):
        ids, want = expected[f"ids_{i}"], expected[f"logits_{i}"]
        whole = forward_logits(graph, weights, np.concatenate([ids, expected[f"gen_{i}"]]))
        got = whole[expected[f"pos_{i}"]]
        assert np.abs(got - want).max() <= 2e-3
        cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
        assert cosine.min() >= 0.99999
        greedy = whole[len(ids) - 1 : -1].argmax(axis=1)
        differs = np.flatnonzero(greedy != expected[f"gen_{i}"])
        assert differs.size == 0 or expected[f"gen_margin_{i}"][differs[0]] < 0.01


@pytest.mark.parametrize("name", ROPES + FAMILIES + EXPERTS)
def test_safetensors_fixtures(data: Path, name: str) -> None:
    check_expected(open_checkpoint(data / name), np.load(data / name / "expected.npz"))


@pytest.mark.parametrize("name", GGUF)
def test_gguf_fixtures(data: Path, name: str) -> None:
    check_expected(open_checkpoint(data / name), np.load((data / name).with_suffix(".expected.npz")))


@pytest.mark.parametrize("name", ["arch/llama", "gguf/tiny-llama-q8_0.gguf", "gguf/tiny-llama-q4_1.gguf"])
@pytest.mark.parametrize("activations", ["auto", "bf16"])
def test_own_rounding_stays_near(data: Path, name: str, activations: str) -> None:
    """The README's rows for bf16 and int8 activations."""
    folder = data / name
    expected = np.load(folder / "expected.npz" if folder.is_dir() else folder.with_suffix(".expected.npz"))
    got = logits_of(open_checkpoint(folder), expected["ids_1"], activations)[expected["pos_1"]]
    want = expected["logits_1"]
    assert 1e-4 < np.abs(got - want).max() <= 0.66 * 3
    cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert cosine.min() >= 0.998


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"mlp_bias": True, "tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "hidden_size": 33,
            "intermediate_size": 31,
        },
        {**WINDOWS, "sliding_window": 5},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 1},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 18},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False},
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": False, "attention_out_bias": True},
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layer_interval": 3,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True, "attention_bias": True, "mlp_bias": True},
    ],
)
def test_against_an_independent_forward_pass(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    d, theta = model.config["head_dim"], model.config["rope_theta"]
    ids = np.random.default_rng(1).integers(50, size=19).tolist()
    want = naive_logits(model, ids, [theta ** (-2 * i / d) for i in range(d // 2)])
    assert np.abs(logits_of(model, ids) - want).max() < 2e-5


def test_joined_matrices_and_heads_rotated_in_part() -> None:
    model = random_model()
    ids = np.random.default_rng(1).integers(50, size=19).tolist()
    want = naive_logits(model, ids, [10000.0 ** (-i / 6) for i in range(6)])
    assert np.abs(logits_of(joined(model, partial_rotary_factor=0.75), ids) - want).max() < 2e-5


def changed(**changes: Any) -> InMemory:
    """The model of the plain config with a config that is another."""
    model = random_model()
    model.config = {**model.config, **changes}
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["PelicanForCausalLM"]},
            r"PelicanForCausalLM is not supported; supported: .*LlamaForCausalLM",
        ),
        ({"architectures": None}, r"\(none given\) is not supported"),
        ({"hidden_act": "mish"}, r"hidden_act = 'mish', expected an activation: silu, swish, gelu"),
        ({"sliding_window": 4096}, "sliding_window = 4096.*must be absent"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rope type 'ntk' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "config has no low_freq_factor, expected a number"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1.0}, "rope_theta = 1, expected more than 1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope short_factor must be a list of numbers"),
        ({"rope_scaling": {"rope_type": "yarn", "short_factor": [1.0]}}, "short_factor and the rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section, which is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention, which is not supported"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "a rope_scaling and another rope_parameters",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5, which is not supported"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.3}, "not an even part of 16 dimensions"),
        ({"architectures": ["Phi3ForCausalLM"]}, "tensor 'model.layers.0.self_attn.qkv_proj.weight' is missing"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 9},
            "no max_window_layers, expected a whole number between 0",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True, "sliding_window": 9},
            "sliding_window = 9.*must be absent",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "1 no_rope_layers, expected one for each of 2",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers = .*must be absent"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "1 factors for 8 frequencies"),
        ({"rope_scaling": {"rope_type": "factors", "factors": 5}}, "rope factors must be a list of numbers"),
        ({"rope_theta": 1e-38, "rope_scaling": {"rope_type": "linear", "factor": 1e-30}}, "expected a number between"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1.2e-38}, "rope_theta": 1e-2}, "a frequency of"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "tensor 'model.layers.0.self_attn.q_norm.weight' is missing"),
        ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0, which is not supported \(it must be absent\)"),
        ({"use_parallel_residual": True}, "use_parallel_residual = True"),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0},
            "residual_multiplier = 0, expected a number",
        ),
        ({"num_hidden_layers": 4096}, r"tensor 'model\.layers\.4095\.input_layernorm\.weight' is missing"),
        ({"head_dim": 24}, "head_dim 24 is not supported: a multiple of 16"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"intermediate_size": "40"}, "intermediate_size = '40', expected a whole number"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None, expected a number"),
        ({"hidden_size": 64}, r"model.embed_tokens.weight has shape \(50, 48\), the config asks for \(50, 64\)"),
        ({"vocab_size": 51}, r"\(50, 48\), the config asks for \(51, 48\)"),
        ({"num_hidden_layers": 3}, r"model.layers.2.*is missing"),
        ({"num_hidden_layers": 1}, r"no place to tensor 'model.layers.1.input_layernorm.weight' and 8 more"),
        ({"mlp_bias": True}, r"gate_proj.bias' is missing"),
    ],
)
def test_refusals_name_the_cause(changes: dict[str, Any], message: str) -> None:
    model = random_model()
    model.config = {**model.config, **changes}
    with pytest.raises(CheckpointError, match=message) as caught:
        build_graph(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "rms_norm_eps", "num_hidden_layers", "hidden_act"])
def test_missing_keys_are_named(key: str) -> None:
    model = random_model()
    del model.config[key]
    with pytest.raises(CheckpointError, match=key):
        build_graph(model)


def test_layers_of_one_window_form_a_group() -> None:
    groups = build_graph(random_model(**WINDOWS)).groups
    assert [(g.name, g.layers, g.window) for g in groups] == [("window40", (0, 2), 40), ("full", (1,), None)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0, expected a whole number"),
        ({"sliding_window": "x"}, "sliding_window = 'x', expected a whole number"),
        ({"sliding_window": None}, "layers of type sliding_attention and no sliding_window"),
        ({"layer_types": ["full_attention"] * 2}, "2 layer_types, expected one for each of 3 layers"),
        ({"layer_types": 3}, "layer_types = 3, expected one for each"),
        (
            {"layer_types": ["full_attention", "chunked_attention", 1]},
            "layer_types = 'chunked_attention' of layer 1, which is not supported",
        ),
    ],
)
def test_windows_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    model = random_model(**WINDOWS)
    model.config = {**model.config, **changes}
    with pytest.raises(CheckpointError, match=message):
        build_graph(model)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ({}, [9, 9, 9, None, 9]),
        ({"sliding_window_pattern": 2}, [9, None, 9, None, 9]),
        ({"sliding_window_pattern": 0}, [9] * 5),
        ({"sliding_window_pattern": "LLG"}, [9, 9, None, 9, 9]),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, [None] * 4 + [9]),
    ],
)
def test_patterns_of_windows(pattern: dict[str, Any], expected: list[int | None]) -> None:
    assert parts.windows({"sliding_window": 9, **pattern}, 5, "p", period=4) == expected
    with pytest.raises(CheckpointError, match="sliding_window_pattern = 'LX', expected a number or L and G"):
        parts.windows({"sliding_window": 9, "sliding_window_pattern": "LX"}, 5, "p", period=4)


def test_kv_type_follows_the_activations() -> None:
    model = random_model()
    assert build_graph(model, "f32", "int8").groups[0].dtype is DType.I8
    assert [build_graph(model, a).groups[0].dtype for a in ("auto", "bf16", "f32")] == [
        DType.BF16, DType.BF16, DType.F32,
    ]  # fmt: skip


def test_tied_head_is_the_embedding() -> None:
    graph = build_graph(random_model(tie_word_embeddings=True))
    assert sum("embed_tokens" in w.name for w in graph.weights()) == 1
    assert not any("lm_head" in w.name for w in graph.weights())


def test_every_architecture_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "MODELS.md").read_text()
    assert [name for name in (*ARCHITECTURES, *text_model.ARCHITECTURES) if f"`{name}`" not in page] == []
    files = {build.__module__.rpartition(".")[2] for build in ARCHITECTURES.values()}
    assert [name for name in files if f"`{name}.py`" not in page] == []
    served = [key.split(" ")[0] for key, family in gguf_names.FAMILIES.items() if family.architecture in ARCHITECTURES]
    assert [name for name in served if f"`{name}`" not in page] == []


def test_a_bias_that_the_config_denies_is_refused() -> None:
    model = random_model(attention_bias=True)
    model.config["attention_bias"] = False
    with pytest.raises(CheckpointError, match=r"no place to tensor 'model.layers.0.self_attn.q_proj.bias' and 7 more"):
        build_graph(model)


def test_what_a_checkpoint_may_hold_beside_the_model() -> None:
    model = random_model(tie_word_embeddings=True)
    for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.weight"):
        model.tensors[name] = np.ones((1, 3), np.float32)
    build_graph(model)


ODD = [None, 0, -1, 1.5, math.inf, math.nan, 1e-320, 1e-38, 2**31, 10**400, True, "x", [1], {"a": 1}, "absent"]
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "truncate": True,
             "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8},
}  # fmt: skip
SWITCHES: dict[str, dict[str, Any]] = {
    "Ernie4_5ForCausalLM": {"use_bias": False},
    "Phi3ForCausalLM": {"partial_rotary_factor": 1.0, "sliding_window": 9},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "SeedOssForCausalLM": {"attention_out_bias": False},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "use_sliding_window": False, "no_rope_layer_interval": 4},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", ODD)
def test_a_config_of_any_types_gives_a_graph_or_one_line(value: Any, scaling: str) -> None:
    rope = {"rope_type": scaling, **SCALINGS[scaling]}
    model = random_model()
    whole = {**model.config, "rope_scaling": rope, "attention_bias": False, "mlp_bias": False}
    build_graph(changed(**whole))
    refused, lines = set(), []
    for place in (whole, rope):
        for key in place:
            other = {k: v for k, v in place.items() if k != key} | ({} if value == "absent" else {key: value})
            model.config = other if place is whole else {**whole, "rope_scaling": other}
            try:
                build_graph(model)
            except CheckpointError as error:
                refused.add(key)
                lines.append(str(error))
    assert {"vocab_size", "num_hidden_layers", "max_position_embeddings"} <= refused
    assert "original_max_position_embeddings" in refused or (scaling != "llama3" and value in (None, "absent"))
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_any_types_give_a_graph_or_one_line(name: str) -> None:
    base = random_model(attention_bias=name == "Qwen2ForCausalLM", attention_out_bias=False)
    base.config["attention_bias"] = False
    model = joined(base) if name == "Phi3ForCausalLM" else base
    model.config |= {"architectures": [name], **SWITCHES[name]}
    build_graph(model)
    lines = []
    for key, served in SWITCHES[name].items():
        for value in ODD:
            model.config[key] = value
            try:
                build_graph(model)
            except CheckpointError as error:
                lines.append(str(error))
        model.config[key] = served
    assert lines and not any("\n" in line for line in lines)
