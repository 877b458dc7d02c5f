"""The options of this suite, as a plugin: `python -m pytest -p tests.options`, or by itself where a path is named.

`--fixtures` is pytest's own word for listing fixtures (also `--funcargs`, which stays); here it names a folder. An
option's value is only understood in any place when the plugin is there before the arguments are read: hence `-p`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LONGEST = (
    "emulation", "sanitizers", "bits", "native", "same_bits", "cli", "server_errors", "grammar", "scheduler_random", "structured",
    "bench", "overload", "llm", "cache_random", "terminal", "batches", "api_reference", "restart", "engine", "fuzz", "stream_equals_whole", "fairness",
    "beam", "check", "quant_layouts", "server_tools", "memory", "packed", "embeddings", "leaving", "access", "streams", "tiers",
)  # fmt: skip
"""Files that take longest, in this order: they go first, so that at the end of the suite no process waits for another."""


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.optparser
    if any(action.dest == "fixtures" for action in options._actions):
        return
    group = options.add_argument_group("octavo", conflict_handler="resolve")
    help = "folder of the large fixtures; without it their tests are left out"
    group.add_argument("--fixtures", type=Path, metavar="PATH", default=None, help=help)
    group.add_argument("--long", action="store_true", default=False, help="also run the tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; run with --long")
    path = config.getoption("fixtures")
    if path is not None and not (path / "arch").is_dir():
        raise pytest.UsageError(f"--fixtures {path}: no such folder of fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def wanted(item: pytest.Item) -> bool:
        if "fixtures" in getattr(item, "fixturenames", ()) and config.getoption("fixtures") is None:
            return False
        return item.get_closest_marker("long") is None or bool(config.getoption("long"))

    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
