"""StableLM (Bellagente et al. 2024): Llama with layer norms, a part of each head rotated, blocks perhaps side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, served=("partial_rotary_factor", "qk_layernorm", "use_parallel_residual"))
    c = parts.read({"partial_rotary_factor": 0.25, **config}, checkpoint.path, "layer_norm_eps")
    c = c._replace(qkv_bias=flag(config, "use_qkv_bias", checkpoint.path), o_bias=False, mlp_bias=False)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    heads = head_norms(checkpoint, c) if flag(config, "qk_layernorm", checkpoint.path) else None
    parallel = flag(config, "use_parallel_residual", checkpoint.path)
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", group, heads, parallel, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "model.norm.weight", "model.norm.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


HeadNorms = Callable[[Value, str], str | list[str]]
"""Names of the weights of all heads of queries or keys: one tensor (GGUF) or one a head (Hugging Face)."""


def head_norms(checkpoint: Checkpoint, c: parts.Shape) -> HeadNorms:
    def names(x: Value, module: str) -> str | list[str]:
        heads = range(x.cols // c.head_dim)
        whole = f"{module}.weight"
        return whole if whole in checkpoint else [f"{module}.norms.{i}.weight" for i in heads]

    return names


def layer(b: Builder, c: parts.Shape, p: str, group: int, heads: HeadNorms | None, parallel: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    def norm(x: Value, name: str) -> Value:
        assert heads
        return b.layer_norm(x, heads(x, name.replace("_norm", "_layernorm")), None, c.eps, c.head_dim)

    h = b.layer_norm(x, p + "input_layernorm.weight", p + "input_layernorm.bias", c.eps)
    y = parts.attention(b, c, p + "self_attn.", group, h, norm=norm if heads else None)
    if parallel:
        return b.add(b.add(x, y), parts.mlp(b, c, p + "mlp.", h))
    x = b.add(x, y)
    h = b.layer_norm(x, p + "post_attention_layernorm.weight", p + "post_attention_layernorm.bias", c.eps)
    return b.add(x, parts.mlp(b, c, p + "mlp.", h))
