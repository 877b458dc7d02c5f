"""Routes: what is served under which path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.parse import checked, ignored_header
from octavo.server.queries import QUERIES, Query

Endpoint = Callable[[Request], Awaitable[Response]]
"""Its docstring says what the route does (`openapi`). Parts of the path are in `path_params` of the request."""

Add = Callable[[Endpoint], Endpoint]


class Routes:
    """Decorators that fill `all`: of two that match a request the first is taken. Who may GET may ask for the HEAD."""

    def __init__(self, strict: bool = False) -> None:
        """strict: unknown fields are refused."""
        self.strict = strict
        self.all: list[Route] = []

    def get(self, path: str) -> Add:
        """What is asked for behind the path is `state.query` of the request: see `queries`."""
        add, schema = self._add(path, "GET"), QUERIES.get(path, Query)

        def add_checked(endpoint: Endpoint) -> Endpoint:
            @wraps(endpoint)
            async def asked(http: Request) -> Response:
                given = {name.removesuffix("[]"): value for name, value in http.query_params.items()}
                http.state.query, ignored = checked(given, schema, self.strict, as_texts=True)
                response = await endpoint(http)
                if ignored:
                    response.headers.update(ignored_header(ignored))
                return response

            return add(asked)

        return add_checked

    def post(self, path: str) -> Add:
        return self._add(path, "POST")

    def delete(self, path: str) -> Add:
        return self._add(path, "DELETE")

    def _add(self, path: str, method: str) -> Add:
        def add(endpoint: Endpoint) -> Endpoint:
            self.all.append(Route(path, endpoint, methods=[method]))
            return endpoint

        return add
