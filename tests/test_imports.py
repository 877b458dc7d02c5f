"""The import rule: which part of the package may know which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "octavo"

# Part -> what of the package it may import beside itself. A part is a folder or a file at the top.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "disk": set(),
    "bars": {"engine.messages"},
    "params": set(),
    "pooling": set(),
    "pooled": {"pooling"},
    "request": {"params", "pooled"},
    "explain": set(),
    "graph": set(),
    "models": {"graph", "weights.spec"},
    "weights": {"disk"},
    "sampling": {"request"},
    "backends": {"graph", "weights", "sampling", "_native"},
    "quantize": {"graph", "models", "weights", "backends", "text"},
    "cache": {"request", "disk"},
    "sched": {"request", "explain", "cache", "sampling", "backends.base"},
    "grammar": {"request", "text"},
    "text": {"request", "weights", "engine.messages"},
    "engine": {
        "config", "disk", "request", "pooling", "pooled", "explain", "graph", "models", "weights", "sampling", "backends", "cache", "sched", "grammar",
        "quantize.at_load",
    },
    "perplexity": {"llm", "request"},
    "outputs": {"request", "explain", "engine.messages", "text"},
    "llm": {"bars", "outputs", "config", "request", "pooling", "pooled", "explain", "engine", "text", "weights"},
    "server": {"__version__", "config", "request", "pooling", "pooled", "explain", "engine", "text", "weights"},
    "bench": {"config", "disk", "request", "engine", "text", "weights", "graph", "backends", "quantize"},
    "cli": {"*"},
    "__init__": {"llm", "outputs", "request"},
}  # fmt: skip

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "typer", "rich", "jinja2", "prometheus_client", "tokenizers")
"""What the engine process must not load: it starts without."""


def test_every_part_is_in_the_table() -> None:
    assert {_part(file) for file in PACKAGE.rglob("*.py")} == set(ALLOWED)


def test_imports_keep_the_rule() -> None:
    broken = []
    for file in sorted(PACKAGE.rglob("*.py")):
        part = _part(file)
        for name in _imports(file):
            inside = any(name == a or name.startswith(a + ".") for a in ALLOWED[part] | {part})
            if not inside and "*" not in ALLOWED[part]:
                broken.append(f"{file.relative_to(PACKAGE)} imports octavo.{name}")
    assert not broken, "\n".join(broken)


def test_rule_is_looked_for_where_it_can_be_broken() -> None:
    """The walk finds imports at the top, in functions and for types alone."""
    found = {name.split(".")[0] for file in (PACKAGE / "engine").glob("*.py") for name in _imports(file)}
    assert {"config", "request", "sched", "backends", "weights"} <= found


def test_only_backends_know_the_native_module() -> None:
    others = [f for f in PACKAGE.rglob("*.py") if _part(f) != "backends" and "_native" in _imports(f)]
    assert not others


def test_no_module_needs_torch() -> None:
    for file in PACKAGE.rglob("*.py"):
        assert "torch" not in file.read_text().split(), file


def test_engine_process_loads_no_server() -> None:
    loaded = modules_of("octavo.engine.process")
    assert "octavo.engine.core" in loaded
    assert not loaded & set(HEAVY)


def test_commands_load_little_before_the_engine_starts() -> None:
    first = modules_of("octavo.cli.main")  # and its process is there; it is told when the next is loaded
    assert {name for name in first if name.startswith("octavo")} == {
        "octavo", "octavo.cli", "octavo.cli.main", "octavo.engine", "octavo.engine.spawn",
    }  # fmt: skip
    assert not first & {"typer", "msgspec", "asyncio", "zmq"}
    loaded = modules_of("octavo.cli.serve")
    assert "octavo.engine.client" in loaded
    assert not loaded & (set(HEAVY) - {"typer"} | {"numpy", "octavo._native", "yaml", "gguf"})


def modules_of(name: str) -> set[str]:
    """What importing it loads."""
    code = f"import sys, {name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def _part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(file: Path) -> set[str]:
    """Names inside of the package that a file imports, at the top or within functions, for types too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            names |= {node.module} if node.module != "octavo" else {f"octavo.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("octavo.") for name in names if name.startswith("octavo.")}
