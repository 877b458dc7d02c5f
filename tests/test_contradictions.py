"""Configs that contradict themselves or say what nothing can be: refused by name, with the value and what is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.models import ARCHITECTURES, build_graph
from octavo.models.model_types import check_model_type
from octavo.weights.address import Addressed
from octavo.weights.spec import CheckpointError
from octavo.weights.text_model import text_model
from tests.random_model import random_model
from tests.test_published import PUBLISHED, Hollow
from tests.test_published_gguf import FILES, graph_of_file

LLAMA, QWEN3, SMOLLM3 = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B with YaRN", "HuggingFaceTB/SmolLM3-3B"
MISTRAL, MINIMAX, V3 = "mistralai/Mistral-7B-v0.1", "MiniMaxAI/MiniMax-M2", "deepseek-ai/DeepSeek-V3"
OSS, GRANITE = "openai/gpt-oss-20b", "ibm-granite/granite-3.1-1b-a400m-instruct"
FULL, SLIDING = "full_attention", "sliding_attention"


def build(name: str, **changes: Any) -> None:
    entry = PUBLISHED[name]
    build_graph(Addressed(text_model(Hollow(name, {**entry["config"], **changes}, entry["tensors"]))))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (LLAMA, {"layer_types": [FULL] * 7 + ["linear_attention"]}, f"'linear_attention' of layer 7, .*{FULL}, {SLIDING}"),
        (QWEN3, {"layer_types": ["foo"] + [FULL] * 7}, f"layer_types = 'foo' of layer 0, .*served: {FULL}, {SLIDING}"),
        (MISTRAL, {"layer_types": [SLIDING, None] + [SLIDING] * 6}, "layer_types = None of layer 1"),
        (LLAMA, {"layer_types": [FULL] * 9}, "9 layer_types, expected one for each of 8 layers"),
        (SMOLLM3, {"layer_types": []}, "0 layer_types, expected one for each of 8 layers"),
        (LLAMA, {"layer_types": FULL}, "layer_types = 'full_attention', expected one for each of 8 layers"),
        (LLAMA, {"layer_types": [FULL] * 7 + [SLIDING]}, f"{SLIDING}' of layer 7, which by all else .* '{FULL}'"),
        (QWEN3, {"layer_types": [SLIDING] * 8}, f"layer_types = '{SLIDING}' of layer 0, which by all else"),
        (LLAMA, {"layers_block_type": ["attention"] * 7 + ["mamba"]}, "'mamba' of layer 7, .*served: attention"),
        (MINIMAX, {"attn_type_list": [1, 0, 1, 1, 1, 1]}, r"attn_type_list = 0 of layer 1, .*served: 1\)"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2, expected one for each of 6"),
        (V3, {"moe_layer_freq": [0, 0, 0, 1, 1, 2]}, r"moe_layer_freq = 2 of layer 5, .*served: 0, 1\)"),
        (V3, {"moe_layer_freq": [0, 0, 1, 1, 1, 1]}, "moe_layer_freq = 1 of layer 2, which by all else .* 0"),
        (V3, {"moe_layer_freq": [0, 0, 0, 1, 1]}, "5 moe_layer_freq, expected one for each of 6"),
        (V3, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, "'sparse' of layer 2, which by all else .* 'dense'"),
        (V3, {"first_k_dense_replace": [0, 1]}, "first_k_dense_replace = .*expected a whole number"),
        ("zai-org/GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 5 + ["moe"]}, "'moe' of layer 5, .*dense, sparse"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [6]}, "mlp_only_layers with 6: layers are 0 to 5"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [-1]}, "mlp_only_layers with -1: layers are 0 to 5"),
    ],
)  # fmt: skip
def test_lists_with_an_entry_for_each_layer(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (LLAMA, {"layer_types": [FULL] * 8}),
        (MISTRAL, {"layer_types": [SLIDING] * 8}),
        (V3, {"moe_layer_freq": [0, 0, 0, 1, 1, 1], "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3}),
        ("zai-org/GLM-4.7-Flash", {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] + ["sparse"] * 5}),
    ],
)
def test_lists_that_say_what_is_so(name: str, changes: dict[str, Any]) -> None:
    build(name, **changes)


@pytest.mark.parametrize("pattern", [[True] * 3, [True] * 7 + [2], "LLLG"])
def test_windows_of_a_gguf_file(pattern: Any) -> None:
    entry = FILES["google/gemma-3-1b-it"]
    metadata = {**entry["metadata"], "gemma3.attention.sliding_window_pattern": pattern}
    with pytest.raises(
        CheckpointError, match=r"sliding_window_pattern is .*, expected a number, or .* each of 8 layers"
    ):
        graph_of_file("file", {**entry, "metadata": metadata})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (V3, {"v_head_dim": 10**9}, "v_head_dim = 1000000000, expected a whole number between 1 and 4096"),
        (V3, {"v_head_dim": 100}, "v_head_dim = 100, which is not supported: a multiple of 32 is"),
        (V3, {"v_head_dim": 64}, r"kv_b_proj\.weight has shape \(32768, 512\), the config asks for \(24576, 512\)"),
        (V3, {"qk_nope_head_dim": 64}, r"q_b_proj\.weight has shape \(24576, 1536\), the config asks for \(16384, 1536\)"),
        (V3, {"kv_lora_rank": 10**9}, "kv_lora_rank = 1000000000, expected a whole number between 1 and 65536"),
        (V3, {"n_routed_experts": 10**9}, "n_routed_experts = 1000000000, expected a whole number between 1 and 65536"),
        (LLAMA, {"num_attention_heads": 10**9}, "num_attention_heads = 1000000000, .* between 1 and 4096"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, .* between 1 and 4096"),
        (LLAMA, {"vocab_size": 2**25}, "vocab_size = 33554432, .* between 1 and 16777216"),
        ("tiiuae/falcon-7b", {"hidden_size": 64}, r"head_dim 0 \(num_attention_heads = 71 of hidden_size = 64\) is not"),
        (LLAMA, {"head_dim": None, "hidden_size": 10**6}, r"head_dim 31250 \(num_attention_heads = 32 of hidden_size"),
        ("openai-community/gpt2", {"n_embd": "x"}, "config has n_embd = 'x', expected a whole number"),
        ("openai-community/gpt2", {"n_head": None}, "config has n_head = None, expected a whole number"),
        (OSS, {"num_experts_per_tok": 33}, "num_experts_per_tok = 33, and there are 32 experts"),
        (OSS, {"intermediate_size": 64}, r"gate_up_proj has shape \(32, 2880, 5760\), the config asks for \(32, 2880, 128\)"),
        (GRANITE, {"num_experts_per_tok": 10**9}, "num_experts_per_tok = 1000000000, and there are 32 experts"),
        (GRANITE, {"intermediate_size": 7}, r"input_linear\.weight has shape \(32, 1024, 1024\), the config asks for \(32, 14"),
        (V3, {"first_k_dense_replace": 10**9}, "first_k_dense_replace = 1000000000, .* between 0 and 4096"),
        ("google/gemma-3-1b-it", {"rope_local_base_freq": 0}, "config has rope_local_base_freq = 0, expected a number"),
        ("BAAI/bge-m3", {"num_attention_heads": 7}, "num_attention_heads = 7 of hidden_size = 1024"),
        (V3, {"n_group": 7}, "num_experts_per_tok = 8, topk_group = 4 and n_group = 7: .* cannot be"),
        ("tiiuae/falcon-40b", {"num_kv_heads": None}, r"query_key_value\.weight has shape \(9216, 8192\), the config asks"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        build(name, **changes)
    assert not re.search(r"%|\[\d*:|Latent", str(caught.value))  # slices of tensors, values of Python


def test_more_heads_than_dimensions_in_a_gguf_file() -> None:
    entry = FILES[LLAMA]
    own = ("key_length", "value_length")
    metadata = {key: value for key, value in entry["metadata"].items() if not key.endswith(own)}
    metadata |= {"llama.attention.head_count": 10**9}
    with pytest.raises(CheckpointError, match="head_count 1000000000 is more than embedding_length 2048"):
        graph_of_file("file", {**entry, "metadata": metadata})


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (LLAMA, "mistral", "model_type = 'mistral' and architectures = LlamaForCausalLM, which are two families"),
        (MISTRAL, "llama", "model_type = 'llama' and architectures = MistralForCausalLM"),
        (V3, "deepseek_v2", "'deepseek_v2' and architectures = DeepseekV3ForCausalLM"),
        ("BAAI/bge-m3", "bert", "'bert' and architectures = XLMRobertaModel"),
        ("google/gemma-3-1b-it", "gemma2", "'gemma2' and architectures = Gemma3ForCausalLM"),
        (LLAMA, 3, "model_type = 3, expected a name"),
    ],
)
def test_two_families(name: str, kind: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(name, model_type=kind)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("kimi_k2", "DeepseekV3ForCausalLM"), ("Yi", "LlamaForCausalLM"), (None, "LlamaForCausalLM"),
     ("RefinedWebModel", "FalconForCausalLM"), ("roberta", "CamembertModel"), ("ministral3", "MistralForCausalLM"),
     ("gemma3_text", "Gemma3ForCausalLM"), ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"), ("mpt", "MPTForCausalLM")],
)  # fmt: skip
def test_one_family_under_two_names(kind: str | None, architecture: str) -> None:
    check_model_type({"model_type": kind}, architecture, ARCHITECTURES, "file")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": None, "factor": 2}, "factor = 2 and no rope_type; supported: default, linear"),
        ({"factor": 2.0}, r"factor = 2\.0 and no rope_type"),
        ({"type": None, "alpha": 1000.0}, "alpha = 1000.0 and no rope_type"),
        ({"short_factor": [1.0]}, r"short_factor = \[1\.0\] and no rope_type"),
        ({"rope_type": "", "factor": 2.0}, "rope type '' is not supported; supported: default"),
        ({"rope_type": 0, "factor": 2.0}, "rope type '0' is not supported"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "two types, linear and dynamic"),
    ],
)
def test_scalings_without_a_type(key: str, rope: dict[str, Any], message: str) -> None:
    model = random_model()
    model.config = {**model.config, key: rope}
    with pytest.raises(CheckpointError, match=message):
        build_graph(model)
