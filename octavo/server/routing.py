"""Routes: what is served under which path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]
"""Its docstring says what the route does (`openapi`). Parts of the path are in `path_params` of the request."""

Add = Callable[[Endpoint], Endpoint]


class Routes:
    """Decorators that fill `all`: of two that match a request the first is taken. Who may GET may ask for the HEAD."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def get(self, path: str) -> Add:
        return self._add(path, "GET")

    def post(self, path: str) -> Add:
        return self._add(path, "POST")

    def delete(self, path: str) -> Add:
        return self._add(path, "DELETE")

    def _add(self, path: str, method: str) -> Add:
        def add(endpoint: Endpoint) -> Endpoint:
            self.all.append(Route(path, endpoint, methods=[method]))
            return endpoint

        return add
