"""Llamas of random weights in memory, for shapes that no fixture has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from octavo.weights.formats import f32_to_bf16
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import CheckpointError, SourceTensor, TensorInfo

F32 = NDArray[np.float32]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 48, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False,
}  # fmt: skip

WINDOWS: dict[str, Any] = {
    "architectures": ["MinistralForCausalLM"], "sliding_window": 40, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
"""Changes that give two KV groups: layers 0 and 2 within a window, layer 1 without."""


class InMemory:
    """A Checkpoint of tensors that hold float32, or bf16 values where `stored` is BF16 (vectors stay float32)."""

    path = "memory"
    generation: dict[str, Any] = {}
    notices: list[str] = []

    def __init__(self, config: dict[str, Any], tensors: dict[str, F32], stored: str = "F32") -> None:
        self.config, self.tensors, self.stored = config, tensors, stored

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"memory: tensor {name!r} is missing")
        shape = self.tensors[name].shape
        return TensorInfo(shape, self.stored if len(shape) == 2 else "F32", "memory")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        info = self.info(name)
        tensor = self.tensors[name].reshape(-1, info.shape[-1])[start:stop]
        return SourceTensor(info, (f32_to_bf16(tensor) if info.source == "BF16" else tensor).view(np.uint8))

    def release(self, name: str) -> None:
        assert name in self.tensors

    def files(self) -> list[FileIdentity]:
        return []


def random_model(seed: int = 0, stored: str = "F32", **changes: Any) -> InMemory:
    """Random tensors of the shapes that the config asks for, biases where it has them."""
    c = {**CONFIG, **changes}
    rng = np.random.default_rng(seed)
    return InMemory(c, {name: random_tensor(rng, name, shape) for name, shape in shapes(c).items()}, stored)


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> F32:
    mean, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.5 if len(shape) == 1 else shape[-1] ** -0.5)
    return np.asarray(mean + spread * rng.standard_normal(shape), np.float32)


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of this config."""
    hidden, inner, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    out_bias = "attention_out_bias" if "attention_out_bias" in c else "attention_bias"
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        found |= {p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
        for module, (rows, cols), bias in (
            ("self_attn.q_proj", (q, hidden), "attention_bias"), ("self_attn.k_proj", (kv, hidden), "attention_bias"),
            ("self_attn.v_proj", (kv, hidden), "attention_bias"), ("self_attn.o_proj", (hidden, q), out_bias),
            ("mlp.gate_proj", (inner, hidden), "mlp_bias"), ("mlp.up_proj", (inner, hidden), "mlp_bias"),
            ("mlp.down_proj", (hidden, inner), "mlp_bias"),
        ):  # fmt: skip
            found[f"{p}{module}.weight"] = (rows, cols)
            if c.get(bias):
                found[f"{p}{module}.bias"] = (rows,)
    return found


def joined(model: InMemory, **changes: Any) -> InMemory:
    """The same model as a Phi-3, which holds queries, keys and values in one matrix, gate and up in another."""
    tensors = dict(model.tensors)
    for i in range(model.config["num_hidden_layers"]):
        for module, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            start, _, new = f"model.layers.{i}.{module}".rpartition(".")
            rows = [tensors.pop(f"{start}.{part}_proj.weight") for part in parts]
            tensors[f"{start}.{new}_proj.weight"] = np.concatenate(rows)
    return InMemory({**model.config, "architectures": ["Phi3ForCausalLM"], **changes}, tensors, model.stored)


def save(model: InMemory, path: Path) -> Path:
    """The model as a directory that can be opened, float32 and without a tokenizer. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**model.config, "eos_token_id": 2}))
    save_file(model.tensors, path / "model.safetensors")
    return path
