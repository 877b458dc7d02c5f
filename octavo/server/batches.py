"""Batches: the requests of a file, answered into a file, beside live traffic and behind it. Source: OpenAI's Batch API.

Each result is written when it is there: a server that starts again on the same directory goes on where it ended.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.access import Caller
from octavo.server.batch_file import Line, LineError, RunOne, read_lines, run_lines, written_ids
from octavo.server.body import read_body
from octavo.server.calls import Call, call_of
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.fields import Refused, RequestBody, about
from octavo.server.files import FileStore, no_file, page, write_whole
from octavo.server.parse import ignored_header, parse
from octavo.server.routing import Routes

BATCHES = "/v1/batches"


class BatchRequest(RequestBody, kw_only=True):
    """POST /v1/batches."""

    REFUSED: ClassVar[dict[str, Refused]] = {
        "output_expires_after": Refused("delete the file"),
        "priority": Refused("a batch waits behind all other requests"),
    }

    input_file_id: Annotated[str, about("A file of requests: custom_id, method, url, body in each line.")]
    endpoint: Annotated[str, about("The url of all of them: /v1/completions, /v1/chat/completions or /v1/embeddings.")]
    completion_window: Annotated[Literal["24h"], about("It is begun at once.")]
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None,
        about("Labels, told with the batch."),
    ] = None


MAX_BATCHES = 1000
"""That are remembered, and that may wait at a time."""


class Batch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, and whose it is."""

    id: str
    endpoint: str
    input_file_id: str
    status: str = "in_progress"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    metadata: dict[str, str] | None = None
    tenant: str = ""
    salt: str = ""

    def body(self) -> dict[str, Any]:
        facts = msgspec.structs.asdict(self)
        for name in ("tenant", "salt", "total", "completed", "failed"):
            del facts[name]
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {"object": "batch", "completion_window": "24h", **facts, "request_counts": counts}

    @property
    def is_open(self) -> bool:
        return self.status in ("in_progress", "cancelling")

    def fail(self, errors: Iterable[LineError]) -> None:
        self.status, self.failed_at = "failed", int(time.time())
        told = [{"code": "invalid_request", "line": e.line, "message": str(e), "param": e.param} for e in errors]
        self.errors = {"object": "list", "data": told}


class Batches:
    """All batches of a server, run one after another."""

    def __init__(self, store: FileStore, urls: Iterable[str], run_one: RunOne, width: int) -> None:
        """urls: what can be run. width: requests at once."""
        self._store = store
        self._urls = tuple(urls)
        self._run_one = run_one
        self._width = width
        self._batches: dict[str, Batch] = {}
        self._worker: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        known = []
        for path in store.directory.glob("batch_*.json"):
            with suppress(msgspec.DecodeError):
                known.append(msgspec.json.decode(path.read_bytes(), type=Batch))
        for batch in sorted(known, key=lambda batch: (batch.created_at, batch.id)):
            self._batches[batch.id] = batch  # oldest first
        store.is_used = self._uses

    async def create(self, request: BatchRequest, caller: Caller) -> Batch:
        """Raises ApiError naming the field. A file with faults makes a batch that has failed, as OpenAI's does."""
        if request.endpoint not in self._urls:
            raise bad_request(
                f"endpoint must be one of {', '.join(self._urls)}, got {request.endpoint!r:.80}", "endpoint"
            )
        if sum(batch.is_open for batch in self._batches.values()) >= MAX_BATCHES:
            raise ApiError(429, f"{MAX_BATCHES} batches wait already", code="too_many_batches", retry_after=60)
        file = self._store.get(request.input_file_id, caller.tenant)
        now = int(time.time())
        batch = Batch(
            id=f"batch_{os.urandom(12).hex()}", endpoint=request.endpoint, input_file_id=file.id, created_at=now,
            expires_at=now + 86400, metadata=request.metadata, tenant=caller.tenant, salt=caller.salt,
        )  # fmt: skip
        try:
            lines, errors = await self._read(batch)
        except OSError:  # deleted meanwhile
            raise no_file(file.id) from None
        batch.total = len(lines)
        if errors:
            batch.fail(errors)
        try:
            self._save(batch)
        except OSError as e:
            raise ApiError(507, f"the batch cannot be kept here: {e.strerror}", code="storage_full") from None
        self._batches[batch.id] = batch
        self._forget_oldest()
        self.start()
        return batch

    def get(self, id: str, tenant: str) -> Batch:
        batch = self._batches.get(id)
        if batch is None or batch.tenant != tenant:
            raise ApiError(404, f"there is no batch {id:.80}", param="batch_id", code="not_found")
        return batch

    def list(self, tenant: str) -> list[Batch]:
        """Newest first."""
        mine = [batch for batch in self._batches.values() if batch.tenant == tenant]
        return sorted(mine, key=lambda batch: (-batch.created_at, batch.id))

    def cancel(self, id: str, tenant: str) -> Batch:
        """What is done stays in the output file; what runs is aborted."""
        batch = self.get(id, tenant)
        if not batch.is_open:
            raise bad_request(f"the batch is {batch.status}: there is nothing to cancel", "batch_id")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            with suppress(OSError):  # it is cancelled all the same
                self._save(batch)
            if self._work is not None and self._work.get_name() == id:
                self._work.cancel()
        return batch

    def start(self) -> None:
        """Go on with what is open. Needs a running event loop."""
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run_all())

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _run_all(self) -> None:
        while batch := next((b for b in self._batches.values() if b.is_open), None):
            try:
                if batch.status == "in_progress":
                    await self._work_on(batch, batch.expires_at - time.time())
                self._finish(batch)
            except Exception as e:  # a full disk, an input file that is gone: the other batches go on
                why = e.strerror if isinstance(e, OSError) else type(e).__name__
                batch.fail([LineError(0, f"the batch cannot be run: {why}")])
                with suppress(OSError):
                    self._save(batch)

    async def _work_on(self, batch: Batch, seconds: float) -> None:
        """Until its requests are answered, or a client cancels it, or its time is over."""
        self._work = asyncio.create_task(self._run(batch), name=batch.id)
        try:
            done, _ = await asyncio.wait((self._work,), timeout=max(0.0, seconds))
        except asyncio.CancelledError:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            raise
        if not done:
            batch.status, batch.expired_at = "expired", int(time.time())
            self._work.cancel()
            await asyncio.wait((self._work,))
        if not self._work.cancelled():
            self._work.result()

    async def _run(self, batch: Batch) -> None:
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        lines, _ = await self._read(batch)
        done = [await asyncio.to_thread(written_ids, path) for path in self._parts(batch)]
        batch.completed, batch.failed = len(done[0]), len(done[1])
        lines = [line for line in lines if line.custom_id not in done[0] | done[1]]
        good, bad = self._parts(batch)
        with open(good, "ab") as output, open(bad, "ab") as errors:
            async for entry in run_lines(lines, self._run_one, self._width, lambda: _call(batch)):
                is_good = entry["response"]["status_code"] == 200
                file = output if is_good else errors
                file.write(msgspec.json.encode(entry) + b"\n")
                file.flush()
                batch.completed += is_good
                batch.failed += not is_good

    async def _read(self, batch: Batch) -> tuple[Sequence[Line], Sequence[LineError]]:
        """Beside the event loop: a file may have 200 MB."""
        return await asyncio.to_thread(
            read_lines, self._store.path(batch.input_file_id), self._urls, only=batch.endpoint
        )

    def _finish(self, batch: Batch) -> None:
        now = int(time.time())
        for path, name, field in zip(
            self._parts(batch), ("output", "error"), ("output_file_id", "error_file_id"), strict=True
        ):
            if path.exists() and path.stat().st_size:
                id = self._store.new_id()
                path.replace(self._store.path(id))
                setattr(batch, field, self._store.add(id, f"{batch.id}_{name}.jsonl", "batch_output", batch.tenant).id)
            else:
                path.unlink(missing_ok=True)
        batch.finalizing_at = now
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.status != "expired":
            batch.status, batch.completed_at = "completed", now
        self._save(batch)

    def _uses(self, file_id: str) -> bool:
        return any(batch.is_open and batch.input_file_id == file_id for batch in self._batches.values())

    def _forget_oldest(self) -> None:
        """Of those that have ended. Their files stay."""
        ended = [batch.id for batch in self._batches.values() if not batch.is_open]
        for id in ended[: max(0, len(self._batches) - MAX_BATCHES)]:
            del self._batches[id]
            (self._store.directory / f"{id}.json").unlink(missing_ok=True)

    def _parts(self, batch: Batch) -> tuple[Path, Path]:
        return self._store.directory / f"{batch.id}.good", self._store.directory / f"{batch.id}.bad"

    def _save(self, batch: Batch) -> None:
        write_whole(self._store.directory / f"{batch.id}.json", msgspec.json.encode(batch))


def add_batch_routes(routes: Routes, batches: Callable[[], Batches]) -> None:
    @routes.post(BATCHES)
    async def create(http: Request) -> Response:
        """Answer the requests of a file, behind all others, into a file."""
        request, ignored = parse(await read_body(http), BatchRequest, routes.strict)
        batch = await batches().create(request, call_of(http).caller)
        return json_response(batch.body(), headers=ignored_header(ignored))

    @routes.get(BATCHES)
    async def list_batches(http: Request) -> Response:
        """The batches of the caller."""
        return json_response(page(http, [b.body() for b in batches().list(call_of(http).caller.tenant)]))

    @routes.get(BATCHES + "/{id}")
    async def retrieve(http: Request) -> Response:
        """How far a batch is, and the files of its answers."""
        return json_response(batches().get(http.path_params["id"], call_of(http).caller.tenant).body())

    @routes.post(BATCHES + "/{id}/cancel")
    async def cancel(http: Request) -> Response:
        """End a batch: what is answered by then stays in its file."""
        return json_response(batches().cancel(http.path_params["id"], call_of(http).caller.tenant).body())


def _call(batch: Batch) -> Call:
    return Call(os.urandom(12).hex(), Caller.of(batch.tenant, batch.salt), batch.endpoint)
