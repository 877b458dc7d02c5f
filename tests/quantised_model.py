"""Models whose projections are quantised, with random codes, as directories that can be opened."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.quant_writers import Raw, Rng, Written, gptq, save_raw
from tests.random_model import CONFIG, random_tensor, shapes

Write = Callable[[str, Rng, int, int], Written | None]
"""(module, rng, rows, columns) -> how it is written; None: as float32."""


def save_quantised(path: Path, quantization: dict[str, Any], write: Write, seed: int = 0, **changes: Any) -> Path:
    """A Llama. `changes` are those of random_model.CONFIG."""
    config = {**CONFIG, **changes}
    return _save(path, config, shapes(config), quantization, write, seed)


def save_latent_experts(path: Path, write: Write) -> Path:
    """A DeepSeek with experts in its second layer, quantised by GPTQ."""
    return _save(path, LATENT, _latent_shapes(LATENT), GPTQ, write, seed=0)


def _save(
    path: Path,
    config: dict[str, Any],
    tensor_shapes: dict[str, tuple[int, ...]],
    quantization: dict[str, Any],
    write: Write,
    seed: int,
) -> Path:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes.items():
        module = name.removesuffix(".weight")
        written = write(module, rng, *shape) if module.endswith(("_proj", "_with_mqa")) else None
        if written is None:
            tensors[name] = Raw("F32", random_tensor(rng, name, shape))
        else:
            tensors |= {module + end: raw for end, raw in written.tensors.items()}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "quantization_config": quantization}))
    save_raw(path / "model.safetensors", tensors)
    return path


ACT_ORDER = {"hidden_size": 64, "intermediate_size": 96}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip


def _latent_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, q, latent = (c[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, value, inner = (
        c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size")
    )
    found: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), (c["vocab_size"], hidden)
    )
    found["model.norm.weight"] = (hidden,)
    experts = [f"experts.{e}." for e in range(c["n_routed_experts"])]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        found |= {f"{p}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{p}self_attn.q_a_layernorm.weight": (q,), f"{p}self_attn.kv_a_layernorm.weight": (latent,)}
        for module, shape in {
            "q_a_proj": (q, hidden), "q_b_proj": (heads * (nope + rope), q),
            "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }.items():  # fmt: skip
            found[f"{p}self_attn.{module}.weight"] = shape
        mixed = i >= c["first_k_dense_replace"]
        if mixed:
            found |= {
                f"{p}mlp.gate.weight": (len(experts), hidden),
                f"{p}mlp.gate.e_score_correction_bias": (len(experts),),
            }
        for block in [*experts, "shared_experts."] if mixed else [""]:
            found |= {f"{p}mlp.{block}{module}_proj.weight": (inner, hidden) for module in ("gate", "up")}
            found[f"{p}mlp.{block}down_proj.weight"] = (hidden, inner)
    return found


_ORDERS = {"o_proj": 1, "gate_proj": 2, "up_proj": 3, "down_proj": 4}


def with_act_order(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Queries, keys and values are sorted alike; gate and up are not, so that they cannot be one weight."""
    return _sorted(module, rng, rows, cols, _ORDERS)


def sorted_alike(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Parts of one weight are sorted alike, as GPTQ sorts them."""
    return _sorted(module, rng, rows, cols, {**_ORDERS, "up_proj": _ORDERS["gate_proj"]})


def sorted_experts(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Gate and up of an expert are sorted alike, experts each in their own way; the first is not sorted."""
    return _sorted_expert(module, rng, rows, cols, ("gate", "up"))


def sorted_apart(module: str, rng: Rng, rows: int, cols: int) -> Written:
    """Gate and up of an expert are sorted in different ways."""
    return _sorted_expert(module, rng, rows, cols, ())


def _sorted_expert(module: str, rng: Rng, rows: int, cols: int, alike: tuple[str, ...]) -> Written:
    key = re.sub(rf"({'|'.join(alike) or '(?!)'})_proj", "both", module)
    order = None if ".experts.0." in module else np.random.default_rng(zlib.crc32(key.encode()))
    return gptq(rng, rows, cols, 4, 32, symmetric="up_proj" not in module, act_order=order)


def _sorted(module: str, rng: Rng, rows: int, cols: int, orders: dict[str, int]) -> Written:
    stem = module.rpartition(".")[2]
    order = np.random.default_rng(orders.get(stem, 0))
    return gptq(rng, rows, cols, 4, 32, symmetric=stem in ("q_proj", "gate_proj"), act_order=order)
