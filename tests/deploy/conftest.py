"""A SuperLink and three SuperNodes for all tests here, and others for those that break theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.superlink import Deployment

# Its assertions are explained as those of tests are.
pytest.register_assert_rewrite("tests.apps.applications")


@pytest.fixture(scope="session")
def _deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("deployment")) as link:
        yield link


@pytest.fixture
def deployment(_deployment: Deployment) -> Iterator[Deployment]:
    """Give the SuperLink with its three SuperNodes; what a test did to them is undone after it."""
    yield _deployment
    _deployment.settle()


@pytest.fixture
def new_deployment(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Start a SuperLink of a test's own: ``new_deployment(nodes=2)``."""
    with ExitStack() as all_of_them:
        count = 0

        def start(nodes: int = 3, *options: str) -> Deployment:
            nonlocal count
            count += 1
            folder = tmp_path / f"deployment-{count}"
            folder.mkdir()
            return all_of_them.enter_context(Deployment(folder, nodes, *options))

        yield start
