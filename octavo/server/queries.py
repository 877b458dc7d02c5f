"""The parameters that GET routes take behind the `?`. Source: OpenAI's Files, Batches and Responses APIs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from octavo.server.errors import bad_request
from octavo.server.fields import Refused, RequestBody, about


class Query(RequestBody, kw_only=True):
    """No parameters. Those of a route, else: read as the fields of a body are, but from texts."""


class PageQuery(Query, kw_only=True):
    """What part of a list is shown."""

    after: Annotated[str | None, about("An id: the list begins behind it.")] = None
    limit: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, about("Most entries. Default: 100.")] = None
    order: Annotated[Literal["asc", "desc"] | None, about("Of time. Default: desc, the newest first.")] = None


class FilesQuery(PageQuery, kw_only=True):
    """GET /v1/files."""

    purpose: Annotated[
        Literal["batch", "batch_output"] | None, about("Those that were uploaded for batches, or came out of them.")
    ] = None


class ResponseQuery(Query, kw_only=True):
    """GET /v1/responses/{id}."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "include": Refused("it is said when a response is made"),
        "include_obfuscation": Refused("events are not padded", ("false",)),
    }

    starting_after: Annotated[
        Annotated[int, Meta(ge=0, lt=10**9)] | None, about("The number of an event: those behind it. Only with stream.")
    ] = None
    stream: Annotated[bool | None, about("The events of a response made in the background.")] = None

    def check(self) -> None:
        if self.starting_after is not None and not self.stream:
            raise bad_request("starting_after goes with stream=true", "starting_after")


QUERIES: dict[str, type[Query]] = {
    "/v1/files": FilesQuery,
    "/v1/batches": PageQuery,
    "/v1/responses/{id}": ResponseQuery,
    "/v1/responses/{id}/input_items": PageQuery,
}
"""By the path of the GET route."""
