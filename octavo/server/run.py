"""Runs the API process: listens at once, serves when the engine is ready, ends in order.

Imported after the engine process was launched, so that both start at the same time.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
import uvloop

from octavo.config import ConfigError, ServerConfig
from octavo.engine.client import EngineClient
from octavo.engine.messages import Ready
from octavo.request import ParameterError
from octavo.server.access import read_keys
from octavo.server.app import create_app, start_batches
from octavo.server.calls import log_to_stderr
from octavo.server.protocol import Protocol
from octavo.server.service import Service
from octavo.server.tracing import NoTracer, OtlpTracer
from octavo.text.template import read_template
from octavo.text.tokenizer import load_tokenizer

GOODBYE_SECONDS = 1.0
"""For open streams to be told how they ended, once the drain is over or the engine has died."""
GC_OBJECTS = 20_000
"""New objects after which the garbage collector looks at them, which are few megabytes. A step with many streams makes some
thousand, which live until they are sent: by default they would be looked at several times a step, and nearly all are no
garbage or freed without it."""
LOOK_SECONDS = 0.05
"""Between looks at the open requests, during the drain."""


def run(
    config: ServerConfig,
    client: EngineClient,
    listener: socket.socket,
    model: str,
    phases: dict[str, float],
    on_ready: Callable[[Ready], None],
) -> str | None:
    """Serve until told to end. None: ended in order; otherwise why not.

    `listener` is bound. phases: seconds of what this process did until now, by name; goes on being
    filled. on_ready is called once.
    Raises EngineError where the engine could not start, CheckpointError where the tokenizer cannot be read,
    ConfigError for a bad key file, certificate, tracing option; ParameterError for a bad chat template.
    """
    try:
        keys = read_keys(config.api_key, config.api_key_file)
        tracer = NoTracer() if config.otlp_endpoint is None else OtlpTracer(config.otlp_endpoint, model)
        check_tls(config)
        template = None if config.chat_template is None else read_template(config.chat_template)
    except (ConfigError, ParameterError):
        client.process.stop(0)
        raise
    service = Service(config, client, model, keys=keys, tracer=tracer)
    log_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service, listener, template, phases, on_ready))


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError where the files cannot be used."""
    if config.tls_cert is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, lambda: b"")  # nobody is there to be asked for it
        if config.tls_client_ca is not None:
            context.load_verify_locations(config.tls_client_ca)
    except OSError as e:  # ssl.SSLError is one
        files = ", ".join(filter(None, (config.tls_cert, config.tls_key, config.tls_client_ca)))
        raise ConfigError(f"the TLS files {files} cannot be used: {e.strerror or e}") from None


async def _serve(
    service: Service,
    listener: socket.socket,
    template: str | None,
    phases: dict[str, float],
    on_ready: Callable[[Ready], None],
) -> str | None:
    client = service.client
    server = _Server(service)

    async def prepare() -> None:
        started = time.perf_counter()
        notices = service.loaded(await asyncio.to_thread(load_tokenizer, Path(service.config.model)), template)
        phases["tokenizer"] = time.perf_counter() - started
        ready = await client.ready()
        service.metrics.startup({**phases, **ready.phases})
        start_batches(service)
        on_ready(msgspec.structs.replace(ready, notices=[*ready.notices, *notices]))
        gc.freeze()  # what is loaded stays: never walk over it again
        gc.set_threshold(GC_OBJECTS)

    listening = asyncio.ensure_future(client.ready())  # from here on the engine is heard
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ending = asyncio.create_task(server.drained())
    preparing = asyncio.create_task(prepare())
    try:
        await asyncio.wait((preparing, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return None
        preparing.result()
        dying = asyncio.ensure_future(client.wait_dead())
        await asyncio.wait((dying, ending), return_when=asyncio.FIRST_COMPLETED)
        return dying.result() if dying.done() else None
    finally:
        await service.close()
        await client.close()
        service.tracer.close()
        server.should_exit = True
        ending.cancel()
        await asyncio.gather(listening, serving, ending, preparing, return_exceptions=True)


class _Server(uvicorn.Server):
    """A first signal begins the drain instead of closing the listener; a second ends it."""

    def __init__(self, service: Service) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=config.tls_cert,
                ssl_keyfile=config.tls_key,
                ssl_ca_certs=config.tls_client_ca,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
                timeout_graceful_shutdown=GOODBYE_SECONDS,  # type: ignore[arg-type]
            )
        )
        self._service = service
        self._told = asyncio.Event()
        self._told_again = False
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._told_again = self._service.draining
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._told.set)

    async def drained(self) -> None:
        """Until a signal came and then no request is open, or the time for that is over."""
        await self._told.wait()
        seconds = self._service.config.drain_seconds
        deadline = time.monotonic() + seconds
        if self._service.metrics.num_open:
            await asyncio.sleep(LOOK_SECONDS)  # most end by themselves
        if self._service.metrics.num_open:
            line = f"ending: open requests have {seconds:g} s to finish; a second Ctrl-C or SIGTERM ends them"
            print(line, file=sys.stderr, flush=True)
        while self._service.metrics.num_open and time.monotonic() < deadline and not self._told_again:
            await asyncio.sleep(LOOK_SECONDS)
