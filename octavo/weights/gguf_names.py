"""GGUF architectures as llama.cpp's converter writes them: tensor names, row orders, metadata; one entry each.

Facts from its gguf-py (names and keys), its converter (row orders) and its loader (what a file leaves out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Names = Mapping[str, str]
"""Stem of a GGUF tensor -> module of Hugging Face. Where the latter has no ".weight", the stem has it: "a.weight"."""


class Family(NamedTuple):
    """How the files of one architecture are read."""

    architecture: str  # in config.json's `architectures`
    layer: Names  # of blk.N.*
    top: Names
    prefix: str = "model.layers."  # of the modules of a layer
    interleaved: bool = False  # rows of q and k: rotary pairs are neighbours, where Hugging Face has halves
    partial: bool = False  # rope.dimension_count may be less than the head size
    period: int = 0  # without a pattern in the file, every period-th layer has no window; 0: all have it
    wide_layers: int = 0  # with so many layers, attention is scaled as if a head had hidden / heads dimensions
    switches: Names = {}  # tensor of blk.0, or of none -> key of config.json that says whether it is there
    keys: Mapping[str, str] = {}  # metadata -> key of config.json
    config: Mapping[str, Any] = {}  # what the files leave out
    scaling: Mapping[str, Any] = {}  # the same of rope scaling
    of_images: tuple[str, ...] = ()  # metadata that says nothing of text
    renamed: Mapping[str, str] = {}  # Llama's key of config.json -> this family's


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_LLAMA = {
    **_ATTENTION,
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3 = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_POST_NORMS = {  # after the blocks alone
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {**_PHI3, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_STABLELM = {**_LLAMA, "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
_HUNYUAN = {**_LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_PHI2 = {
    **_ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_STARCODER2 = {**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
_EXAONE = {
    "attn_norm": "ln_1",
    "attn_q": "attn.attention.q_proj",
    "attn_k": "attn.attention.k_proj",
    "attn_v": "attn.attention.v_proj",
    "attn_output": "attn.attention.out_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.c_fc_0",
    "ffn_up": "mlp.c_fc_1",
    "ffn_down": "mlp.c_proj",
}
_EXAONE_TOP = {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
}
_NEOX = {**_BLOOM, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_EXPERTS = {  # of all experts in one tensor [experts, out, in]
    **_LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_QWEN2MOE = {
    **_EXPERTS,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GPT_OSS = {
    **_EXPERTS,
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_DEEPSEEK2 = {
    **_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # [heads, latent, D]: kv_b_proj's rows of the keys, transposed per head
    "attn_v_b": "self_attn.v_b_proj",  # [heads, D, latent]
}

_GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_gating_func": "expert_gating_func",  # 1: softmax, 2: sigmoid
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_LOCAL_EXPERTS = {**_EXPERT_KEYS, "expert_count": "num_local_experts"}
_ROUTED_EXPERTS = {**_EXPERT_KEYS, "expert_count": "n_routed_experts"}
_LATENT_KEYS = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
_SOFTCAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "norm_offset": 0.0,  # the files hold 1 + w of the norms
}

_FALCON = Family(
    "FalconForCausalLM",
    _BLOOM,
    _BLOOM_TOP,
    "transformer.h.",
    switches={"attn_qkv.bias": "bias"},
    config={
        "hidden_act": "gelu",
        "qkv_order": "joined",
        "parallel_attn": True,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    renamed={"num_key_value_heads": "num_kv_heads", "layer_norm_eps": "layer_norm_epsilon"},
)

FAMILIES: dict[str, Family] = {
    "arcee": Family("ArceeForCausalLM", _LLAMA, _TOP, interleaved=True, config={"hidden_act": "relu2"}),
    "bert": Family(
        "BertModel",
        _BERT,
        _BERT_TOP,
        "encoder.layer.",
        keys={"pooling_type": "pooling_type", "attention.causal": "is_decoder"},
        config={"hidden_act": "gelu", "model_type": "bert"},
    ),
    "bloom": Family(
        "BloomForCausalLM",
        _BLOOM,
        _BLOOM_TOP,
        "transformer.h.",
        config={"qkv_order": "joined", "hidden_act": "gelu_new"},
        renamed={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    "chatglm": Family("GlmForCausalLM", _PHI3, _TOP, partial=True),
    "cohere2": Family("Cohere2ForCausalLM", _LLAMA, _TOP, period=4, keys={"logit_scale": "logit_scale"}),
    "command-r": Family(
        "CohereForCausalLM",
        _LLAMA,
        _TOP,
        switches={"attn_q_norm.weight": "use_qk_norm"},
        keys={"logit_scale": "logit_scale"},
    ),
    "deepseek2": Family("DeepseekV3ForCausalLM", _DEEPSEEK2, _TOP, keys={**_ROUTED_EXPERTS, **_LATENT_KEYS}),
    "ernie4_5": Family("Ernie4_5ForCausalLM", _LLAMA, _TOP, switches={"attn_q.bias": "use_bias"}),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {**_EXPERTS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        _TOP,
        switches={"attn_q.bias": "use_bias"},
        keys={
            **_EXPERT_KEYS,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    "exaone": Family("ExaoneForCausalLM", _EXAONE, _EXAONE_TOP, "transformer.h."),
    "exaone4": Family("Exaone4ForCausalLM", _POST_NORMS, _TOP, period=4),
    "falcon": _FALCON,
    "falcon with attn_norm_2": _FALCON._replace(
        layer={**_BLOOM, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        config={**_FALCON.config, "new_decoder_architecture": True},
    ),
    "gemma": Family("GemmaForCausalLM", _LLAMA, _TOP, config=_GEMMA),
    "gemma2": Family("Gemma2ForCausalLM", _GEMMA2, _TOP, period=2, wide_layers=46, keys=_SOFTCAPS, config=_GEMMA),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _GEMMA2,
        _TOP,
        period=6,
        wide_layers=62,
        keys={**_SOFTCAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        config={**_GEMMA, "rope_local_base_freq": 10000.0},
    ),
    "glm4": Family("Glm4ForCausalLM", _GLM4, _TOP, partial=True),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        {**_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        _TOP,
        partial=True,
        switches={"attn_q_norm.weight": "use_qk_norm"},
        keys=_ROUTED_EXPERTS,
    ),
    "gpt-oss": Family("GptOssForCausalLM", _GPT_OSS, _TOP, period=2, keys=_LOCAL_EXPERTS, scaling={"truncate": False}),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_TOP,
        "transformer.h.",
        config={"transposed": False, "hidden_act": "gelu_new"},
        renamed={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
        },
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        _NEOX,
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        "gpt_neox.layers.",
        partial=True,
        switches={"attn_qkv.bias": "attention_bias"},
        keys={"use_parallel_residual": "use_parallel_residual"},
        config={"qkv_order": "joined", "hidden_act": "gelu"},
    ),
    "granite": Family("GraniteForCausalLM", _LLAMA, _TOP, interleaved=True, keys=_GRANITE_KEYS),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        {**_EXPERTS, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        _TOP,
        interleaved=True,
        keys={**_LOCAL_EXPERTS, **_GRANITE_KEYS},
    ),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", _HUNYUAN, _TOP),
    "llama": Family("LlamaForCausalLM", _LLAMA, _TOP, interleaved=True),
    "llama with ffn_gate_inp": Family(
        "MixtralForCausalLM",
        {**_EXPERTS, "ffn_gate_inp": "block_sparse_moe.gate"},
        _TOP,
        interleaved=True,
        keys=_LOCAL_EXPERTS,
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        {
            **_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        _TOP,
        partial=True,
        keys=_LOCAL_EXPERTS,
    ),
    "mistral3": Family("Ministral3ForCausalLM", _LLAMA, _TOP, interleaved=True, scaling={"mscale": 1.0}),
    "mpt": Family(
        "MPTForCausalLM",
        _MPT,
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        "transformer.blocks.",
        keys={"attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max"},
        config={"hidden_act": "gelu"},
        renamed={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _LLAMA,
        _TOP,
        partial=True,
        config={"hidden_act": "relu2", "norm_offset": 0.0},
        renamed={"layer_norm_eps": "norm_eps"},
    ),
    "olmo": Family("OlmoForCausalLM", _LLAMA, _TOP, interleaved=True, keys={"attention.clamp_kqv": "clip_qkv"}),
    "olmo2": Family("Olmo2ForCausalLM", _POST_NORMS, _TOP, period=4),
    "olmoe": Family("OlmoeForCausalLM", _EXPERTS, _TOP, keys=_EXPERT_KEYS),
    "phi2": Family(
        "PhiForCausalLM",
        _PHI2,
        {**_TOP, "output_norm": "model.final_layernorm"},
        partial=True,
        switches={"attn_q_norm.weight": "qk_layernorm"},
        config={"hidden_act": "gelu_new"},
    ),
    "phi3": Family("Phi3ForCausalLM", _PHI3, _TOP, partial=True),
    "phimoe": Family(
        "PhiMoEForCausalLM",
        {**_EXPERTS, "ffn_gate_inp": "block_sparse_moe.gate"},
        _TOP,
        switches={"output.bias": "lm_head_bias"},
        keys=_LOCAL_EXPERTS,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA, _TOP),
    "qwen2moe": Family("Qwen2MoeForCausalLM", _QWEN2MOE, _TOP, keys=_EXPERT_KEYS),
    "qwen2vl": Family("Qwen2ForCausalLM", _LLAMA, _TOP, of_images=("rope.dimension_sections",)),
    "qwen3": Family("Qwen3ForCausalLM", _LLAMA, _TOP),
    "qwen3moe": Family("Qwen3MoeForCausalLM", _EXPERTS, _TOP, keys=_EXPERT_KEYS, config={"norm_topk_prob": True}),
    "qwen3vl": Family("Qwen3ForCausalLM", _LLAMA, _TOP, of_images=("rope.dimension_sections", "n_deepstack_layers")),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {**_LLAMA, "post_attention_norm": "post_attention_layernorm"},
        _TOP,
        switches={"attn_output.bias": "attention_out_bias"},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", _LLAMA, _TOP, interleaved=True),
    "stablelm": Family(
        "StableLmForCausalLM",
        _STABLELM,
        _TOP,
        partial=True,
        switches={"attn_q.bias": "use_qkv_bias", "attn_q_norm.weight": "qk_layernorm"},
        keys={"use_parallel_residual": "use_parallel_residual"},
    ),
    "starcoder": Family(
        "GPTBigCodeForCausalLM",
        _GPT2,
        _GPT2_TOP,
        "transformer.h.",
        config={"hidden_act": "gelu_new"},
        renamed={"max_position_embeddings": "n_positions"},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _STARCODER2,
        _TOP,
        switches={"attn_q.bias": "use_bias"},
        config={"hidden_act": "gelu_pytorch_tanh"},
        renamed={"layer_norm_eps": "norm_epsilon"},
    ),
}
"""By `general.architecture`, perhaps with a tensor of blk.0 by which it is another family. Whether a family is served is the models' to say (`models.ARCHITECTURES`)."""
