"""OpenTelemetry traces of requests: one span each, with the times of queue, prefill and decode as children.

The spans are made when a request has ended, from the times that its `Call` noted. Attribute names are those of the
semantic conventions for generative AI (OpenTelemetry, "GenAI spans"). Needs the extra `octavo[otel]`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from octavo.config import ConfigError

if TYPE_CHECKING:
    from octavo.server.calls import Call


class Tracer(Protocol):
    def end(self, call: Call) -> None:
        """The request has ended."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class NoTracer:
    def end(self, call: Call) -> None:
        pass

    def close(self) -> None:
        pass


class OtlpTracer:
    """Sends traces to an OTLP/HTTP collector, in the background."""

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint: base address of the collector, as http://localhost:4318. Raises ConfigError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError("otlp_endpoint needs OpenTelemetry: pip install 'octavo[otel]'") from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def end(self, call: Call) -> None:
        if call.answer_id is None:  # no generation
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        ended = time.monotonic()
        to_wall = time.time() - ended
        context = self._propagator.extract({"traceparent": call.traceparent} if call.traceparent else {})

        def nanoseconds(seconds: float) -> int:
            return int((seconds + to_wall) * 1e9)

        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": call.answer_id,
            "gen_ai.usage.input_tokens": call.num_prompt_tokens,
            "gen_ai.usage.output_tokens": call.num_output_tokens,
            "gen_ai.response.finish_reasons": call.finish_reasons,
            "octavo.request_id": call.id,
            "octavo.cached_tokens": call.num_cached_tokens,
            "http.response.status_code": call.status,
        }
        span = self._tracer.start_span(
            f"POST {call.path}", context, SpanKind.SERVER, attributes, start_time=nanoseconds(call.started)
        )
        if call.error is not None:
            span.set_status(Status(StatusCode.ERROR, call.error))
        inside = set_span_in_context(span, context)
        for name, start, stop in _phases(call, ended):
            child = self._tracer.start_span(name, inside, start_time=nanoseconds(start))
            child.end(nanoseconds(stop))
        span.end(nanoseconds(ended))

    def close(self) -> None:
        self._provider.shutdown()


def _phases(call: Call, ended: float) -> list[tuple[str, float, float]]:
    """Queue, prefill and decode of the first choice, as far as it came."""
    admitted = call.started + (call.queue_seconds or 0.0)
    if call.first_token is None:
        return [("queue", call.started, ended)]
    return [
        ("queue", call.started, admitted),
        ("prefill", admitted, call.first_token),
        ("decode", call.first_token, ended),
    ]
