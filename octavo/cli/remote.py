"""A model behind a URL: any server with OpenAI's chat API."""

from __future__ import annotations

import http.client
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from octavo.cli.source import OnChunk, error_message, read_chunk, refusal
from octavo.config import ConfigError
from octavo.engine.client import EngineError

CONNECT_SECONDS = 600.0
"""A server may work on a long prompt for so long before it says a word."""


class RemoteModel:
    """One request at a time, each on a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: with or without /v1 at its end. Raises ConfigError for what is no URL, EngineError where nobody answers."""
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError as e:
            raise ConfigError(f"{url}: {e}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is no address of a server, as http://127.0.0.1:8000 is")
        self._host = parts.hostname
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        try:
            models = msgspec.json.decode(self._request("GET", "/v1/models", None).read())
            self._model = str(models["data"][0]["id"])
        except (LookupError, TypeError, msgspec.DecodeError, http.client.HTTPException):
            raise EngineError(f"{url} tells of no models: is it a server of OpenAI's API?") from None
        self.name = f"{self._model} at {url}"

    def check(self, path: str, body: dict[str, Any]) -> None:
        """The server knows its fields."""

    def stream(self, path: str, body: dict[str, Any], on_chunk: OnChunk) -> None:
        response = self._request("POST", path, {"model": self._model, **body, "stream": True})
        with response:  # the end of it, however it comes about, closes the connection: the server stops
            told = False
            try:
                for line in response:
                    if (chunk := read_chunk(line)) is not None:
                        on_chunk(chunk)
                        told = True
            except http.client.HTTPException as e:
                raise EngineError(f"{self._host} broke off: {e!r}") from None
            if not told:
                raise EngineError(f"{self._host} sent no stream of events")

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=CONNECT_SECONDS)
        content = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, self._base + path, content, {**self._headers, "connection": "close"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise EngineError(f"{self._host} does not answer: {e}") from None
        if response.status == 200:
            return response
        raw = b""
        with response, suppress(http.client.HTTPException):
            raw = response.read()
        try:
            message = error_message(msgspec.json.decode(raw))
        except msgspec.DecodeError:
            message = raw.decode(errors="replace")[:200].strip() or response.reason
        raise refusal(response.status, message)
