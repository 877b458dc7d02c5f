"""`octavo serve`."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable

from octavo.bars import LoadingBar
from octavo.cli.local import resolve
from octavo.cli.options import with_config
from octavo.config import ConfigError, ServerConfig
from octavo.engine.client import EngineClient, EngineDead
from octavo.engine.messages import Ready
from octavo.engine.overload import QueueBounds
from octavo.engine.spawn import Spawned

BACKLOG = 2048
"""Connections that wait to be accepted."""


def command(spawned: Spawned | None) -> Callable[..., None]:
    """spawned: the engine's process, where it is there already."""

    @with_config(ServerConfig)
    def serve(config: ServerConfig) -> None:
        """Serve a model over HTTP to OpenAI's clients.

        Example: octavo serve demo --port 8000
        """
        _serve(config, spawned)

    return serve


def _serve(config: ServerConfig, spawned: Spawned | None) -> None:
    phases = {"launch": _age()}  # scripts/serve becomes this process: what it installed counts
    started = time.perf_counter()
    config, name = resolve(config)
    name = config.served_model_name or name
    if name in dict(config.adapters):
        raise ConfigError(f"lora names an adapter {name!r}, which is the name of the model itself")
    phases["locate"] = time.perf_counter() - started
    listener = _bind(config.host, config.port)
    _allow_connections()
    bar = LoadingBar()
    bounds = QueueBounds(config.max_queued_requests, config.max_queued_tokens)
    client = EngineClient.launch(config, bounds, bar.show, spawned)
    started = time.perf_counter()
    from octavo.server.run import run  # the engine loads meanwhile

    phases["imports"] = time.perf_counter() - started

    def on_ready(ready: Ready) -> None:
        bar.close()
        _print_ready(config, listener, name, ready, phases)

    with bar:
        reason = run(config, client, listener, name, phases, on_ready)
    if reason is not None:
        raise EngineDead(reason)


def _print_ready(
    config: ServerConfig, listener: socket.socket, name: str, ready: Ready, phases: dict[str, float]
) -> None:
    total = _age()
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.tls_cert is None else "https"
    address = f"{scheme}://{host}:{listener.getsockname()[1]}"
    lines = [
        f"{name}: {ready.isa}, {ready.threads} threads",
        *ready.notices,
        f"ready in {total:.2f} s",
        f"  server: {_times(phases)}",
        f"  engine, meanwhile: {_times(ready.phases)}",
        f"listening on {address}",
        "try it:",
        f"  curl {address}/v1/chat/completions -H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "What is the capital of Japan?"}], "temperature": 0}'""",
    ]
    print("\n".join(lines), flush=True)


def _times(phases: dict[str, float]) -> str:
    return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())


def _bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port from now on. Raises ConfigError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # only from here on can no other process have the port
        except OSError:
            listener.close()
            raise
    except OSError as e:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {e.strerror}; choose with --host and --port (0: a free one)"
        ) from None
    return listener


def _allow_connections() -> None:
    """As many as the system lets this user have: each takes a descriptor, and shells often begin with 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _age() -> float:
    """Seconds since this process was started, by the kernel's clock."""
    with open("/proc/self/stat") as f:
        ticks = int(f.read().rsplit(")", 1)[1].split()[19])  # field 22, starttime, after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
