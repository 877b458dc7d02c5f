"""POST /v1/abort and GET /v1/streams/{id}: what a client does to a generation by its id."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import read_body
from octavo.server.calls import call_of
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.parse import decode
from octavo.server.routing import Routes
from octavo.server.service import Service
from octavo.server.stream import EventStream

ABORT = "/v1/abort"
STREAMS = "/v1/streams/{id}"


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/abort."""

    id: str


def add_stream_routes(routes: Routes, service: Service) -> None:
    @routes.post(ABORT)
    async def abort(http: Request) -> Response:
        """End a generation: its open choices finish with the reason "abort" and what they have."""
        try:
            wanted = msgspec.convert(decode(await read_body(http)), AbortRequest)
        except msgspec.ValidationError as e:
            raise bad_request(str(e), "id") from None
        generation = service.open.get(wanted.id)
        if generation is None or generation.caller != call_of(http).caller.name:
            raise ApiError(404, f"nothing is generated with the id {wanted.id!r:.100}", param="id", code="not_found")
        generation.abort()
        return json_response({"id": wanted.id, "object": "abort", "aborted": True})

    @routes.get(STREAMS)
    async def resume(http: Request) -> Response:
        """A resumable stream from the event behind Last-Event-ID on, or from its beginning."""
        stream = service.streams.get(http.path_params["id"], call_of(http).caller.name)
        last = http.headers.get("last-event-id", "-1")
        if not re.fullmatch("-1|[0-9]{1,9}", last):
            raise bad_request(
                f"last-event-id must be the id of an event, a whole number; got {last[:40]!r}", "last-event-id"
            )
        start = int(last) + 1
        stream.check(start)
        return EventStream(stream.read(start), {}, service.config.sse_ping_seconds)
