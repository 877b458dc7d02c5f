"""What a load generator makes of an answer, however the server cuts it into chunks and lines into pieces."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.bench.http import Sent, Target

CHUNKS = [{"choices": [{"text": "a", "token_ids": [1, 2]}]}, {"choices": [{"text": "ä"}]}, {"choices": [{"text": ""}]}]
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def stream(end: str) -> bytes:
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in CHUNKS]
    events += [f": a comment{end}data:{json.dumps(USAGE, indent=1).replace(chr(10), f'{end}data:')}", "data: [DONE]"]
    return "".join(event + 2 * end for event in events).encode()


def answered(head: str, body: bytes, piece: int, chunked: bool) -> tuple[str, Sent]:
    """What the client sees of a server that sends its answer by `piece` bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        models = request.startswith(b"GET")
        coding = "transfer-encoding: chunked\r\n" if chunked else ""
        writer.write(f"HTTP/1.1 {'200 OK' if models else head}\r\n{coding}\r\n".encode())
        content = json.dumps({"data": [{"id": "tiny"}]}).encode() if models else body
        for i in range(0, len(content), piece):
            part = content[i : i + piece]
            writer.write(b"%x;name=value\r\n%s\r\n" % (len(part), part) if chunked else part)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        writer.close()

    async def main() -> tuple[str, Sent]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            return await target.model(), await target.complete([1, 2], 3)

    return asyncio.run(main())


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_in_pieces(chunked: bool, end: str) -> None:
    for piece in (1, 2, 3, 7, 50, 10**6):
        model, sent = answered("200 OK", stream(end), piece, chunked)
        assert (model, sent.status, sent.num_tokens, sent.error) == ("tiny", 200, 3, "")


@pytest.mark.parametrize("chunked", [True, False])
def test_an_error_is_told_whole(chunked: bool) -> None:
    _, sent = answered("429 Too Many", b'{"error":\n "busy"}', 4, chunked)
    assert (sent.status, sent.num_tokens, sent.error) == (429, 0, '{"error":\n "busy"}')
