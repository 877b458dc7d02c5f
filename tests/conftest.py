"""Paths that tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `pytest` alone does not know the tree it runs in

from octavo.backends import threads  # noqa: E402
from tests.options import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: E402

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Engines of this process compute in one thread where a test says nothing of it (`Server` sees to its own): files are
    tested beside each other, and threads that wait for one another on busy cores do little else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "default_threads", lambda: 1)
        yield


@pytest.fixture(scope="session")
def fixtures(request: pytest.FixtureRequest) -> Path:
    """The folder named by --fixtures."""
    path: Path = request.config.getoption("fixtures")
    return path.resolve()


@pytest.fixture(scope="session")
def data() -> Path:
    """The small fixtures that are part of the repository."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model's file, fetched once per machine."""
    from octavo.weights.locate import locate

    return locate("demo")
