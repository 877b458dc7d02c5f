"""quantization_config by key: what is read is checked, what would change results is refused, the rest is told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.weights.spec import CheckpointError


class Settings:
    """A JSON object of the file `where`. Keys that nobody asked for are `unknown`."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is {values!r:.100}, expected an object")
        self.where = where
        self._values: dict[str, Any] = values
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Null is as good as absent."""
        self._seen.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise CheckpointError(f"{self.where}: {key} is {value!r:.100}, expected a whole number of at least {least}")
        return value

    def names(self, key: str) -> list[str]:
        """A list of strings; none where the key is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(f"{self.where}: {key} is {value!r:.100}, expected a list of names")
        return value

    def inner(self, key: str) -> Settings:
        """An object inside of this one, empty where the key is absent."""
        return Settings(self.get(key, {}), f"{self.where}: {key}")

    def items(self) -> Iterable[str]:
        return self._values.keys()

    def serve(self, key: str, *served: Any, default: Any = None) -> Any:
        """The value, which must be one of `served`; absent, the default."""
        value = self.get(key, default)
        if value is not None and not any(value is s or (value == s and type(value) is type(s)) for s in served):
            hint = f"served: {', '.join(map(str, served))}" if served else "it must be absent"
            raise self.refused(key, value, hint)
        return value

    def empty(self, *keys: str) -> None:
        """Refuse keys unless their value says nothing: absent, null, false, or empty."""
        for key in keys:
            if value := self.get(key):
                raise self.refused(key, value, "it must be absent")

    def known(self, *keys: str) -> None:
        """Keys that change no result: how the weights were found, or what another engine may use."""
        self._seen.update(keys)

    def refused(self, key: str, value: Any, hint: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} = {value!r:.100} is not supported ({hint})")

    def unknown(self) -> list[str]:
        return sorted(self._values.keys() - self._seen)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module is one of `patterns` or inside of one: names as in modules_to_not_convert, `*` for a part."""
    for pattern in patterns:
        expression = ".*".join(map(re.escape, pattern.split("*")))
        if re.search(rf"(^|\.){expression}($|\.)", name):
            return True
    return False


def unknown_keys(settings: Settings, also: Mapping[str, Settings] | None = None) -> list[str]:
    """Notices of keys that no code asked for."""
    found = [(settings.where, key) for key in settings.unknown()]
    for inner in (also or {}).values():
        found += [(inner.where, key) for key in inner.unknown()]
    return [f"{where} has key {key!r}, which is unknown and was left aside" for where, key in found]
