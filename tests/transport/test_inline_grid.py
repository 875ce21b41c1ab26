"""Clients of the in-process grid that give up, never end, or are interrupted."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.transport.inline_grid import InlineGrid
from tests.processes import wait_for

Fit = Callable[..., Any]


@pytest.fixture
def fit_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Fit], None]:
    """Return a function that replaces what one client does in a round."""
    real = FedAvgClient.fit

    def replace(partition: int, fit: Fit) -> None:
        def chosen(self: Any, parameters: Any, config: Any) -> Any:
            mine = self.context.node_config["partition-id"] == partition
            return (fit if mine else real)(self, parameters, config)

        monkeypatch.setattr(FedAvgClient, "fit", chosen)

    return replace


class LeavingError(BaseException):
    """Not an Exception, like SystemExit."""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [SystemExit(3), LeavingError("gone")])
def test_a_client_that_leaves_costs_its_own_reply_only(
    workers: int, error: BaseException, fit_of: Any, federation: Any, flower_log: list[str]
) -> None:
    def leave(*args: Any) -> None:
        raise error

    fit_of(1, leave)
    _, result = federation("fedavg").run(rounds=2, grid={"workers": workers})
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1)] * 2
    assert f"{type(error).__name__}: {error}" in flower_log[0]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_never_ends_costs_the_timeout_once(
    workers: int, fit_of: Any, federation: Any, flower_log: list[str], released: threading.Event
) -> None:
    """The others reply after it, in the same round. It is not asked again before it has ended."""
    calls: list[int] = []

    def stay(self: Any, parameters: Any, config: Any) -> Any:
        calls.append(config["server-round"])
        released.wait()
        raise RuntimeError("too late")

    federation("fedavg").run(rounds=1)  # all that is loaded in a first round
    fit_of(0, stay)
    grid = {"workers": workers, "work_seconds": 5.0}
    _, result = federation("fedavg").run(rounds=3, timeout=0.5, grid=grid)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1)] * 3
    assert calls == [1]
    assert sum("client 0 still works after 5 s and is given up" in line for line in flower_log) == 1
    # In rounds 2 and 3, and by the measurement after the last round.
    assert sum("it still works on an earlier message" in line for line in flower_log) == 3


@pytest.mark.long
def test_a_client_that_was_given_up_takes_part_again_once_it_has_ended(
    fit_of: Any, federation: Any, released: threading.Event
) -> None:
    real = FedAvgClient.fit

    def late(self: Any, parameters: Any, config: Any) -> Any:
        if config["server-round"] == 1:
            released.wait()
        return real(self, parameters, config)

    def release(stats: Any) -> None:
        released.set()
        wait_for(lambda: all(job.done for job in grid._stuck.values()), "the end of the client")

    fit_of(0, late)
    fed = federation("fedavg")
    grid = InlineGrid(fed.app(), 4)
    result = fed.strategy(on_round=release).start(grid, fed.initial(), num_rounds=2, timeout=5.0)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_in_a_client_reaches_the_caller(workers: int, fit_of: Any, federation: Any) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    fit_of(0, interrupted)
    with pytest.raises(KeyboardInterrupt):
        federation("fedavg").run(rounds=1, grid={"workers": workers})


HANGING = """
import time
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.federation import Federation

real = FedAvgClient.fit

def stay(self, parameters, config):
    if self.context.node_config["partition-id"] == 0:
        time.sleep(100_000)
    return real(self, parameters, config)

Federation("fedavg").run(rounds=1)  # all that is loaded in a first round
FedAvgClient.fit = stay
strategy, result = Federation("fedavg").run(rounds=1, timeout=3.0, grid={"work_seconds": 5.0})
print([(r.participants, r.failures) for r in result.rounds])
"""


@pytest.mark.program
def test_the_end_of_the_process_does_not_wait_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[(3, 1)]\n"), done.stderr
    assert "Traceback" not in done.stderr
