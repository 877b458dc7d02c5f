"""GET /docs: the API as a page, made in the browser from /openapi.json. It loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.routing import Routes

DOCS = "/docs"

_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}
"""The page could not load anything from elsewhere if it wanted to."""


def add_docs_route(routes: Routes) -> None:
    page = Path(__file__).with_name("docs.html").read_bytes()

    @routes.get("/")
    async def root(http: Request) -> Response:
        """To the page."""
        return Response(status_code=307, headers={"location": DOCS})

    @routes.get(DOCS)
    async def docs(http: Request) -> Response:
        """The API as a page for people, to read and to try."""
        return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")
