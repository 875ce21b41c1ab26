"""The grid of processes: the in-process grid's numbers, faults, processes that die or hang, and what is left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_kd import registry, wording
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.process_pool import BuiltApp
from flwr_kd.experiments.runner import build_client
from flwr_kd.learning.device import one_thread
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, numbers
from flwr_kd.transport import node_pool
from flwr_kd.transport.frames import Segment
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.open_files import allow_open_files
from flwr_kd.transport.process_grid import ProcessGrid
from tests.processes import PATIENCE, wait_for

pytestmark = pytest.mark.program


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def failing_in(fit: Any, rounds: set[int], partition: int) -> Any:
    """Return a client's ``fit`` that does something else in some rounds at one client."""
    real = FedAvgClient.fit

    def chosen(self: Any, parameters: Any, config: Any) -> Any:
        mine = self.context.node_config["partition-id"] == partition
        return (fit if mine and config["server-round"] in rounds else real)(self, parameters, config)

    return chosen


def both(name: str, timeout: float = 300.0, **grid: Any) -> tuple[list[Any], list[Any]]:
    """Return the numbers of a federation on the in-process grid, and on the grid of processes."""
    _, one = Federation(name).run(rounds=3, timeout=timeout, grid=grid)
    _, two = Federation(name).run(rounds=3, timeout=timeout, kind=ProcessGrid, grid={"workers": 2, **grid})
    return numbers(one), numbers(two)


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedhkd"])
@pytest.mark.parametrize("kind", ["raise", "silent", "late", "garbage"])
def test_faults_cost_what_they_cost_on_the_in_process_grid(kind: str, name: str) -> None:
    timeout = 0.4 if kind in ("silent", "late") else 300.0
    inline, processes = both(name, timeout=timeout, faults={1: Fault(kind, frozenset({1, 3}))})
    assert inline == processes


@pytest.mark.parametrize("number", [None, signal.SIGKILL])
def test_a_process_that_dies_costs_one_reply_and_no_state(
    number: int | None, monkeypatch: pytest.MonkeyPatch, flower_log: list[str]
) -> None:
    """FedProto's clients keep their models, so that a lost one would change the numbers of the next round."""
    client = registry.get("fedproto").client
    real = client.fit

    def die(self: Any, parameters: Any, config: Any) -> Any:
        if config["server-round"] == 2 and self.context.node_config["partition-id"] in (0, 1):
            if number is None:
                os._exit(3)
            os.kill(os.getpid(), number)
        return real(self, parameters, config)

    lost = {i: Fault("raise", frozenset({2})) for i in (0, 1)}
    _, expected = Federation("fedproto").run(rounds=3, grid={"faults": lost})
    flower_log.clear()
    monkeypatch.setattr(client, "fit", die)
    _, result = Federation("fedproto").run(rounds=3, kind=ProcessGrid, grid={"workers": 2})
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0), (2, 2), (4, 0)]
    assert numbers(result) == numbers(expected)
    assert sum("its process died" in line for line in flower_log) == 2


@pytest.mark.long
def test_a_client_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch, flower_log: list[str]) -> None:
    """It takes part in the next round, in another process."""
    monkeypatch.setattr(FedAvgClient, "fit", failing_in(lambda *_: time.sleep(100_000), {1}, 0))
    grid = {"workers": 2, "work_seconds": 5.0}
    _, result = Federation("fedavg").run(rounds=2, timeout=0.5, kind=ProcessGrid, grid=grid)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    killed = [line for line in flower_log if "still works" in line]
    assert killed == ["client 0 still works after 5 s and is given up: its process is killed"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_client_that_leaves_costs_its_own_reply_only(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, flower_log: list[str]
) -> None:
    def leave(*args: Any) -> None:
        raise error

    monkeypatch.setattr(FedAvgClient, "fit", failing_in(leave, {1}, 1))
    _, result = Federation("fedavg").run(rounds=2, kind=ProcessGrid, grid={"workers": 2})
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    assert type(error).__name__ in flower_log[0]


def echo(message: Message, context: Context) -> Message:
    """Reply with what came, and what is known here; count the calls in the node's state."""
    count = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1  # type: ignore[arg-type,call-overload,index]
    context.state["count"] = ConfigRecord({"calls": count})
    content = RecordDict(dict(message.content.items()))
    known = {"pid": os.getpid(), "calls": count, "partition": int(context.node_config["partition-id"])}
    content["known"] = ConfigRecord(known)
    return Message(content, reply_to=message)


def app(function: Any) -> ClientApp:
    client_app = ClientApp()
    client_app.train()(function)
    return client_app


def exchanged(grid: Grid, *contents: RecordDict) -> list[Message]:
    """Send each node a message, and return the replies in the order of the nodes."""
    nodes = list(grid.get_node_ids())
    messages = [
        Message(content, dst_node_id=node, message_type="train")
        for node, content in zip(nodes, contents, strict=True)
    ]
    return list(grid.send_and_receive(messages))


def known(reply: Message, name: str) -> Any:
    return reply.content.config_records["known"][name]


@pytest.fixture
def echoing() -> Iterator[ProcessGrid]:
    grid = ProcessGrid(app(echo), 6, workers=2)
    yield grid
    grid.close()


RECORDS = {
    "arrays": ArrayRecord([np.arange(6.0).reshape(2, 3), np.array(1.5, np.float32), np.zeros((0, 2))]),
    "large": ArrayRecord([np.random.default_rng(0).random(100_000)]),
    "none": ArrayRecord(),
    "values": ConfigRecord(
        {"a": 1, "b": 0.1, "c": "ä\ud800", "d": b"\x00\xff", "e": [b"", b"xy"], "f": [1.5, float("inf")],
         "g": True, "h": [], "i": b"p" * 200_000, "j": 2**70}
    ),
}  # fmt: skip


def test_records_come_back_as_they_were_sent(echoing: ProcessGrid) -> None:
    """Some are shared by all messages, others are a message's own."""
    own = [ArrayRecord([np.full(50_000, i)]) for i in range(6)]
    for _ in range(2):
        replies = exchanged(echoing, *(RecordDict({**RECORDS, "own": own[i]}) for i in range(6)))
        for i, reply in enumerate(replies):
            assert reply.metadata.reply_to_message_id
            assert known(reply, "partition") == i
            content = dict(reply.content.items())
            del content["known"]
            assert content == {**RECORDS, "own": own[i]}
            assert type(content["values"]["g"]) is bool
            assert type(content["values"]["a"]) is int


def test_what_all_nodes_are_sent_is_written_once(
    echoing: ProcessGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = Segment.write

    def noting(self: Segment, parts: Any) -> int:
        written.append(real(self, parts))
        return written[-1]

    monkeypatch.setattr(Segment, "write", noting)
    common, payload = ArrayRecord([np.random.default_rng(1).random(300_000)]), bytes(100_000)
    content = RecordDict({"arrays": common, "config": ConfigRecord({"payload": payload})})
    replies = exchanged(echoing, *(RecordDict(dict(content.items())) for _ in range(6)))
    assert all(reply.content.array_records["arrays"] == common for reply in replies)
    assert 2_500_000 < sum(written) < 2_600_000


def test_descriptors_do_not_grow(echoing: ProcessGrid) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("counts descriptors by /proc")

    def exchange() -> int:
        common = ArrayRecord([np.random.default_rng(1).random(300_000)])
        exchanged(echoing, *(RecordDict({"arrays": common}) for _ in range(6)))
        return len(list(folder.iterdir()))

    first, *others = (exchange() for _ in range(12))
    # Each of the two processes may have had each of the six replies.
    assert max(others) <= first + 2 * 6


def test_a_nodes_state_follows_it_to_any_process(echoing: ProcessGrid) -> None:
    replies = [exchanged(echoing, *(RecordDict() for _ in range(6))) for _ in range(4)]
    assert [[known(reply, "calls") for reply in each] for each in replies] == [[n] * 6 for n in (1, 2, 3, 4)]
    assert len({known(reply, "pid") for each in replies for reply in each} - {os.getpid()}) == 2


@pytest.mark.parametrize(
    ("first", "then"), [(1, 1.0), (0.0, -0.0), (True, 1), ([1], [1.0]), ("a", "b"), (float("nan"), 1.0)]
)
def test_a_value_that_changes_in_a_nodes_state_is_kept(first: Any, then: Any) -> None:
    def change(message: Message, context: Context) -> Message:
        values: Any = context.state["values"] if "values" in context.state else ConfigRecord({"log": []})
        values["log"].append(len(values["log"]))
        values["value"] = then if len(values["log"]) > 1 else first
        before = str(context.state["before"]["is"]) if "before" in context.state else ""  # type: ignore[index]
        context.state["before"] = ConfigRecord({"is": repr(values["value"])})
        context.state["values"] = values
        return Message(RecordDict({"known": ConfigRecord({**values, "before": before})}), reply_to=message)

    seen = []
    for grid in (InlineGrid(app(change), 1), ProcessGrid(app(change), 1)):
        try:
            seen.append([exchanged(grid, RecordDict())[0].content["known"] for _ in range(3)])
        finally:
            grid.close()
    assert repr(seen[0]) == repr(seen[1])
    assert seen[1][2]["log"] == [0, 1, 2]
    assert seen[1][2]["before"] == repr(then)


def test_an_idle_process_that_is_killed_costs_nothing(echoing: ProcessGrid) -> None:
    first = exchanged(echoing, *(RecordDict() for _ in range(6)))
    pids = {known(reply, "pid") for reply in first}
    for pid in pids:
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        # Of a process that /proc shows as a zombie other threads may still run, and hold its pipe open.
        assert wait([handle], PATIENCE)
        os.close(handle)
    second = exchanged(echoing, *(RecordDict() for _ in range(6)))
    assert [known(reply, "calls") for reply in second] == [2] * 6
    assert not pids & {known(reply, "pid") for reply in second}


def _state(pid: int) -> str | None:
    """Return a process's state as Linux names it; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def test_a_reply_that_cannot_be_sent_is_an_error() -> None:
    def reply(message: Message, context: Context) -> Any:
        answer = Message(RecordDict({"a": ArrayRecord([np.zeros(2)])}), reply_to=message)
        answer.content.array_records["a"]["0"].data = 7  # type: ignore[assignment]
        return answer

    grid = ProcessGrid(app(reply), 1, workers=1)
    try:
        (answer,) = exchanged(grid, RecordDict())
        assert "its reply or state cannot be sent" in answer.error.reason
    finally:
        grid.close()


def test_log_lines_come_from_the_process_and_warnings_for_all_come_once(
    flower_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(message: Message, context: Context) -> Message:
        from flwr.common.logger import log

        log(30, "this is %d %%", context.node_config["partition-id"])
        monkeypatch.setattr(logging, "raiseExceptions", False)
        log(30, "a mistake: %d", "no number")
        wording.warn_once("all of %d clients are old", 4)
        return Message(RecordDict(), reply_to=message)

    wording.begin_run()
    grid = ProcessGrid(app(warn), 4, workers=2)
    try:
        exchanged(grid, *(RecordDict() for _ in range(4)))
    finally:
        grid.close()
    assert sorted(flower_log) == ["all of 4 clients are old", *(f"this is {i} %" for i in range(4))]


def test_the_end_leaves_no_process() -> None:
    grid = ProcessGrid(app(echo), 2, workers=2)
    pids = {known(reply, "pid") for reply in exchanged(grid, RecordDict(), RecordDict())}
    grid.close()
    assert [_state(pid) for pid in pids] == [None] * 2
    # It can be used again.
    assert len(exchanged(grid, RecordDict(), RecordDict())) == 2
    grid.close()
    grid.close()


def test_a_process_that_a_client_forks_sends_no_reply(echoing: ProcessGrid) -> None:
    def fork(message: Message, context: Context) -> Message:
        os.fork()
        return echo(message, context)

    grid = ProcessGrid(app(fork), 3, workers=2)
    try:
        for count in (1, 2, 3):
            replies = exchanged(grid, *(RecordDict() for _ in range(3)))
            assert [known(reply, "partition") for reply in replies] == [0, 1, 2]
            assert [known(reply, "calls") for reply in replies] == [count] * 3
    finally:
        grid.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is looked at on Linux only")
def test_a_low_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_limits.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    allow_open_files(200, 3)
    ((soft, hard),) = set_limits
    assert 264 < soft < 4096 == hard
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    with pytest.raises(
        ConfigError, match=r"workers=3 need up to \d+ open files, and the system allows 64: .*ulimit"
    ):
        allow_open_files(200, 3)


KILLED = """
import os, sys, time
from flwr_kd.strategies.fedavg import FedAvgClient
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.process_grid import ProcessGrid

def stay(self, parameters, config):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100_000)

FedAvgClient.fit = stay
Federation("fedavg").run(kind=ProcessGrid, grid={"workers": 2})
"""


TWO_GRIDS = """
import os, time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr_kd.transport.process_grid import ProcessGrid

app, pids = ClientApp(), []

@app.train()
def train(message, context):
    os.write(1, f"{os.getpid()}\\n".encode())
    return Message(RecordDict(), reply_to=message)

grids = [ProcessGrid(app, 1, workers=1) for _ in range(2)]
for grid in (*grids, grids[0]):
    (node,) = grid.get_node_ids()
    grid.send_and_receive([Message(RecordDict(), dst_node_id=node, message_type="train")])
    if grid is grids[1]:
        # Each of the two that remain has now what the other's pool had open.
        grids[0]._pool.replace(grids[0]._pool.processes[0])
time.sleep(100_000)
"""


@pytest.mark.parametrize(("program", "count"), [(KILLED, 2), (TWO_GRIDS, 3)], ids=["one grid", "two grids"])
def test_no_process_survives_a_parent_that_is_killed(program: str, count: int) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(parent.stdout.readline()) for _ in range(count)]
        finally:
            parent.kill()
    assert len(set(pids)) == count
    wait_for(lambda: all(_state(pid) in ("Z", None) for pid in pids), "the end of the clients' processes")


LEFT_OPEN = """
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.process_grid import ProcessGrid
fed = Federation("fedavg")
grid = ProcessGrid(fed.app(), 4)
print(fed.strategy().start(grid, fed.initial(), num_rounds=1).rounds[0].participants)
"""


def test_the_end_of_the_program_ends_a_grid_that_was_not_closed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=300, check=False
    )
    # What a client prints, and what the program prints, is there once.
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_processes_that_are_spawned_give_the_same_numbers() -> None:
    experiment = Experiment(clients=2, limit=100, device="cpu")
    client_app = BuiltApp(partial(build_client, "fedavg", experiment, None))
    method, found = registry.get("fedavg"), []
    initial = ArrayRecord(experiment.build_model().state_dict())
    for grid in (
        InlineGrid(client_app, 2),
        ProcessGrid(client_app, 2, workers=2, start_method="spawn"),
    ):
        strategy = method.strategy(method.config(), min_available_nodes=2)
        found.append(numbers(strategy.start(grid, initial, num_rounds=1)))
        grid.close()
    assert found[0] == found[1]


def test_what_cannot_be_pickled_is_an_error_where_processes_are_spawned() -> None:
    grid = ProcessGrid(app(lambda message, context: message), 2, start_method="spawn")
    with pytest.raises(ConfigError, match=r'cannot be built in another process .*: use backend="inline"'):
        exchanged(grid, RecordDict(), RecordDict())
    grid.close()


def test_a_platform_without_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pool.multiprocessing, "get_all_start_methods", lambda: [])
    with pytest.raises(ConfigError, match=r'starts no processes: use backend="inline"'):
        node_pool.start_method()


def test_processes_are_not_forked_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pool.torch.cuda, "is_initialized", lambda: True)
    assert node_pool.start_method() == "spawn"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux only")
def test_processes_are_not_forked_beside_a_gpu_where_they_could_not_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_pool.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(node_pool.torch.cuda, "is_initialized", lambda: False)
    assert node_pool.start_method() == "fork"

    def refused(*args: Any) -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )

    monkeypatch.setattr(node_pool.torch.Tensor, "backward", refused)
    assert node_pool.start_method() == "spawn"
