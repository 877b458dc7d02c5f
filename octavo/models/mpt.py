"""MPT (MosaicML 2023): ALiBi, layer norms without biases, perhaps a limit to what attention reads."""

from __future__ import annotations

from typing import Any

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Value
from octavo.models import parts
from octavo.models.config import count, positive, refuse_unknown
from octavo.weights.spec import Checkpoint, CheckpointError


def build(b: Builder, config: dict[str, Any], checkpoint: Checkpoint, kv_dtype: DType) -> None:
    refuse_unknown(config, checkpoint.path, ("clip_qkv",))
    path = checkpoint.path
    attention = read_attention(config, path)
    hidden = count(config, "hidden_size", path)
    ratio = count(config, "expansion_ratio", path, default=4)
    usual = {"hidden_act": "gelu", "intermediate_size": ratio * hidden, "layer_norm_eps": 1e-5, **config}
    c = parts.read({"tie_word_embeddings": True, **usual}, path, "layer_norm_eps")
    c = c._replace(slopes=parts.alibi_slopes(c.heads, positive(attention, "alibi_bias_max", path, 8.0)))
    c = c._replace(scale=positive(attention, "softmax_scale", path, c.scale), qkv_bias=False, mlp_bias=False)
    limit = None if attention.get("clip_qkv") is None else positive(attention, "clip_qkv", path)
    checkpoint.info(f"transformer.blocks.{c.layers - 1}.norm_1.weight")  # before billions of layers are built
    (group,) = parts.kv_groups(b, c, kv_dtype)
    embedding = b.matrix({"transformer.wte.weight": c.vocab}, c.hidden)
    x = b.embed(embedding)
    for b.layer in range(c.layers):
        x = layer(b, c, f"transformer.blocks.{b.layer}.", group, limit, x)
    b.layer = -1
    x = b.final_layer_norm(b.gather_rows(x), "transformer.norm_f.weight", None, c.eps)
    head = embedding if c.tied else b.matrix({"lm_head.weight": c.vocab}, c.hidden)
    b.sample(b.logits(x, head))


def layer(b: Builder, c: parts.Shape, p: str, group: int, limit: float | None, x: Value) -> Value:
    # one layer: x[T, hidden] -> x[T, hidden]
    h = b.layer_norm(x, p + "norm_1.weight", None, c.eps)
    qkv = b.linear(h, {p + "attn.Wqkv": 3 * c.hidden}, name="qkv")
    qkv = qkv if limit is None else b.clamp(qkv, -limit, limit)
    y = parts.attend(b, c, p, group, qkv, rotated=False)
    x = b.add(x, b.linear(y, {p + "attn.out_proj": c.hidden}, name="o"))
    h = b.layer_norm(x, p + "norm_2.weight", None, c.eps)
    return b.add(x, parts.plain_mlp(b, c, p + "ffn.up_proj", p + "ffn.down_proj", h))


_SERVED = {"alibi": (True,), "attn_type": ("multihead_attention",), "qk_ln": (False,), "prefix_lm": (False,),
           "attn_uses_sequence_id": (False,)}  # fmt: skip


def read_attention(config: dict[str, Any], path: str) -> dict[str, Any]:
    """The object `attn_config`, in which this family keeps what concerns attention."""
    found = config.get("attn_config") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: config has attn_config = {found!r:.100}, expected an object")
    for key, served in (*_SERVED.items(), ("logit_scale", ())):
        value = config.get(key) if key == "logit_scale" else found.get(key)
        if value is not None and value not in served:
            raise CheckpointError(f"{path}: config has {key} = {value!r:.100}, which is not supported")
    return {**{key: config.get(key) for key in ("clip_qkv", "alibi_bias_max")}, **found}
