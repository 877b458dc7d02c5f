"""Files that clients upload and get back: /v1/files. Source: OpenAI's Files API.

Each file is its bytes and one JSON of facts beside it, in a directory of this server's, so that they outlive it where
the directory does. A tenant sees its own files only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from octavo.server.body import parts
from octavo.server.calls import call_of
from octavo.server.errors import ApiError, bad_request, json_response
from octavo.server.fields import Refused, RequestBody, about
from octavo.server.parse import checked, ignored_header
from octavo.server.queries import PageQuery
from octavo.server.routing import Routes

FILES = "/v1/files"

MAX_FILE = 200 * 2**20
"""Bytes of one file, as OpenAI has it for batches."""

MAX_FORM = MAX_FILE + 2**20
"""Bytes of the form that a file comes in."""

MAX_STORED = 4 * 2**30
"""Bytes of all files together: uploads and results. Beyond it an upload is refused."""

MAX_FILES = 100_000
"""All together; what is told of one takes half a kilobyte of memory."""

PURPOSES = ("batch",)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    tenant: str = ""

    def body(self) -> dict[str, Any]:
        facts = msgspec.structs.asdict(self)
        del facts["tenant"]
        return {"object": "file", **facts, "status": "processed"}


class UploadForm(RequestBody, kw_only=True):
    """POST /v1/files, as multipart/form-data."""

    REFUSED: ClassVar[dict[str, Refused]] = {"expires_after": Refused("delete the file")}

    file: Annotated[bytes, about("The content: a part with a file name. Of a batch, a request in each line.")]
    purpose: Annotated[Literal["batch"], about("What it is for.")]


class FileStore:
    """Files below one directory. Not for several servers at once."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._clock = clock
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.is_used: Callable[[str], bool] = lambda file_id: False  # by what has not ended: then it is not deleted
        self._files: dict[str, StoredFile] = {}
        for facts in sorted(directory.glob("file-*.json")):
            try:
                file = msgspec.json.decode(facts.read_bytes(), type=StoredFile)
            except msgspec.DecodeError:  # cut off while it was written: nobody was told of it
                continue
            if facts == self._facts(file.id) and self.path(file.id).exists():
                self._files[file.id] = file

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self._files.values())

    def path(self, id: str) -> Path:
        """Of the content."""
        return self.directory / id

    def new_id(self) -> str:
        return f"file-{os.urandom(12).hex()}"

    def add(self, id: str, filename: str, purpose: str, tenant: str) -> StoredFile:
        """Take over what was written to `path(id)`."""
        file = StoredFile(
            id=id, bytes=self.path(id).stat().st_size, created_at=int(self._clock()),
            filename=filename, purpose=purpose, tenant=tenant,
        )  # fmt: skip
        write_whole(self._facts(id), msgspec.json.encode(file))
        self._files[id] = file
        return file

    def get(self, id: str, tenant: str) -> StoredFile:
        """Raises ApiError 404, also for another tenant's."""
        file = self._files.get(id)
        if file is None or file.tenant != tenant:
            raise no_file(id)
        return file

    def list(self, tenant: str, purpose: str | None = None) -> list[StoredFile]:
        """Newest first."""
        mine = [f for f in self._files.values() if f.tenant == tenant and purpose in (None, f.purpose)]
        return sorted(mine, key=lambda f: (-f.created_at, f.id))

    def delete(self, id: str, tenant: str) -> None:
        """Raises ApiError 404, 409 where it is used."""
        self.get(id, tenant)
        if self.is_used(id):
            raise ApiError(
                409, f"{id} is the input of a batch that has not ended: cancel that first", param="file_id",
                code="file_in_use",
            )  # fmt: skip
        del self._files[id]
        for path in (self._facts(id), self.path(id)):
            path.unlink(missing_ok=True)

    def _facts(self, id: str) -> Path:
        return self.directory / f"{id}.json"


def no_file(id: str) -> ApiError:
    return ApiError(404, f"there is no file {id:.80}", param="file_id", code="not_found")


def write_whole(path: Path, content: bytes) -> None:
    """All of it or nothing, whenever the process ends."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def add_file_routes(routes: Routes, store: Callable[[], FileStore]) -> None:
    """`store`: made at the first use."""

    @routes.post(FILES)
    async def upload(http: Request) -> Response:
        """Keep a file for batches."""
        too_large = ApiError(413, f"the file is larger than {MAX_FILE} bytes", param="file")
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_FORM:
            raise too_large  # before it is sent
        body = parts(http, MAX_FORM, too_large.message, "file")
        if not http.headers.get("content-type", "").startswith("multipart/form-data"):
            raise bad_request("file is required: a part of a form, multipart/form-data", "file")
        try:
            form = await MultiPartParser(http.headers, body, max_files=1, max_fields=16).parse()
        except MultiPartException as e:
            raise bad_request(f"the body is not a form: {e.message}") from None
        try:
            purpose, file = form.get("purpose"), form.get("file")
            if purpose not in PURPOSES:
                raise bad_request(f"purpose must be one of {', '.join(PURPOSES)}, got {purpose!r:.80}", "purpose")
            if not isinstance(file, UploadFile):
                raise bad_request("file is required: a part of the form with a file name", "file")
            given = {name.partition("[")[0]: b"" if name == "file" else value for name, value in form.items()}
            _, ignored = checked(given, UploadForm, routes.strict)
            stored = await asyncio.to_thread(_take, store(), file, str(purpose), call_of(http).caller.tenant)
            return json_response(stored.body(), headers=ignored_header(ignored))
        finally:
            await form.close()

    @routes.get(FILES)
    async def list_files(http: Request) -> Response:
        """The files of the caller."""
        mine = store().list(call_of(http).caller.tenant, http.state.query.purpose)
        return json_response(page(http, [file.body() for file in mine]))

    @routes.get(FILES + "/{id}")
    async def retrieve(http: Request) -> Response:
        """What is known of a file."""
        return json_response(store().get(http.path_params["id"], call_of(http).caller.tenant).body())

    @routes.get(FILES + "/{id}/content")
    async def content(http: Request) -> Response:
        """The bytes of a file."""
        file = store().get(http.path_params["id"], call_of(http).caller.tenant)
        return FileResponse(store().path(file.id), media_type="application/octet-stream")

    @routes.delete(FILES + "/{id}")
    async def delete(http: Request) -> Response:
        """Forget a file."""
        id = http.path_params["id"]
        store().delete(id, call_of(http).caller.tenant)
        return json_response({"id": id, "object": "file", "deleted": True})


def page(http: Request, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A list, the newest first, as OpenAI pages it: by `order`, `limit` and `after`."""
    query: PageQuery = http.state.query
    if query.order == "asc":
        entries = entries[::-1]
    if query.after is not None:
        places = [i for i, entry in enumerate(entries) if entry["id"] == query.after]
        if not places:
            raise bad_request(f"after names {query.after:.80}, which is not in the list", "after")
        entries = entries[places[0] + 1 :]
    shown = entries[: query.limit or 100]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": len(shown) < len(entries)}


def _take(store: FileStore, file: UploadFile, purpose: str, tenant: str) -> StoredFile:
    size = file.size or 0
    if size > MAX_FILE:
        raise ApiError(413, f"the file has {size} bytes; {MAX_FILE} are allowed", param="file")
    if len(store) >= MAX_FILES:
        raise ApiError(413, f"there are {MAX_FILES} files here: delete some", param="file")
    if store.num_bytes + size > MAX_STORED:
        raise ApiError(413, f"the files here take {store.num_bytes} bytes of {MAX_STORED}: delete some", param="file")
    id = store.new_id()
    try:
        with open(store.path(id), "wb") as copy:
            shutil.copyfileobj(file.file, copy)
        return store.add(id, (file.filename or "file")[:255], purpose, tenant)
    except OSError as e:
        store.path(id).unlink(missing_ok=True)
        raise ApiError(507, f"the file cannot be kept here: {e.strerror}", param="file", code="storage_full") from None
