"""One architecture per file: functions from a config to the op graph."""

from __future__ import annotations

import hashlib

from octavo.graph.build import Builder
from octavo.graph.ir import DType, Graph
from octavo.graph.rounding import round_inputs
from octavo.graph.verify import GraphError, verify
from octavo.models import (
    arcee,
    bert,
    bloom,
    cohere,
    cohere2,
    deepseek,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    helium,
    hunyuan_dense,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    modernbert,
    mpt,
    nanochat,
    nemotron,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    rope,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from octavo.models.config import count, usual_keys
from octavo.models.layer_lists import check_built, check_entries
from octavo.models.model_types import check_model_type
from octavo.weights.spec import ORDER, Checkpoint, CheckpointError, act_of, base_name, packed_format, why_unserved

ARCHITECTURES = {
    **{
        f"{name}{end}": bert.build
        for name in ("Bert", "Roberta", "XLMRoberta", "Camembert")
        for end in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
    **{f"ModernBert{end}": modernbert.build for end in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    "ArceeForCausalLM": arcee.build,
    "BloomForCausalLM": bloom.build,
    "Cohere2ForCausalLM": cohere2.build,
    "CohereForCausalLM": cohere.build,
    "DeepseekV2ForCausalLM": deepseek.build_v2,
    "DeepseekV3ForCausalLM": deepseek.build_v3,
    "Ernie4_5ForCausalLM": ernie4_5.build,
    "Ernie4_5_ForCausalLM": ernie4_5.build,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.build,
    "ExaoneForCausalLM": exaone.build,
    "Exaone4ForCausalLM": exaone4.build,
    "FalconForCausalLM": falcon.build,
    "GPT2LMHeadModel": gpt2.build,
    "GPTBigCodeForCausalLM": gpt_bigcode.build,
    "GPTJForCausalLM": gptj.build,
    "GPTNeoXForCausalLM": gpt_neox.build,
    "Gemma2ForCausalLM": gemma2.build,
    "Gemma3ForCausalLM": gemma3.build,
    "GemmaForCausalLM": gemma.build,
    "Glm4ForCausalLM": glm4.build,
    "GlmForCausalLM": glm.build,
    "GraniteForCausalLM": granite.build,
    "HeliumForCausalLM": helium.build,
    "HunYuanDenseV1ForCausalLM": hunyuan_dense.build,
    "LlamaForCausalLM": llama.build,
    "MPTForCausalLM": mpt.build,
    "MiniMaxM2ForCausalLM": minimax_m2.build,
    "Ministral3ForCausalLM": mistral.build,
    "MinistralForCausalLM": mistral.build,
    "MistralForCausalLM": mistral.build,
    "Glm4MoeForCausalLM": glm4_moe.build,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.build,
    "GptOssForCausalLM": gpt_oss.build,
    "GraniteMoeForCausalLM": granitemoe.build,
    "MixtralForCausalLM": mixtral.build,
    "MptForCausalLM": mpt.build,
    "NanoChatForCausalLM": nanochat.build,
    "NemotronForCausalLM": nemotron.build,
    "OPTForCausalLM": opt.build,
    "OlmoeForCausalLM": olmoe.build,
    "Qwen2MoeForCausalLM": qwen2_moe.build,
    "Qwen3MoeForCausalLM": qwen3_moe.build,
    "Olmo2ForCausalLM": olmo2.build,
    "Olmo3ForCausalLM": olmo2.build,
    "OlmoForCausalLM": olmo.build,
    "Phi3ForCausalLM": phi3.build,
    "PhiForCausalLM": phi.build,
    "PhiMoEForCausalLM": phimoe.build,
    "PhimoeForCausalLM": phimoe.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    "SeedOssForCausalLM": seed_oss.build,
    "SmolLM3ForCausalLM": smollm3.build,
    "StableLmForCausalLM": stablelm.build,
    "Starcoder2ForCausalLM": starcoder2.build,
}
"""Name in config.json's `architectures` -> function that fills a Builder."""


def build_graph(
    checkpoint: Checkpoint,
    activations: str = "auto",
    kv_dtype: str = "auto",
    max_model_len: int | None = None,
    bf16_dots: bool = True,
) -> Graph:
    """The verified graph of a checkpoint: inputs of linears and KV cache rounded as these options (config.py) ask.

    Rotary tables that depend on the length of a sequence are those of `max_model_len`, where it is given
    (`rope.positions`).

    Raises CheckpointError: unknown architecture, a config key that is missing or not served, a tensor that is missing,
    that nothing would read, or whose shape disagrees with the config.
    """
    config = usual_keys(checkpoint.config, checkpoint.path)
    config[rope.LENGTH] = max_model_len  # of the engine's, whatever the file says
    names = config.get("architectures") or ["(none given)"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{checkpoint.path}: config has architectures = {names!r}, expected a list of names")
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise CheckpointError(
            f"{checkpoint.path}: architecture {', '.join(names)} {why_unserved(names[0], ARCHITECTURES)}"
        )
    build = ARCHITECTURES[name]
    check_model_type(config, name, ARCHITECTURES, checkpoint.path)
    check_entries(config, checkpoint.path)
    try:
        source = _Source(checkpoint, activations)
        if name in _WITHOUT_POSITIONS and config.get("max_position_embeddings") is None:
            config["max_position_embeddings"] = _WITHOUT_POSITIONS[name]
        if config.get("tie_word_embeddings") is None and not any(name in checkpoint for name in _HEADS):
            config["tie_word_embeddings"] = True  # configs are saved without what is transformers' general default
        max_positions, bounded = rope.positions(config, checkpoint.path)
        builder = Builder(name, count(config, "vocab_size", checkpoint.path), max_positions, source, bounded)
        auto = DType.F32 if activations == "f32" else DType.BF16
        build(builder, config, checkpoint, DType.I8 if kv_dtype == "int8" else auto)
        check_built(config, builder.graph, checkpoint.path)
        _refuse_unread(builder.graph, checkpoint)
        graph = round_inputs(
            verify(builder.graph), lambda packed, attends: DType(act_of(packed, activations, attends, bf16_dots))
        )
        return verify(graph)
    except GraphError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: config has no {error}") from error


_WITHOUT_POSITIONS = {"BloomForCausalLM": 2048, "FalconForCausalLM": 2048, "MPTForCausalLM": 2048}
"""Where a config may say nothing of it: how many tokens these models were made for."""

_HEADS = ("lm_head.weight", "embed_out.weight")


def _refuse_unread(graph: Graph, checkpoint: Checkpoint) -> None:
    """A layer more than the config counts, or a bias that it denies, would be left out of the model silently."""
    read = {base_name(part.name) for value in graph.weights() for part in value.parts}
    own = tuple({name.split(".")[0] + "." for name in (*read, "model.", "lm_head.")}) if graph.causal else _OF_ENCODERS
    unread = [name for name in checkpoint.names() if name not in read and name.startswith(own)]
    unread = [name for name in unread if not name.endswith(_DERIVED) and not name.startswith(_drafts(checkpoint))]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise CheckpointError(f"{checkpoint.path}: the config gives no place to tensor {unread[0]!r}{more}")


_DRAFTS = ("model.mtp_",)
"""Beginnings of the names of ERNIE's tensors that predict more than the next token."""


def _drafts(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Prefixes of layers that predict more than the next token, most behind the last: the model is whole without them."""
    layers, more = (checkpoint.config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    if type(layers) is not int or type(more) is not int:
        return _DRAFTS
    return (*_DRAFTS, *(f"model.layers.{i}." for i in range(layers, layers + min(more, 8))))


_OF_ENCODERS = (
    "model.",
    "bert.",
    "roberta.",
    "embeddings.",
    "encoder.",
    "layers.",
    "final_norm.",
    "pooler.",
    "classifier.",
)
"""Beginnings of the names of their tensors; what guesses masked words (cls, lm_head, decoder) is not served."""

_DERIVED = (
    *(".rotary_emb.inv_freq", "lm_head.weight", "embeddings.position_ids"),
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),  # causal masks
)
"""Ends of names of tensors that older checkpoints hold beside what they are made of: the config, tied embeddings."""


class _Source:
    """`graph.build.Source` over a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, activations: str) -> None:
        self._checkpoint = checkpoint
        self._activations = activations
        self._orders: dict[bytes, str] = {}  # digest -> the first vector of this content

    def order(self, name: str, always: bool = False) -> str:
        order = self._checkpoint.info(name).order
        if order is None:
            return f"{base_name(name)}{ORDER}" if always else ""
        digest = hashlib.blake2b(order.tobytes(), digest_size=16).digest()
        return self._orders.setdefault(digest, f"{base_name(name)}{ORDER}")

    def rows_cols_format(self, name: str) -> tuple[int, int, str]:
        info = self._checkpoint.info(name)
        if len(info.shape) == 1:
            return 1, info.shape[0], "f32"
        if len(info.shape) != 2:
            raise CheckpointError(f"{info.file}: {name} has shape {info.shape}, expected a matrix or a vector")
        try:
            return *info.shape, packed_format(info.source, self._activations)
        except CheckpointError as error:
            raise CheckpointError(f"{info.file}: {name}: {error}") from error
