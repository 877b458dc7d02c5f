"""The bytes of a request body, within a limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request

from octavo.server.errors import ApiError

MAX_BODY = 32 * 2**20
"""Bytes of a request body: a prompt of a million tokens as JSON numbers takes 7 MB."""

MAX_DISCARDED = 2**28
"""Bytes read of a body that is too large: its client does not look for the refusal before it has sent all."""


async def read_body(http: Request) -> bytes:
    """Raises ApiError 413 naming the limit, 415 for a body that is compressed."""
    return b"".join([part async for part in parts(http, MAX_BODY, f"the body is larger than {MAX_BODY} bytes")])


async def parts(http: Request, most: int, refusal: str, param: str | None = None) -> AsyncGenerator[bytes, None]:
    """The body as it comes, `most` bytes of it. Raises ApiError 413 with the message `refusal` where it has more, 415 for
    one that is compressed."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"content-encoding {encoding!r:.40} is not supported: send the body as it is")
    size = 0
    async for part in http.stream():
        size += len(part)
        if size <= most:
            yield part
        elif size > most + MAX_DISCARDED:
            break
    if size > most:
        raise ApiError(413, refusal, param=param)
