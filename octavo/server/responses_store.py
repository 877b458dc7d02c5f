"""The responses that a server keeps, in memory: for previous_response_id, and to be got by their ids.

A tenant sees its own only. The oldest are dropped where there are too many of them, or where they take too much; none
that is being made.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.resume import ResumableStream

MAX_RESPONSES = 1000
MAX_BYTES = 2**28
"""Of bodies, conversations and kept events, as JSON. What responses share of a conversation counts for each."""

MAX_BACKGROUND = 256
"""Responses being made in the background at a time."""

Item = dict[str, Any]


class StoredResponse:
    """`body` changes while the response is made."""

    def __init__(self, tenant: str, body: dict[str, Any], context: list[Item], items: list[Item]) -> None:
        """context: items of the conversation before; items: those of the request."""
        self.tenant = tenant
        self.body = body
        self.context = context
        self.items = items
        self.generation: Generation | None = None  # while it is made in the background
        self.stream: ResumableStream | None = None  # of one made in the background
        self._num_bytes = len(msgspec.json.encode((context, items)))

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def conversation(self) -> list[Item]:
        """What a response that follows this one goes on from."""
        return [*self.context, *self.items, *self.body["output"]]

    def num_bytes(self) -> int:
        events = 0 if self.stream is None else self.stream.num_bytes
        return self._num_bytes + len(msgspec.json.encode(self.body)) + events


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: dict[str, StoredResponse] = {}  # oldest first
        self._sizes: dict[str, int] = {}  # of finished ones
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, id: str) -> bool:
        return id in self._responses

    def add(self, response: StoredResponse) -> None:
        """One that is being made, or is finished: then `finish` follows."""
        self._responses[response.id] = response

    def finish(self, response: StoredResponse) -> None:
        """It changes no more. The oldest are dropped as far as they must be."""
        if self._responses.get(response.id) is not response:  # deleted meanwhile
            return
        self._sizes[response.id] = response.num_bytes()
        self._num_bytes += self._sizes[response.id]
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            oldest = next((id for id in self._responses if id in self._sizes), None)
            if oldest is None:
                break
            self._forget(oldest)

    def get(self, id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Raises ApiError 404, also for another tenant's."""
        response = self._responses.get(id)
        if response is None or response.tenant != tenant:
            raise ApiError(404, f"there is no stored response {id:.80}", param=param, code="not_found")
        return response

    def delete(self, id: str, tenant: str) -> None:
        """One that is being made is ended. Raises ApiError 404."""
        response = self.get(id, tenant)
        if response.generation is not None:
            response.generation.abort()
        self._forget(id)

    def check_room(self) -> None:
        """Raise ApiError 429 where no more responses can be made in the background."""
        if sum(response.generation is not None for response in self._responses.values()) >= MAX_BACKGROUND:
            raise ApiError(
                429, f"{MAX_BACKGROUND} responses are being made in the background already", param="background",
                code="too_many_background_responses", retry_after=1,
            )  # fmt: skip

    def _forget(self, id: str) -> None:
        del self._responses[id]
        self._num_bytes -= self._sizes.pop(id, 0)
