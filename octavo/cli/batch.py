"""`octavo batch`: the requests of a file, answered into a file, without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.bars import LoadingBar
from octavo.cli.local import resolve
from octavo.cli.options import with_config
from octavo.config import ConfigError, ServerConfig
from octavo.engine.client import EngineClient

if TYPE_CHECKING:
    from octavo.server.batch_file import Line


@with_config(ServerConfig, first="file", only=("kv_cache_memory", "max_model_len", "max_num_seqs", "activations"))
def batch(
    config: ServerConfig,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL, a request a line, as OpenAI's Batch API has it.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where answers go. Default: FILE.out.jsonl")
    ] = None,
) -> None:
    """Answer every request of a file, those with equal beginnings together.

    A line is {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}. An output file that is there already is
    gone on with. Example: octavo batch requests.jsonl demo
    """
    target = output or file.with_suffix(".out.jsonl")
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    config, name = resolve(config)
    bar = LoadingBar()
    client = EngineClient.launch(config, on_loading=bar.show)
    from octavo.server.batch_file import read_lines, written_ids
    from octavo.server.routes import BATCHED

    try:
        lines, errors = read_lines(file, BATCHED)
        if errors:
            raise ConfigError("\n".join(f"{file} line {e.line}: {e}" for e in errors))
    except BaseException:
        client.process.stop(0)
        raise
    done = written_ids(target)
    left = [line for line in lines if line.custom_id not in done]
    failed = asyncio.run(_run(config, client, bar, name, left, target, len(lines)))
    print(f"{len(lines) - failed} of {len(lines)} answered, {failed} refused: {target}", file=sys.stderr)


async def _run(
    config: ServerConfig, client: EngineClient, bar: LoadingBar, name: str, lines: list[Line], target: Path, total: int
) -> int:
    """Number of requests that were refused."""
    import msgspec
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from octavo.server.access import Caller
    from octavo.server.batch_file import run_lines
    from octavo.server.calls import Call
    from octavo.server.routes import answer_whole
    from octavo.server.service import Service
    from octavo.text.tokenizer import load_tokenizer

    failed = 0
    try:
        service = Service(config, client, name)
        service.loaded(await asyncio.to_thread(load_tokenizer, Path(config.model)), None)
        with bar:
            await client.ready()
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as answered, open(target, "ab") as out:
            task = answered.add_task(name, total=total, completed=total - len(lines))

            async def run_one(url: str, body: bytes, call: Call) -> dict[str, Any]:
                return await answer_whole(service, url, body, call)

            async for entry in run_lines(
                lines, run_one, config.max_num_seqs, lambda: Call(os.urandom(12).hex(), Caller())
            ):
                failed += entry["response"]["status_code"] != 200
                out.write(msgspec.json.encode(entry) + b"\n")
                out.flush()
                answered.advance(task)
    finally:
        await client.close()
    return failed
