"""OpenAI's Responses API, on the chat path: /v1/responses and the responses that are kept."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.request import ParameterError
from octavo.server.calls import Call, call_of
from octavo.server.chat import converse
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.files import page
from octavo.server.parse import Parsed, ignored_header, parse
from octavo.server.queries import ResponseQuery
from octavo.server.responses_answer import ResponseAnswer, new_body
from octavo.server.responses_fields import NAMES, ResponsesRequest
from octavo.server.responses_input import as_messages, read_items
from octavo.server.responses_store import StoredResponse
from octavo.server.resume import ResumableStream
from octavo.server.routes import RESPONSES, prepared
from octavo.server.routing import Routes
from octavo.server.service import Service
from octavo.server.stream import EventStream, Relay, WholeAnswer


def response(service: Service, body: bytes, call: Call) -> tuple[ResponseAnswer, Parsed[ResponsesRequest]]:
    """The response, not begun and not stored. Raises ApiError."""
    parsed = parse(body, ResponsesRequest, service.config.strict)
    request, ignored = parsed
    service.served(request.model)
    tenant = call.caller.tenant
    context: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = service.responses.get(request.previous_response_id, tenant, "previous_response_id")
        if previous.body["status"] in ("queued", "in_progress"):
            raise bad_request("previous_response_id names a response that is still being made", "previous_response_id")
        context = previous.conversation
    items = read_items(request.input, ignored)
    messages = as_messages(context, items, request.instructions)
    id = f"resp_{request.request_id or os.urandom(16).hex()}"
    if id in service.responses:
        raise bad_request(f"a response with the request_id {request.request_id!r} is stored", "request_id")
    if request.background:
        service.responses.check_room()
    try:
        generation, conversation = converse(service, request.as_chat(), messages, ignored, call, id)
    except ParameterError as e:
        raise bad_request(str(e), e.param) from None
    except ApiError as e:
        raise e.renamed(NAMES) from None
    for i, item in enumerate(items):
        item.setdefault("id", f"{_PREFIX[item['type']]}_{id.partition('_')[2]}i{i:02x}")
    stored = StoredResponse(tenant, new_body(id, generation.model, request, generation), context, items)
    on_end = partial(_ended, service, stored, request)
    return ResponseAnswer(generation, conversation, request, stored, on_end), parsed


_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _ended(service: Service, stored: StoredResponse, request: ResponsesRequest) -> None:
    if request.background:
        stored.generation = None
    elif request.stored:
        service.responses.add(stored)
    if request.stored:
        service.responses.finish(stored)


def add_response_routes(routes: Routes, service: Service) -> None:

    @routes.post(RESPONSES)
    async def create(http: Request) -> Response:
        """The next items of a conversation, in OpenAI's newer form."""
        answer, parsed = await prepared(service, http, response)
        answer.generation.begin()
        headers = ignored_header(parsed.ignored)
        if parsed.request.background:
            stream = _in_background(answer)
            call_of(http).lasts = stream.ended
            if not parsed.request.stream:
                return json_response(answer.stored.body, 200, headers)
            return EventStream(stream.read(0), headers, service.config.sse_ping_seconds)
        if not parsed.request.stream:
            return WholeAnswer(answer, headers)
        waits = answer.generation.may_be_refused
        relay = Relay(answer.generation, answer.written)
        return EventStream(answer.events(), headers, service.config.sse_ping_seconds, waits=waits, relay=relay)

    def _in_background(answer: ResponseAnswer) -> ResumableStream:
        stored = answer.stored
        stored.generation = answer.generation
        stored.stream = ResumableStream(answer.events(), None)
        service.responses.add(stored)
        return stored.stream

    def _get(http: Request) -> StoredResponse:
        return service.responses.get(http.path_params["id"], call_of(http).caller.tenant)

    @routes.get(RESPONSES + "/{id}")
    async def retrieve(http: Request) -> Response:
        """A stored response. With `stream=true` the events of one made in the background, those behind `starting_after`."""
        stored = _get(http)
        query: ResponseQuery = http.state.query
        if not query.stream:
            return json_response(stored.body)
        if stored.stream is None:
            raise bad_request("only responses made in the background can be streamed later", "stream")
        start = 0 if query.starting_after is None else query.starting_after + 1
        stored.stream.check(start)
        return EventStream(stored.stream.read(start), {}, service.config.sse_ping_seconds)

    @routes.post(RESPONSES + "/{id}/cancel")
    async def cancel(http: Request) -> Response:
        """End a response that is made in the background. One that has ended stays as it is."""
        stored = _get(http)
        if stored.stream is None:
            raise bad_request("only responses made in the background can be cancelled", "response_id")
        if stored.generation is not None:
            stored.generation.abort()
            await stored.stream.ended.wait()
        return json_response(stored.body)

    @routes.get(RESPONSES + "/{id}/input_items")
    async def input_items(http: Request) -> Response:
        """The items that the request of a stored response brought."""
        return json_response(page(http, _get(http).items[::-1]))

    @routes.delete(RESPONSES + "/{id}")
    async def delete(http: Request) -> Response:
        """Forget a stored response. One that is being made is ended."""
        id = http.path_params["id"]
        service.responses.delete(id, call_of(http).caller.tenant)
        return json_response({"id": id, "object": "response", "deleted": True})
