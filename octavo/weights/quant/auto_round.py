"""AutoRound (Cheng et al. 2023): rounding that was learned, stored in the layouts of AutoGPTQ and AutoAWQ."""

from __future__ import annotations

from typing import Any

from octavo.weights.quant import awq, gptq
from octavo.weights.quant.found import Found
from octavo.weights.quant.settings import Settings, unknown_keys
from octavo.weights.safetensors_file import Tensors

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN_BITS = 16
"""From here on a layer of extra_config is not quantised."""


def find(settings: Settings, tensors: Tensors) -> Found:
    packing = settings.serve("packing_format", _GPTQ, _AWQ)
    if packing is None:
        raise settings.refused("packing_format", None, f"served: {_GPTQ}, {_AWQ}")
    settings.serve("data_type", "int")
    settings.known(
        "quant_method", "sym", "iters", "autoround_version", "block_name_to_quantize", "to_quant_block_names", "backend",
        "low_gpu_mem_usage", "nsamples", "seqlen", "batch_size", "enable_quanted_input", "enable_minmax_tuning", "lr",
        "minmax_lr", "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type", "gradient_accumulate_steps",
        "enable_norm_bias_tuning", "dataset", "amp", "scale_dtype", "quant_block_list", "super_bits", "super_group_size",
        "model_free", "regex_config", "quant_lm_head",
    )  # fmt: skip
    values: dict[str, Any] = {"bits": settings.number("bits"), "group_size": settings.get("group_size", -1)}
    layers = settings.inner("extra_config")
    dynamic = {}
    for name in layers.items():
        layer = layers.inner(name)
        bits = layer.number("bits", values["bits"])
        if bits < _PLAIN_BITS:
            dynamic[f"+:(?:{name})$"] = {"bits": bits, "group_size": layer.get("group_size", values["group_size"])}
    notices = unknown_keys(settings)
    if packing == _AWQ:
        for name, changed in dynamic.items():
            if changed != values:
                raise layers.refused(name, changed, "layers of other bits or groups, in the layout of AWQ")
        found = awq.find(Settings(values, settings.where), tensors)
    else:
        found = gptq.find(Settings({**values, "dynamic": dynamic}, settings.where), tensors)
    return found._replace(notices=found.notices + notices)
