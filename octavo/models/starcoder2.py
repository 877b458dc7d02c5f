"""StarCoder2 (Lozhkov et al. 2024): Mistral with layer norms, biases, and a feed-forward without a gate."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("sliding_window",))
    usual = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5, "tie_word_embeddings": True, **config}
    bias = flag({"use_bias": True, **config}, "use_bias", checkpoint.path)
    c = parts.read(usual, checkpoint.path, "layer_norm_eps")._replace(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    checkpoint.info(f"model.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    groups = parts.kv_groups(b, c, kv_dtype, parts.windows(config, c.layers, checkpoint.path))
    embedding = b.matrix({"model.embed_tokens.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"model.layers.{b.layer}.", groups[b.layer], x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "model.norm.weight", "model.norm.bias", c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "input_layernorm")
    x = b.add(x, parts.attention(b, c, p + "self_attn.", group, h))
    h = parts.layer_norm(b, c, x, p + "post_attention_layernorm")
    return b.add(x, parts.plain_mlp(b, c, p + "mlp.c_fc", p + "mlp.c_proj", h))
