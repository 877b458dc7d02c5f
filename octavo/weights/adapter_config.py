"""adapter_config.json of PEFT: which modules a LoRA adapter is for, their ranks and scales (PEFT 0.18, `LoraConfig`)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from octavo.weights.spec import CheckpointError

CONFIG = "adapter_config.json"


class AdapterError(CheckpointError):
    """An adapter cannot be served. One line: what is wrong, in which file, and what was expected."""


_SERVED = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern",
)  # fmt: skip

_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
"""Of training, or of how base weights are stored. fan_in_fan_out: A and B are (out, in) whatever the base is."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # the others change the base weights too
}
"""Keys with the values that are served; null and absent are the default, which is. Any other key must be empty."""


class AdapterConfig:
    """Raises AdapterError at birth where a value would change results and is not served."""

    def __init__(self, file: str, content: bytes) -> None:
        self._file = file
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise AdapterError(f"{file}: expected a JSON object, found {type(values).__name__}")
        self._values: dict[str, Any] = values
        self._refuse_others()
        self._rank = self._number("r", values.get("r", 8), whole=True)
        self._alpha = self._number("lora_alpha", values.get("lora_alpha", 8))
        self._rank_pattern = self._patterns("rank_pattern", whole=True)
        self._alpha_pattern = self._patterns("alpha_pattern")
        self._included = self._modules("target_modules")
        self._excluded = self._modules("exclude_modules")
        if self._included is None:
            raise AdapterError(f"{file}: target_modules is missing")
        self._layers = self._layer_numbers()
        pattern = values.get("layers_pattern") or []
        self._layer_patterns = [
            self._compiled("layers_pattern", rf".*\.{each}\.(\d+)\.")
            for each in ([pattern] if isinstance(pattern, str) else self._strings("layers_pattern", pattern))
        ] or [re.compile(r".*\.[^.]*\.(\d+)\.")]

    def targets(self, module: str) -> bool:
        """Whether PEFT would put an adapter on this module."""
        if self._excluded is not None and _matches(self._excluded, module):
            return False
        if not _matches(self._included, module):
            return False
        if self._layers is None or isinstance(self._included, re.Pattern):
            return True
        found = next((m for pattern in self._layer_patterns if (m := pattern.match(module))), None)
        return found is not None and int(found[1]) in self._layers

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """r, and what B (A x) is multiplied by."""
        rank = next((n for pattern, n in self._rank_pattern if pattern.match(module)), self._rank)
        alpha = next((n for pattern, n in self._alpha_pattern if pattern.match(module)), self._alpha)
        return int(rank), alpha / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def _refuse_others(self) -> None:
        for key, value in self._values.items():
            if key in _SERVED or key in _WITHOUT_EFFECT or value is None:
                continue
            if key in _NEUTRAL:
                if value not in _NEUTRAL[key]:
                    served = ", ".join(map(str, _NEUTRAL[key]))
                    raise AdapterError(f"{self._file}: {key} = {value!r:.100} is not supported (served: {served})")
            elif value not in (False, [], {}, ""):
                raise AdapterError(f"{self._file}: {key} = {value!r:.100} is not supported (it must be absent)")
        if self._values.get("peft_type") is None:
            raise AdapterError(f"{self._file}: peft_type is missing, expected LORA")
        if self._values.get("use_rslora") not in (None, False, True):
            raise AdapterError(f"{self._file}: use_rslora must be true or false")

    def _number(self, key: str, value: Any, whole: bool = False) -> float:
        if (type(value) is int and 0 < value < 2**31) or (not whole and type(value) is float and 0 < value < 1e9):
            return value
        raise AdapterError(
            f"{self._file}: {key} has {value!r:.100}, expected a {'whole ' if whole else ''}number above 0"
        )

    def _patterns(self, key: str, whole: bool = False) -> list[tuple[re.Pattern[str], float]]:
        given = self._values.get(key) or {}
        if not isinstance(given, dict):
            raise AdapterError(f"{self._file}: {key} is {given!r:.100}, expected an object of names and numbers")
        return [
            (self._compiled(key, rf"(.*\.)?({name})$"), self._number(key, value, whole)) for name, value in given.items()
        ]  # fmt: skip

    def _modules(self, key: str) -> re.Pattern[str] | list[str] | None:
        given = self._values.get(key)
        if given is None:
            return None
        if given == "all-linear":  # of the layers: the head is not among them
            return re.compile(".*")
        return self._compiled(key, given) if isinstance(given, str) else self._strings(key, given)

    def _layer_numbers(self) -> frozenset[int] | None:
        given = self._values.get("layers_to_transform")
        if given is None or given == []:
            return None
        numbers = [given] if isinstance(given, int) else given
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise AdapterError(f"{self._file}: layers_to_transform is {given!r:.100}, expected whole numbers")
        return frozenset(numbers)

    def _strings(self, key: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise AdapterError(
                f"{self._file}: {key} is {value!r:.100}, expected a list of names, or a regular expression"
            )
        return value

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{self._file}: {key} has {pattern!r:.100}, no regular expression: {error}") from error


def _matches(modules: re.Pattern[str] | list[str] | None, name: str) -> bool:
    """A whole name by a regular expression, or the name or its end by a list."""
    if isinstance(modules, re.Pattern):
        return modules.fullmatch(name) is not None
    return any(name == each or name.endswith("." + each) for each in modules or ())
