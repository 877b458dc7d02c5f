"""GET /debug/requests/{id} and POST /cache/flush: what the engine did for a request, and its cache emptied."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.client import EngineDead
from octavo.explain import Explanation
from octavo.server.calls import call_of
from octavo.server.errors import ApiError, json_response
from octavo.server.explained import written
from octavo.server.routing import Routes
from octavo.server.service import Service

REQUESTS = "/debug/requests/{id}"
FLUSH = "/cache/flush"


def add_debug_routes(routes: Routes, service: Service) -> None:
    @routes.get(REQUESTS)
    async def explain(http: Request) -> Response:
        """Of a request that is served or ended not long ago, by the id of its answer: for each choice of each prompt
        what came from the cache, what it waited for and what was computed again. No text, no tokens."""
        check_admin(service, http)
        id = http.path_params["id"]
        try:
            explanations = await service.client.explain(id)
        except EngineDead as e:
            raise ApiError(503, str(e), code="engine_dead") from None
        if not explanations:
            raise ApiError(
                404, f"no request {id!r:.100} is served, or ended not long ago", param="id", code="not_found"
            )
        return json_response({"id": id, "object": "request", "choices": [_entry(id, e) for e in explanations]})

    @routes.post(FLUSH)
    async def flush(http: Request) -> Response:
        """Forget every cached block. Requests that are served keep theirs, which nobody else will find."""
        check_admin(service, http)
        try:
            num_blocks = await service.client.flush()
        except EngineDead as e:
            raise ApiError(503, str(e), code="engine_dead") from None
        return json_response({"object": "cache.flush", "blocks": num_blocks})


def _entry(id: str, explanation: Explanation) -> dict[str, Any]:
    prompt = explanation.id.removeprefix(id).removeprefix("-")
    return {"prompt": int(prompt or 0), "choice": explanation.choice, **written(explanation)}


def check_admin(service: Service, http: Request) -> None:
    """Raises ApiError where the caller may not use such a route, or it is too early."""
    if not call_of(http).caller.admin:
        raise ApiError(403, f"this API key may not use {http.url.path}: it is no admin key", code="not_allowed")
    if service.client.bounds is None:
        raise ApiError(503, "the model is still loading", code="not_ready", retry_after=1)
