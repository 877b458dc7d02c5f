"""Files and batches: by OpenAI's client against a real server, and the offline command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from octavo.server.access import Caller
from octavo.server.batch_file import Line, in_order_of_prefixes, read_lines
from octavo.server.batches import Batches, BatchRequest
from octavo.server.body import parts
from octavo.server.calls import Call
from octavo.server.errors import ApiError
from octavo.server.files import FileStore
from octavo.server.queries import QUERIES
from tests.endless import CONTEXT, NUM_TOKENS
from tests.serving import ROOT, Server
from tests.waiting import until, until_async

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def request_line(id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body})


def input_of(file: str) -> BatchRequest:
    return BatchRequest(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")


def requests(count: int) -> str:
    """Some are refused."""
    lines = [request_line(f"r{i}", prompt=[5, 6, i], max_tokens=3, seed=i) for i in range(count - 1)]
    return "\n".join([*lines, request_line("bad", prompt="x", temperature=-1)])


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text("\n".join(f'[[key]]\nname = "{name}"\nkey = "{name}"' for name in ("alice", "bob")))
    options = ("--max-num-seqs", "4", "--max-model-len", str(CONTEXT), "--api-key-file", str(keys))
    with Server(data / "arch" / "llama", *options) as running:
        running.http.headers["authorization"] = "Bearer alice"
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice", max_retries=0) as made:
        yield made


def upload(client: openai.OpenAI, text: str) -> str:
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def finished(client: openai.OpenAI, id: str) -> Any:
    at_work = ("in_progress", "cancelling", "validating", "finalizing")
    until(lambda: client.batches.retrieve(id).status not in at_work, every=0.05)
    return client.batches.retrieve(id)


def completed(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    assert counts is not None
    return counts.completed


def run(client: openai.OpenAI, text: str, endpoint: Any = COMPLETIONS) -> Any:
    created = client.batches.create(input_file_id=upload(client, text), endpoint=endpoint, completion_window="24h")
    assert created.object == "batch"
    return finished(client, created.id)


def entries(client: openai.OpenAI, id: str | None) -> dict[str, dict[str, Any]]:
    assert id is not None
    lines = client.files.content(id).text.splitlines()
    return {entry["custom_id"]: entry for entry in map(json.loads, lines)}


def test_files(client: openai.OpenAI) -> None:
    id = upload(client, "content")
    facts = client.files.retrieve(id)
    assert (facts.filename, facts.bytes, facts.purpose) == ("in.jsonl", 7, "batch")
    assert client.files.content(id).text == "content"
    assert id in [file.id for file in client.files.list(purpose="batch")]
    assert client.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(id)


def test_a_batch_equals_the_requests_alone(server: Server, client: openai.OpenAI) -> None:
    batch = run(client, requests(12))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 11, 1)
    good = entries(client, batch.output_file_id)
    assert set(good) == {f"r{i}" for i in range(11)}
    for i in range(11):
        alone = server.complete(prompt=[5, 6, i], max_tokens=3, seed=i)
        body = good[f"r{i}"]["response"]["body"]
        assert body["choices"] == alone["choices"]
    (bad,) = entries(client, batch.error_file_id).values()
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [b.id for b in client.batches.list()]


def test_chat_lines(client: openai.OpenAI) -> None:
    text = request_line("a", CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
    batch = run(client, text, CHAT)
    (entry,) = entries(client, batch.output_file_id).values()
    assert entry["response"]["body"]["object"] == "chat.completion"


BAD_FILES = [
    ("", "the file has no request"),
    ("nonsense", "not valid JSON"),
    (request_line("", prompt="x"), "custom_id must be"),
    ("\n".join([request_line("a", prompt="x")] * 2), "is there twice"),
    (request_line("a", url="/v1/nowhere", prompt="x"), "url must be"),
    (request_line("a", prompt="x", stream=True), "stream must not"),
    (json.dumps({"custom_id": "a", "url": COMPLETIONS, "body": 3}), "body must be an object"),
    (json.dumps({"custom_id": "a", "method": "GET", "url": COMPLETIONS, "body": {}}), "method must be POST"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_faulty_files_fail_with_their_lines(client: openai.OpenAI, text: str, message: str) -> None:
    batch = run(client, text)
    assert batch.status == "failed"
    assert message in batch.errors.data[0].message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/nowhere"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": [1]}, "endpoint"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"priority": 1}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_bad_batches_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    refused = server.post("/v1/batches", body)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == param


def test_every_field_of_a_batch(server: Server, client: openai.OpenAI) -> None:
    """What it says is told with the batch, and decides what is done."""
    body = {"input_file_id": upload(client, requests(3)), "endpoint": COMPLETIONS, "completion_window": "24h"}
    body["metadata"] = {"a": "b"}  # type: ignore[assignment]
    assert set(body) == {*BatchRequest.__struct_fields__}
    answer = server.post("/v1/batches", body | {"wing": 1})
    assert answer.headers["x-octavo-ignored"] == "wing"
    assert {name: answer.json()[name] for name in body} == body
    assert finished(client, answer.json()["id"]).request_counts.total == 3
    other = server.post("/v1/batches", body | {"endpoint": CHAT}).json()
    assert "url must be" in finished(client, other["id"]).errors.data[0].message


def test_lists_are_shown_in_parts(server: Server, client: openai.OpenAI) -> None:
    """By every parameter that the documents name; others are named in a header."""
    ids = [upload(client, str(i)) for i in range(3)]
    run(client, requests(2))  # has an output
    listed = "/v1/files?purpose=batch"

    def shown(path: str) -> list[str]:
        answer = server.http.get(path)
        assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, answer.text
        return [entry["id"] for entry in answer.json()["data"]]

    newest, outputs = shown(listed), shown("/v1/files?purpose=batch_output")
    assert {*ids} < {*newest} and outputs and not {*outputs} & {*newest}
    assert sorted(shown("/v1/files")) == sorted(newest + outputs)
    assert shown(f"{listed}&order=asc") == newest[::-1] and shown(f"{listed}&order=desc") == newest
    assert shown(f"{listed}&limit=2") == newest[:2] and shown(f"{listed}&after={newest[1]}") == newest[2:]
    assert shown(f"{listed}&after={newest[0]}&limit=1") == newest[1:2]
    for path, schema in QUERIES.items():
        for name in schema.__struct_fields__ if "{" not in path else ():
            for wrong in ("", "\u0000", "-1", "1e9", "[]"):
                refused = server.http.get(path, params={name: wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), (path, name, wrong)
        answer = server.http.get(path, params={"wing": "1"})
        assert "{" in path or answer.headers["x-octavo-ignored"] == "wing"


def test_bad_uploads_are_refused_by_name(server: Server) -> None:
    def send(**form: Any) -> httpx.Response:
        return server.http.post("/v1/files", **form)

    for purpose in (None, "fine-tune"):
        refused = send(files={"file": ("x", b"y")}, data={"purpose": purpose} if purpose else {})
        assert refused.json()["error"]["param"] == "purpose"
    form = {"data": {"purpose": "batch", "expires_after[anchor]": "created_at"}, "files": {"file": ("x", b"y")}}
    assert send(**form).json()["error"]["param"] == "expires_after"
    answer = send(data={"purpose": "batch", "wing": "1"}, files={"file": ("x", b"y")})
    assert answer.status_code == 200 and answer.headers["x-octavo-ignored"] == "wing"
    assert send(data={"purpose": "batch"}, files={}).json()["error"]["param"] == "file"
    assert send(json={"purpose": "batch"}).status_code == 400
    assert send(content=b"nonsense", headers={"content-type": "multipart/form-data; boundary=x"}).status_code == 400


def test_a_form_without_a_length_has_the_limit_of_others() -> None:
    async def read(most: int) -> bytes:
        sent = [{"type": "http.request", "body": b"x" * 10, "more_body": i < 2} for i in range(3)]

        async def receive() -> dict[str, Any]:
            return sent.pop(0)

        http = Request({"type": "http", "headers": []}, receive)
        return b"".join([part async for part in parts(http, most, "too large", "file")])

    assert asyncio.run(read(30)) == b"x" * 30
    with pytest.raises(ApiError, match="too large") as refused:
        asyncio.run(read(29))
    assert (refused.value.status, refused.value.param) == (413, "file")


def test_tenants_do_not_see_each_other(server: Server, client: openai.OpenAI) -> None:
    id = upload(client, requests(2))
    mine = client.batches.create(input_file_id=id, endpoint=COMPLETIONS, completion_window="24h").id
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="bob", max_retries=0) as other:
        assert list(other.files.list()) == list(other.batches.list()) == []
        for attempt in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(id)
        for attempt in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                attempt(mine)
    assert finished(client, mine).status == "completed"


def test_cancel(server: Server, client: openai.OpenAI) -> None:
    """Three requests end, and then as many as may run at once do not before they are ended."""
    length = [5] * 3 + [NUM_TOKENS] * 20
    lines = [request_line(f"r{i}", prompt=[i + 100], max_tokens=n, ignore_eos=True) for i, n in enumerate(length)]
    id = upload(client, "\n".join(lines))
    batch = client.batches.create(input_file_id=id, endpoint=COMPLETIONS, completion_window="24h")
    until(lambda: completed(client, batch.id) == 3)
    client.batches.cancel(batch.id)
    ended = finished(client, batch.id)
    assert ended.status == "cancelled"
    assert set(entries(client, ended.output_file_id)) == {"r0", "r1", "r2"} and ended.request_counts.completed == 3
    server.wait_idle()
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.batches.cancel(batch.id)


def test_a_batch_that_lost_its_file_does_not_hold_up_others(tmp_path: Path) -> None:
    """It cannot be deleted by a client; whoever has the disk can."""

    async def run_one(url: str, body: bytes, call: Call) -> dict[str, Any]:
        return {}

    async def scenario() -> None:
        store = FileStore(tmp_path)
        batches, made = Batches(store, [COMPLETIONS], run_one, 2), []
        for _ in range(2):
            file = store.new_id()
            store.path(file).write_text(request_line("a", prompt="x"))
            store.add(file, "in", "batch", "")
            made.append(await batches.create(input_of(file), Caller()))
            await batches.close()
        lost, last = made
        store.path(lost.input_file_id).unlink()
        lost.status = last.status = "in_progress"
        batches.start()
        await until_async(lambda: not (lost.is_open or last.is_open))
        assert lost.status == "failed" and lost.errors is not None
        assert lost.errors["data"][0]["message"] == "the batch cannot be run: No such file or directory"
        assert last.status == "completed"
        await batches.close()

    asyncio.run(scenario())


def test_lists_are_paged(server: Server, client: openai.OpenAI) -> None:
    ids = {upload(client, str(i)) for i in range(3)}
    newest = [file["id"] for file in server.http.get("/v1/files").json()["data"]]
    oldest = [file["id"] for file in server.http.get("/v1/files?order=asc").json()["data"]]
    assert newest == oldest[::-1] and ids <= set(newest)
    shown = server.http.get(f"/v1/files?limit=1&after={newest[0]}").json()
    assert [file["id"] for file in shown["data"]] == [newest[1]] and shown["has_more"]
    for query in ("limit=0", "limit=²", "limit=" + "9" * 5000, "order=up", "after=none"):
        answer = server.http.get("/v1/files", params=dict([query.split("=")]))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_a_restart_goes_on(data: Path, tmp_path: Path) -> None:
    options = ("--max-num-seqs", "2", "--files-dir", str(tmp_path / "files"))
    lines = [request_line(f"r{i}", prompt=[7, i], max_tokens=60, ignore_eos=True, seed=1) for i in range(60)]
    with Server(data / "arch" / "llama", *options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            id = upload(client, "\n".join(lines))
            batch = client.batches.create(input_file_id=id, endpoint=COMPLETIONS, completion_window="24h").id
            until(lambda: completed(client, batch) >= 5)
            before = completed(client, batch)
        assert server.end()[0] == 0
    with Server(data / "arch" / "llama", *options) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            ended = finished(client, batch)
            assert ended.status == "completed"
            assert len(entries(client, ended.output_file_id)) == 60
        assert server.metric("octavo_prompts_total") <= 60 - before


def test_a_batch_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """What is answered by then is kept, and so is its input file until then."""

    async def run_one(url: str, body: bytes, call: Call) -> dict[str, Any]:
        if json.loads(body)["prompt"] != "now":
            await asyncio.Event().wait()
        return {}

    def start(store: FileStore) -> Batches:
        return Batches(store, [COMPLETIONS], run_one, 2)

    async def scenario() -> None:
        store = FileStore(tmp_path)
        file = store.new_id()
        store.path(file).write_text("\n".join([request_line("a", prompt="now"), request_line("b", prompt="never")]))
        store.add(file, "in", "batch", "")
        batches = start(store)
        batch = await batches.create(input_of(file), Caller())
        await until_async(lambda: batch.completed == 1)
        with pytest.raises(ApiError, match="is the input of a batch"):
            store.delete(file, "")
        await batches.close()
        facts = tmp_path / f"{batch.id}.json"
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "expires_at": 1}))
        batches = start(FileStore(tmp_path))
        batches.start()
        ended = batches.get(batch.id, "")
        await until_async(lambda: not ended.is_open and ended.finalizing_at)
        assert ended.status == "expired" and ended.expired_at and not ended.completed_at
        assert ended.output_file_id is not None
        store = FileStore(tmp_path)
        assert json.loads(store.path(ended.output_file_id).read_text())["custom_id"] == "a"
        await batches.close()
        again = start(store)
        assert again.get(batch.id, "").status == "expired"
        store.delete(file, "")

    asyncio.run(scenario())


def test_the_last_batches_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.batches.MAX_BATCHES", 2)

    async def run_one(url: str, body: bytes, call: Call) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def scenario() -> None:
        store = FileStore(tmp_path)
        files = [store.new_id(), store.new_id()]
        for file, text in zip(files, ("nonsense", request_line("a", prompt="x")), strict=True):
            store.path(file).write_text(text)
            store.add(file, "in", "batch", "")
        batches = Batches(store, [COMPLETIONS], run_one, 2)

        async def create(file: str) -> str:
            return (await batches.create(input_of(file), Caller())).id

        made = [await create(file) for file in (files[0], files[0], files[1], files[1])]
        assert {batch.id for batch in batches.list("")} == set(made[2:])
        assert sorted(path.stem for path in tmp_path.glob("batch_*.json")) == sorted(made[2:])
        with pytest.raises(ApiError, match="2 batches wait") as caught:
            await create(files[1])
        assert caught.value.status == 429
        await batches.close()

    asyncio.run(scenario())


def test_a_store_reads_what_it_wrote(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    id = store.new_id()
    store.path(id).write_bytes(b"abc")
    file = store.add(id, "x", "batch", "t")
    (tmp_path / "s" / "file-cut.json").write_text("{")
    again = FileStore(tmp_path / "s")
    assert again.list("t") == [file]
    assert again.num_bytes == 3


def test_equal_prefixes_follow_one_another(tmp_path: Path) -> None:
    lines = [Line(str(i), COMPLETIONS, {"prompt": f"{'ab'[i % 2]} {i}"}) for i in range(10)]
    order = [line.body["prompt"][0] for line in in_order_of_prefixes(lines)]
    assert order == ["a"] * 5 + ["b"] * 5
    path = tmp_path / "in.jsonl"
    path.write_text(requests(5))
    read, errors = read_lines(path, [COMPLETIONS])
    assert (len(read), errors) == (5, [])


def test_the_offline_command(data: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(requests(6))
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "batch",
        str(source),
        str(data / "arch" / "llama"),
        "-o",
        str(target),
    ]

    def offline() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = offline()
    assert done.returncode == 0, done.stderr
    assert "5 of 6 answered, 1 refused" in done.stderr
    lines = target.read_text().splitlines()
    assert {json.loads(line)["custom_id"] for line in lines} == {"r0", "r1", "r2", "r3", "r4", "bad"}
    target.write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # cut off
    assert offline().returncode == 0
    assert sorted(json.loads(line)["custom_id"] for line in target.read_text().splitlines()) == sorted(
        {"r0", "r1", "r2", "r3", "r4", "bad"}
    )
    source.write_text("nonsense\n")
    refused = offline()
    assert refused.returncode == 2
    assert "in.jsonl line 1: the body is not valid JSON" in refused.stderr
