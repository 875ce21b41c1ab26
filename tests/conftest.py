"""Fixtures for small federations that need no Ray; see :mod:`flwr_kd.testing.federation`."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flwr_kd import wording
from flwr_kd.data import ArrayDataset
from flwr_kd.experiments import runner
from flwr_kd.server.records import KDResult
from flwr_kd.testing import federation as small

pytest_plugins = ("tests.tiers",)

# Programs that tests interrupt would inherit that it is ignored, as in the background of a shell.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray gives its workers the least priority but four: beside other tests on a small machine they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# PyTorch chooses the folder of its cache when it first needs it: below the folder of temporary files, which is then
# perhaps one of a test's own that is to stay empty.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


@pytest.fixture
def flower_log() -> Iterator[list[str]]:
    """Give Flower's warnings, whose logger does not pass them on to pytest's."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def level_of_flowers_log() -> Iterator[None]:
    """Undo what a program sets, whose ``main()`` a test calls."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def words_of_python() -> Iterator[None]:
    """Undo what an app's code in this process says of the interface in use."""
    with wording.speaking(wording.Interface.PYTHON):
        yield


@pytest.fixture
def federation() -> Callable[..., small.Federation]:
    return small.Federation


@pytest.fixture
def make_blobs() -> Callable[..., ArrayDataset]:
    return small.blobs


@pytest.fixture
def make_model() -> Callable[..., torch.nn.Module]:
    return small.small_model


@pytest.fixture
def numbers() -> Callable[[KDResult], list[tuple[Any, ...]]]:
    """Return what must be the same in two equal runs: everything but the time."""
    return small.numbers


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list to which each run of an experiment adds its method and seed."""
    seen: list[tuple[str, int]] = []
    real = runner.run

    def noting(method: Any, experiment: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((method.name, experiment.seed))
        return real(method, experiment, *args, **kwargs)

    monkeypatch.setattr(runner, "run", noting)
    return seen
