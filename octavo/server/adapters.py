"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs (vLLM's routes)."""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.client import EngineDead, NamedAdapter
from octavo.server.body import read_body
from octavo.server.calls import call_of
from octavo.server.debug import check_admin
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.fields import Refused, RequestBody, about
from octavo.server.parse import ignored_header, parse
from octavo.server.routing import Routes
from octavo.server.service import Service
from octavo.weights.adapter_config import AdapterError

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(RequestBody, kw_only=True):
    """POST /v1/load_lora_adapter."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "is_3d_lora_weight": Refused("adapters of experts are not served", (False,)),
    }

    lora_name: Annotated[_Name, about("Requests choose the adapter by this name, as their model.")]
    lora_path: Annotated[str, about("Directory of the adapter on the server's machine, in PEFT's layout.")]
    load_inplace: Annotated[
        bool | None, about("Replace an adapter of this name: requests that run keep the one they began with.")
    ] = None


class UnloadAdapterRequest(RequestBody, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    REFUSED: ClassVar[dict[str, Refused]] = {"lora_int_id": Refused("adapters are known by their names")}

    lora_name: Annotated[_Name, about("The name in /v1/models.")]


def add_adapter_routes(routes: Routes, service: Service) -> None:
    turn = asyncio.Lock()  # names and slots change one at a time

    @routes.post(LOAD)
    async def load(http: Request) -> Response:
        """Load a LoRA adapter, beside what is being served. A wrong one is a 400 that names the tensor or key."""
        check_admin(service, http)
        request, ignored = parse(await read_body(http), LoadAdapterRequest, service.config.strict)
        async with turn:
            await _load(service, request)
        call_of(http).answer_id = request.lora_name
        return json_response(service.card(request.lora_name), headers=ignored_header(ignored))

    @routes.post(UNLOAD)
    async def unload(http: Request) -> Response:
        """Forget a LoRA adapter: no new request finds it, and its memory is free when the last that uses it has ended."""
        check_admin(service, http)
        request, ignored = parse(await read_body(http), UnloadAdapterRequest, service.config.strict)
        async with turn:
            adapter = service.client.adapters.get(request.lora_name)
            if adapter is None:
                raise ApiError(
                    404, f"there is no adapter {request.lora_name!r} here", param="lora_name", code="model_not_found"
                )
            await _forget(service, request.lora_name, adapter)
        body = {"id": request.lora_name, "object": "model", "deleted": True}
        return json_response(body, headers=ignored_header(ignored))


async def _load(service: Service, request: LoadAdapterRequest) -> None:
    name, client = request.lora_name, service.client
    if name == service.model:
        raise bad_request(f"{name!r} is the name of the model itself", "lora_name")
    old = client.adapters.get(name)
    if old is not None and not request.load_inplace:
        raise bad_request(f"an adapter {name!r} is loaded; load_inplace replaces it", "lora_name")
    try:
        digest = await client.load_adapter(request.lora_path)
    except AdapterError as e:
        raise bad_request(str(e), "lora_path", "invalid_adapter") from None
    except EngineDead as e:
        raise ApiError(503, str(e), code="engine_dead") from None
    client.adapters[name] = NamedAdapter(digest, request.lora_path)
    if old is not None and old.digest != digest:
        await _release(service, old)


async def _forget(service: Service, name: str, adapter: NamedAdapter) -> None:
    del service.client.adapters[name]
    await _release(service, adapter)


async def _release(service: Service, adapter: NamedAdapter) -> None:
    """Unless it has another name, too."""
    if any(other.digest == adapter.digest for other in service.client.adapters.values()):
        return
    try:
        await service.client.unload_adapter(adapter.digest)
    except EngineDead as e:
        raise ApiError(503, str(e), code="engine_dead") from None
