"""Who may use the server, and how much of it: API keys with tenants, salts and quotas."""

from __future__ import annotations

import hashlib
import hmac
import time
import tomllib
from collections.abc import Callable, Container
from math import ceil
from pathlib import Path

import msgspec

from octavo.config import ConfigError
from octavo.server.errors import ApiError

MINUTE = 60.0


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[key]] of a key file. Either the key itself or its SHA-256 digest in hex."""

    name: str  # for logs and metrics
    key: str | None = None
    sha256: str | None = None
    tenant: str | None = None  # who shares the machine fairly; default: the name
    salt: str | None = None  # only equal salts share KV blocks; default: the tenant, "" shares with all that have ""
    admin: bool = False  # may flush the cache, load adapters, and see what the engine did for anybody's requests
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers; what an answer takes is known when it ends
    max_concurrent: int | None = None  # requests open at once

    def digest(self) -> bytes:
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.sha256 or "")

    def check(self, where: str) -> None:
        """Raise ConfigError naming the file, the key and the field."""
        problem = None
        if (self.key is None) == (self.sha256 is None):
            problem = "must have either key or sha256"
        elif self.key == "":
            problem = "key must not be empty"
        elif self.sha256 is not None and not _is_digest(self.sha256):
            problem = "sha256 must be 64 hexadecimal digits"
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            if (value := getattr(self, name)) is not None and value < 1:
                problem = f"{name} must be at least 1, got {value}"
        if problem:
            raise ConfigError(f"{where}: key {self.name!r}: {problem}")


class Caller:
    """Who sent a request, and what is left of their quota."""

    def __init__(self, key: Key | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name if key else ""
        self.tenant = (key.tenant or key.name) if key else ""
        self.salt = (self.tenant if key.salt is None else key.salt) if key else ""
        self.admin = key is None or key.admin
        self._requests = _Bucket(key.requests_per_minute, clock) if key and key.requests_per_minute else None
        self._tokens = _Bucket(key.tokens_per_minute, clock) if key and key.tokens_per_minute else None
        self._most_open = key.max_concurrent if key else None
        self._num_open = 0

    @classmethod
    def of(cls, tenant: str, salt: str) -> Caller:
        """Who works for a tenant in the background, without quotas."""
        caller = cls()
        caller.tenant, caller.salt = tenant, salt
        return caller

    def enter(self) -> None:
        """A request begins: `leave` follows. Raises ApiError 429 naming the quota that is used up."""
        if self._most_open is not None and self._num_open >= self._most_open:
            raise _over(f"max_concurrent: {self._most_open} requests of this API key are open", 1)
        for name, bucket in (("tokens_per_minute", self._tokens), ("requests_per_minute", self._requests)):
            if bucket is not None and (seconds := bucket.wait()):
                raise _over(f"{name}: {bucket.size} are used up for this API key", seconds)
        if self._requests is not None:
            self._requests.take(1)
        self._num_open += 1

    def leave(self, num_tokens: int) -> None:
        """A request that entered has ended and took so many tokens, prompt and answer."""
        self._num_open -= 1
        if self._tokens is not None:
            self._tokens.take(num_tokens)


class Keys:
    """The API keys of a server. Without any, everybody is the same caller."""

    def __init__(self, keys: list[Key]) -> None:
        self._callers = [(key.digest(), Caller(key)) for key in keys]
        self._anyone = Caller()

    @property
    def needed(self) -> bool:
        return bool(self._callers)

    def caller(self, headers: dict[bytes, bytes]) -> Caller:
        """By `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises ApiError 401.

        Every digest is compared whatever the others gave, each in constant time: time tells nothing about a key.
        """
        if not self._callers:
            return self._anyone
        given = headers.get(b"x-api-key")
        if given is None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not given:
                raise _unknown("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(given.strip()).digest()
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        if not found:
            raise _unknown("the API key is not known here")
        return found[0]


def check_origin(headers: dict[bytes, bytes], allowed: Container[str]) -> None:
    """Raise ApiError 403 for a request that a web page of another server makes its reader's browser send, as it may without
    asking: its answer would be kept from the page, but not what it does. `allowed`: origins that CORS lets in."""
    origin = headers.get(b"origin", b"").decode("latin-1").lower()
    scheme, _, host = origin.partition("://")
    if scheme not in ("http", "https", "null") or origin in allowed or "*" in allowed:
        return  # no web page: an extension of a browser, an application
    if host != headers.get(b"host", b"").decode("latin-1").lower():
        raise ApiError(
            403,
            f"web pages of {origin:.100} may not use this server; cors_origins lets them",
            code="origin_not_allowed",
        )


def read_keys(api_key: str | None, path: str | None) -> Keys:
    """From the option `api_key` and a TOML file of [[key]] tables. Raises ConfigError naming the file and the fault."""
    keys = [Key(name="default", key=api_key, tenant="", salt="", admin=True)] if api_key is not None else []
    if path is not None:
        keys += _read_file(Path(path))
    for i, key in enumerate(keys):
        for other in keys[:i]:
            if key.name == other.name or key.digest() == other.digest():
                raise ConfigError(f"{path}: the keys {other.name!r} and {key.name!r} have the same name or key")
    return Keys(keys)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[Key]


def _read_file(path: Path) -> list[Key]:
    try:
        keys = msgspec.convert(tomllib.loads(path.read_text()), _File).key
    except OSError as e:
        raise ConfigError(f"api_key_file {path}: {e.strerror}") from None
    except (ValueError, msgspec.ValidationError) as e:
        raise ConfigError(f"api_key_file {path}: {str(e).replace('`', '')}") from None
    if not keys:
        raise ConfigError(f"api_key_file {path}: there is no [[key]] in it")
    for key in keys:
        key.check(f"api_key_file {path}")
    return keys


class _Bucket:
    """A token bucket: `size` at once, `size` a minute. It may be overdrawn by what was not known before."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self.size = size
        self._clock = clock
        self._left = float(size)
        self._seen = clock()

    def wait(self) -> float:
        """Seconds until one can be taken; 0: now."""
        now = self._clock()
        self._left = min(self.size, self._left + (now - self._seen) * self.size / MINUTE)
        self._seen = now
        return max(0.0, (1 - self._left) * MINUTE / self.size)

    def take(self, count: int) -> None:
        self._left -= count


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdefABCDEF" for c in text)


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _over(what: str, seconds: float) -> ApiError:
    return ApiError(429, f"quota reached: {what}", code="rate_limit_exceeded", retry_after=ceil(seconds))
