"""A SuperLink with three SuperNodes for the tests of a worker, and others for tests that break theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.superlink import Deployment

# So that pytest explains failed assertions in it.
pytest.register_assert_rewrite("tests.apps.applications")


@pytest.fixture(scope="session")
def _deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start it once for each worker of pytest-xdist: workers run such tests at the same time."""
    with Deployment(tmp_path_factory.mktemp("deployment")) as link:
        yield link


@pytest.fixture
def deployment(_deployment: Deployment) -> Iterator[Deployment]:
    """Yield the SuperLink with its three SuperNodes, and undo after each test what it did to them."""
    yield _deployment
    _deployment.settle()


@pytest.fixture
def new_deployment(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Yield a function that starts a SuperLink for one test: ``new_deployment(nodes=2)``."""
    with ExitStack() as all_of_them:
        count = 0

        def start(nodes: int = 3, *options: str) -> Deployment:
            nonlocal count
            count += 1
            folder = tmp_path / f"deployment-{count}"
            folder.mkdir()
            return all_of_them.enter_context(Deployment(folder, nodes, *options))

        yield start
