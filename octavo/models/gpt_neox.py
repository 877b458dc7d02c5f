"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): layer norms, part of each head rotated, blocks mostly side by side."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import flag, refuse_unknown
from octavo.weights.spec import Checkpoint


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("partial_rotary_factor", "use_parallel_residual"))
    c = read(config, checkpoint.path)
    parallel = flag({"use_parallel_residual": True, **config}, "use_parallel_residual", checkpoint.path)
    per_head = config.get("qkv_order") != "joined"
    checkpoint.info(f"gpt_neox.layers.{c.layers - 1}.input_layernorm.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"gpt_neox.embed_in.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"gpt_neox.layers.{b.layer}.", group, per_head, parallel, x)
    b.layer = -1
    norm = "gpt_neox.final_layer_norm"
    x = b.final_layer_norm(b.gather_rows(x), norm + ".weight", norm + ".bias", c.eps)
    head = embedding if c.tied else b.matrix({"embed_out.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, per_head: bool, parallel: bool, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = parts.layer_norm(b, c, x, p + "input_layernorm")
    qkv = parts.joined_qkv(b, c, p + "attention.query_key_value", h, per_head)
    y = b.linear(parts.attend(b, c, p, group, qkv), {p + "attention.dense": c.hidden}, c.o_bias, "o")
    attended = b.add(x, y)
    h = parts.layer_norm(b, c, x if parallel else attended, p + "post_attention_layernorm")
    return b.add(attended, parts.plain_mlp(b, c, p + "mlp.dense_h_to_4h", p + "mlp.dense_4h_to_h", h))


def read(config: dict[str, Any], path: str) -> parts.Shape:
    usual = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_bias": True, **config}
    for key, older, default in (
        ("rope_theta", "rotary_emb_base", 10000.0),
        ("partial_rotary_factor", "rotary_pct", 0.25),
    ):
        if usual.get(key) is None:
            usual[key] = default if config.get(older) is None else config[older]
    return parts.read(usual, path, "layer_norm_eps")._replace(mlp_bias=True)
