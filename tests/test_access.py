"""API keys, quotas, salts, request ids, the request log, CORS, TLS: against a real server, and the quotas by a clock."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.config import ConfigError, ServerConfig
from octavo.engine.messages import Stats
from octavo.server.access import Caller, Key, Keys, read_keys
from octavo.server.calls import Call, Calls, call_of
from octavo.server.errors import ApiError
from octavo.server.metrics import Metrics
from octavo.server.tracing import NoTracer
from tests.serving import Server
from tests.waiting import SECONDS, until

COMPLETIONS = "/v1/completions"
PROMPT = list(range(100, 164))

KEYS = f"""
[[key]]
name = "alice"
key = "alice-key"

[[key]]
name = "bob"
admin = true
sha256 = "{hashlib.sha256(b"bob-key").hexdigest()}"

[[key]]
name = "carol"
key = "carol-key"
tenant = "alice"
max_concurrent = 1
requests_per_minute = 2

[[key]]
name = "dave"
key = "dave-key"
tokens_per_minute = 450
"""


# ---- quotas, by a clock of the test's


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_per_minute() -> None:
    clock = Clock()
    caller = Caller(Key(name="k", key="k", requests_per_minute=2), clock)
    for _ in range(2):
        caller.enter()
    with pytest.raises(ApiError, match="requests_per_minute: 2 are used up") as refused:
        caller.enter()
    assert refused.value.status == 429
    assert refused.value.retry_after == 30
    clock.now = 29.0
    with pytest.raises(ApiError):
        caller.enter()
    clock.now = 30.0
    caller.enter()


def test_tokens_per_minute_are_charged_at_the_end() -> None:
    clock = Clock()
    caller = Caller(Key(name="k", key="k", tokens_per_minute=100), clock)
    caller.enter()
    caller.enter()
    caller.leave(150)
    with pytest.raises(ApiError, match="tokens_per_minute") as refused:
        caller.enter()
    assert refused.value.retry_after == 31  # 50 over, and one to take
    clock.now = 31.0
    caller.enter()


def test_max_concurrent() -> None:
    caller = Caller(Key(name="k", key="k", max_concurrent=1))
    caller.enter()
    with pytest.raises(ApiError, match="max_concurrent: 1 requests"):
        caller.enter()
    caller.leave(0)
    caller.enter()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "required field key"),
        ("key = []", "there is no \\[\\[key\\]\\]"),
        ("[[key]]\nname = 'a'", "must have either key or sha256"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nsha256 = 'y'", "must have either key or sha256"),
        ("[[key]]\nname = 'a'\nsha256 = 'y'", "sha256 must be 64 hexadecimal digits"),
        ("[[key]]\nname = 'a'\nkey = ''", "key must not be empty"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nmax_concurrent = 0", "max_concurrent must be at least 1"),
        ("[[key]]\nname = 'a'\nkey = 'x'\nrole = 'admin'", "role"),
        ("[[key]]\nname = 'a'\nkey = 'x'\n[[key]]\nname = 'b'\nkey = 'x'", "the same name or key"),
        ("[[key]]\nname = 3\nkey = 'x'", "name"),
        ("[[key", "api_key_file"),
    ],
)
def test_bad_key_files_are_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_keys(None, str(path))


# ---- calls


def test_a_call_lasts_as_long_as_its_work() -> None:
    """What goes on behind its answer, as a stream without a reader, is open and counts until it ends."""

    async def scenario() -> None:
        ended, answered = asyncio.Event(), asyncio.Event()
        open_calls: list[Call] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            call = call_of(Request(scope))
            call.lasts = ended
            open_calls.append(call)
            await Response()(scope, receive, send)
            answered.set()

        statuses: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        metrics = Metrics(Stats)
        keys = Keys([Key(name="k", key="k", max_concurrent=1, tokens_per_minute=10)])
        calls = Calls(app, keys, metrics, NoTracer(), frozenset({COMPLETIONS}), "off")

        async def ask() -> None:
            headers = [(b"authorization", b"Bearer k")]
            await calls({"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}, receive, send)

        first = asyncio.create_task(ask())
        await answered.wait()
        await ask()
        assert statuses == [200, 429] and metrics.num_open == 1
        open_calls[0].num_output_tokens = 20
        ended.set()
        await first
        assert metrics.num_open == 0
        await ask()  # the tokens are used up
        assert statuses == [200, 429, 429] and len(open_calls) == 1

    asyncio.run(scenario())


# ---- a server with keys


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    options = ("--api-key-file", str(keys), "--cors-origins", "https://a.example, https://b.example")
    with Server(data / "arch" / "llama", "--request-log", "text", *options) as running:
        running.http.headers["authorization"] = "Bearer alice-key"
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", COMPLETIONS), ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"), ("GET", "/version"), ("GET", "/health/ready"), ("GET", "/nowhere"), ("POST", "/cache/flush"),
    ("GET", "/debug/requests/x"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_liveness_needs_a_key(server: Server, method: str, path: str) -> None:
    for headers in (
        {},
        bearer("wrong"),
        {"authorization": "Bearer"},
        {"authorization": "Basic alice-key"},
        {"x-api-key": "wrong"},
    ):
        refused = httpx.request(method, server.url + path, headers=headers)
        assert refused.status_code == 401, headers
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(server.url + "/health").status_code == 200


def test_ways_to_send_a_key(server: Server) -> None:
    for headers in (bearer("alice-key"), {"authorization": "bearer bob-key"}, {"x-api-key": "bob-key"}):
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_salts_keep_tenants_apart(server: Server) -> None:
    def cached(key: str, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        answer = httpx.post(server.url + COMPLETIONS, json=body, headers=bearer(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("alice-key") == 0
    assert cached("alice-key") == 63
    assert cached("bob-key") == 0
    assert cached("carol-key") == 63  # of alice's tenant
    assert cached("alice-key", cache_salt="mine") == 0
    assert cached("alice-key", cache_salt="mine") == 63
    assert cached("bob-key", cache_salt="mine") == 0


def test_only_an_admin_key_touches_what_is_everybodys(server: Server) -> None:
    for method, path in (("POST", "/cache/flush"), ("GET", "/debug/requests/none")):
        refused = httpx.request(method, server.url + path, headers=bearer("alice-key"))
        assert refused.status_code == 403
        assert path in refused.json()["error"]["message"]
        assert httpx.request(method, server.url + path, headers=bearer("bob-key")).status_code in (200, 404)


def test_quotas_are_told(server: Server) -> None:
    def send() -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}, headers=bearer("carol-key"), timeout=SECONDS)

    while (last := send()).status_code == 200:  # faster than two a minute
        pass
    assert last.status_code == 429
    assert int(last.headers["retry-after"]) > 0
    assert last.json()["error"]["message"].startswith("quota reached: requests_per_minute: 2")
    assert httpx.get(server.url + "/v1/models", headers=bearer("carol-key")).status_code == 200  # no generation


def test_what_is_refused_takes_nothing_of_a_quota(server: Server) -> None:
    """Nor does it in the log: of a prompt that was never begun no token is counted."""
    too_long = {"prompt": PROMPT * 9, "max_tokens": 1}
    answers = [httpx.post(server.url + COMPLETIONS, json=too_long, headers=bearer("dave-key")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400] * 3
    fits = {"prompt": PROMPT * 7, "max_tokens": 1}
    answers = [httpx.post(server.url + COMPLETIONS, json=fits, headers=bearer("dave-key")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_request_ids(server: Server) -> None:
    for path in ("/version", "/nowhere", "/health"):
        assert server.http.get(path, headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    made = {server.http.get("/version").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for bad in ("with blank", "x" * 129):
        assert server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_cors_answers_named_origins_only(server: Server) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    good = httpx.options(server.url + COMPLETIONS, headers={"origin": "https://a.example", **preflight})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://a.example"
    bad = httpx.options(server.url + COMPLETIONS, headers={"origin": "https://c.example", **preflight})
    assert "access-control-allow-origin" not in bad.headers
    answer = server.http.get("/version", headers={"origin": "https://b.example"})
    assert answer.headers["access-control-allow-origin"] == "https://b.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_web_pages_of_others_may_not_use_a_server_without_keys(data: Path) -> None:
    """A browser sends such a request without asking, and only keeps its answer from the page."""
    with Server(data / "arch" / "llama", "--cors-origins", "https://a.example") as server:
        own = server.url
        for origin, status in ((own, 200), ("https://a.example", 200), ("chrome-extension://abc", 200),
                               ("https://c.example", 403), (f"https://c.example/{own}", 403), ("null", 403)):  # fmt: skip
            answer = server.http.post("/cache/flush", headers={"origin": origin, "content-type": "text/plain"})
            assert answer.status_code == status, origin
        assert server.http.get("/version", headers={"origin": "https://c.example"}).status_code == 200


@pytest.mark.parametrize("origins", ["a.example", "https://a.example/", "https://a.example,", ""])
def test_origins_that_match_nothing_are_told(origins: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins must be origins"):
        ServerConfig(model="any", cors_origins=origins)


def test_log_lines(data: Path) -> None:
    with Server(data / "arch" / "llama", "--request-log", "counts") as server:
        server.http.get("/health")  # quiet
        head = {"x-request-id": "one"}
        body = {"prompt": ["secret text", [5, 6]], "max_tokens": 3, "n": 2, "temperature": 0, "ignore_eos": True}
        answer = server.http.post(COMPLETIONS, json=body, headers=head).json()
        with server.http.stream("POST", COMPLETIONS, json={**body, "stream": True}, headers=head) as stream:
            stream.read()
        server.http.post(COMPLETIONS, json={"prompt": "x", "temperature": -1})
        code, errors = server.end()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    whole, streamed = (line for line in lines if line["request_id"] == "one")
    (refused,) = (line for line in lines if line["request_id"] != "one")
    assert "secret" not in errors
    for line in (whole, streamed):
        assert line["status"] == 200
        assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert line["output_tokens"] == 12
        assert line["finish_reasons"] == ["length"] * 4
        assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert whole["id"] == answer["id"]
    assert refused["status"] == 400
    assert "temperature" in refused["error"]


def logged(server: Server, id: str) -> list[dict[str, Any]]:
    """All lines, once one is about this answer: it is written behind it."""
    errors = Path(f"/proc/self/fd/{server.errors.fileno()}")  # opened anew: the server writes where its own one stands

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in errors.read_text().splitlines(keepends=True) if line.endswith("\n")]

    until(lambda: any(line.get("id") == id for line in lines()))
    return lines()


def test_log_with_texts(server: Server) -> None:
    answer = server.complete(prompt="a secret", max_tokens=2, temperature=0, ignore_eos=True)
    lines = logged(server, answer["id"])
    (line,) = (line for line in lines if line.get("id") == answer["id"])
    assert line["key"] == "alice"
    assert line["prompts"] == ["a secret"]
    assert line["outputs"] == [answer["choices"][0]["text"]]
    assert "alice-key" not in json.dumps(lines)


# ---- TLS


def test_tls(data: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    ours = authority.issue_cert("localhost")
    ca, cert, client = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "client.pem"
    authority.cert_pem.write_to_path(str(ca))
    ours.private_key_and_cert_chain_pem.write_to_path(str(cert))
    authority.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(str(client))
    with Server(data / "arch" / "llama", "--tls-cert", str(cert), "--tls-client-ca", str(ca)) as server:
        assert server.url.startswith("https://")
        url = server.url.replace("127.0.0.1", "localhost") + "/version"
        trusting = ssl.create_default_context(cafile=str(ca))
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=trusting)  # no certificate of its own
        trusting.load_cert_chain(client)
        assert httpx.get(url, verify=trusting).status_code == 200


@pytest.mark.parametrize("option", ["--tls-cert", "--api-key-file"])
def test_files_that_are_missing_are_told(data: Path, option: str) -> None:
    with pytest.raises(RuntimeError, match=r"nowhere\.pem.*: No such file"):
        Server(data / "arch" / "llama", option, "nowhere.pem")
