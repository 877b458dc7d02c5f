"""Traces: a real server sends them to a collector of the test's."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.serving import Server

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.headers.get("content-encoding") is None
        self.server.received.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_spans_of_a_request(data: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        received: list[tuple[str, bytes]] = []
        collector.received = received  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with Server(data / "arch" / "llama", "--otlp-endpoint", endpoint) as server:
            body = {"prompt": "a secret", "max_tokens": 4, "ignore_eos": True}
            head = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
            answer = server.http.post("/v1/completions", json=body, headers=head).json()
            server.http.get("/version")
            assert server.end()[0] == 0  # sends what is left
        collector.shutdown()
    spans: dict[str, Span] = {}
    for path, content in received:
        assert path == "/v1/traces"
        assert b"secret" not in content
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            for scope in resource.scope_spans:
                spans |= {span.name: span for span in scope.spans}
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    whole = spans.pop("POST /v1/completions")
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == PARENT
    facts = {a.key: a.value for a in whole.attributes}
    assert facts["gen_ai.response.id"].string_value == answer["id"]
    assert facts["gen_ai.usage.output_tokens"].int_value == 4
    assert facts["octavo.request_id"].string_value == "mine"
    assert all(span.parent_span_id == whole.span_id for span in spans.values())
    borders = [whole.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].start_time_unix_nano == borders[-1]
        borders.append(spans[name].end_time_unix_nano)
    assert borders == sorted(borders)
    assert borders[-1] == whole.end_time_unix_nano
