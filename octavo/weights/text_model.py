"""The language model of a checkpoint that takes images, too: its config and its tensors as if they were all there is.

Two layouts. Files of the first releases hold `language_model.model.*` and `language_model.lm_head.*` (Qwen2-VL:
`model.*`) beside the encoder of images; those of later ones `model.language_model.*`, and the encoder in `model.*`, too.
config.json has the language model in `text_config` (Qwen2-VL: among the other keys).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from octavo.weights.hf_config import ModelConfig
from octavo.weights.mapped import FileIdentity
from octavo.weights.spec import ORDER, Checkpoint, CheckpointError, SourceTensor, TensorInfo


class _Text(NamedTuple):
    architecture: str  # of a checkpoint of the language model alone
    defaults: Mapping[str, Any] = {}  # what `text_config` may leave out


_GEMMA3 = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_QWEN2 = _Text("Qwen2ForCausalLM")
_TEXTS: dict[str, dict[str, _Text]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": _Text("Gemma3ForCausalLM", _GEMMA3)},
    "Mistral3ForConditionalGeneration": {
        "mistral": _Text("MistralForCausalLM"),
        "ministral3": _Text("Ministral3ForCausalLM"),
    },
    "Qwen2VLForConditionalGeneration": {"qwen2_vl": _QWEN2, "qwen2_vl_text": _QWEN2},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl": _QWEN2, "qwen2_5_vl_text": _QWEN2},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _Text("Qwen3ForCausalLM")},
}
"""By architecture of the whole and model_type of its language model."""

ARCHITECTURES = tuple(_TEXTS)

_NAME = re.compile(
    r"language_model\.(.+)|(model\.)language_model\.(.+)|((?:model\.(?:embed_tokens|layers|norm)|lm_head)\..+)"
)


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, where its architecture is none of these. Raises CheckpointError."""
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = _TEXTS.get(name) if isinstance(name, str) else None
    return checkpoint if known is None else TextModel(checkpoint, str(name), known)


class TextModel:
    """A `Checkpoint` inside of another."""

    def __init__(self, checkpoint: Checkpoint, name: str, known: Mapping[str, _Text]) -> None:
        self._checkpoint = checkpoint
        self.path, self.generation = checkpoint.path, checkpoint.generation
        self.config = _config(checkpoint, name, known)
        self._names = {own: given for given in checkpoint.names() if (own := _own_name(given)) is not None}
        left = sum(1 for _ in checkpoint.names()) - len(self._names)
        self.notices = [
            *checkpoint.notices,
            f"{name} is served as a language model alone: {left} tensors of its encoder of images are left out",
        ]

    def __contains__(self, name: str) -> bool:
        return self._given(name) in self._checkpoint

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        return self._checkpoint.info(self._given(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> SourceTensor:
        return self._checkpoint.read(self._given(name), start, stop)

    def release(self, name: str) -> None:
        self._checkpoint.release(self._given(name))

    def files(self) -> list[FileIdentity]:
        return self._checkpoint.files()

    def _given(self, name: str) -> str:
        base = name.removesuffix(ORDER)
        return self._names.get(base, base) + name[len(base) :]


def _own_name(given: str) -> str | None:
    """The name that a tensor of the language model has where there is nothing else; None of what is not its."""
    match = _NAME.fullmatch(given)
    return None if match is None else "".join(part for part in match.groups() if part)


def _config(checkpoint: Checkpoint, name: str, known: Mapping[str, _Text]) -> dict[str, Any]:
    whole = checkpoint.config
    inner = whole.get("text_config", {key: value for key, value in whole.items() if key != "vision_config"})
    kind = inner.get("model_type") if isinstance(inner, dict) else None
    text = known.get(kind) if isinstance(kind, str) else None
    if text is None:
        raise CheckpointError(
            f"{checkpoint.path}: {name} with a language model of type {kind!r:.100} is not supported; "
            f"supported: {', '.join(known)}"
        )
    outside = {key: whole[key] for key in ("tie_word_embeddings", "torch_dtype", "dtype") if key in whole}
    config = {**text.defaults, **outside, **inner, "architectures": [text.architecture]}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            config[key] = _of_text(config[key])
    return ModelConfig(config, f"{checkpoint.path}/config.json")


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters where no token is of an image: the three positions of a token (Qwen2-VL) are one."""
    found = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return found | {key: "default" for key in ("type", "rope_type") if found.get(key) == "mrope"}
