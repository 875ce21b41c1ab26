"""What a run survives: too few answers, a server that is killed, a full disk, lost models, false claims."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client import personal_state
from flwr_kd.client.task import Answer
from flwr_kd.data import ArrayDataset
from flwr_kd.models import build_model
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint
from flwr_kd.server.records import HandshakeError, Node, VoidRoundsError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.delivery import lifetime, reason_of
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError

METHODS = list(registry.methods())
PERSONAL = [name for name in METHODS if getattr(registry.get(name).client, "personal", False)]
QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
every = pytest.mark.parametrize("name", METHODS)


class Killed(BaseException):
    """Ends a server as a signal would: nothing of the strategy catches it."""


def failing(count: int, rounds: set[int]) -> dict[int, Fault]:
    return {i: Fault("raise", frozenset(rounds)) for i in range(count)}


# ---------------------------------------------------------------------- too few answers


@every
def test_a_round_with_too_few_answers_changes_nothing(name: str, federation: Any, numbers: Any) -> None:
    """Two of four answer where three are needed: as if the round had not been."""
    fed = federation(name)
    states: list[dict[str, Any]] = []

    def note(stats: Any) -> None:
        states.append({k: v.copy() for k, v in strategy.state_arrays().items()})

    strategy = fed.strategy(min_train_nodes=3, on_round=note)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2}))
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [(r.participants, r.failures, r.void) for r in result.rounds] == [
        (4, 0, False),
        (2, 2, True),
        (4, 0, False),
    ]
    before, after, last = states
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert result.rounds[1].local_accuracy is None
    # FedHEAD's state is who is in which sector.
    if before and not name.startswith("fedhead"):
        assert any(not np.array_equal(before[key], last[key]) for key in before)
    # With as many as are needed it counts.
    _, other = fed.run(rounds=2, grid={"faults": failing(1, {2})}, min_train_nodes=3)
    assert [(r.participants, r.void) for r in other.rounds] == [(4, False), (3, False)]


def test_the_global_model_of_a_void_round_is_the_one_of_before(federation: Any) -> None:
    fed = federation("fedavg")
    _, one = fed.run(rounds=1)
    _, two = fed.run(rounds=2, grid={"faults": failing(2, {2})}, min_train_nodes=3)
    assert {n: a.data for n, a in one.arrays.items()} == {n: a.data for n, a in two.arrays.items()}


def test_too_many_void_rounds_end_the_run(federation: Any, flower_log: list[str], tmp_path: Path) -> None:
    fed = federation("fedavg")
    strategy = fed.strategy(min_train_nodes=3, max_void_rounds=2, checkpoint_dir=tmp_path)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2, 4, 5, 6}))
    with pytest.raises(
        VoidRoundsError,
        match=r"2 rounds in a row were void: the last, round 5, had 2 usable answers and 2 failures, "
        r"min_train_nodes is 3",
    ):
        strategy.start(grid, fed.initial(), num_rounds=9, timeout=30.0)
    assert sum("is void: 2 usable answers, at least 3 are needed" in line for line in flower_log) == 3
    # What there is, is the last round that counted; a resumed run asks for round 4 again.
    found = Checkpoint.load(tmp_path, "FedAvg")
    assert found is not None
    assert found.server_round == 3
    resumed = fed.strategy(checkpoint_dir=tmp_path, resume=True)
    result = resumed.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=4, timeout=30.0)
    assert [r.server_round for r in result.rounds] == [4]


def test_flowers_own_loop_has_void_rounds_too(federation: Any) -> None:
    from flwr.serverapp.strategy import Strategy

    fed = federation("fedavg")
    strategy = fed.strategy(min_train_nodes=3, max_void_rounds=2)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {1}))
    result = Strategy.start(strategy, grid, fed.initial(), num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2]
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {1, 2, 3}))
    with pytest.raises(VoidRoundsError, match=r"2 rounds in a row were void"):
        Strategy.start(strategy, grid, fed.initial(), num_rounds=5)


class Coming(InlineGrid):
    """Nodes are there from a certain question for them on."""

    def __init__(
        self, *args: Any, since: dict[int, int], gone: Callable[[int, int], bool], **kw: Any
    ) -> None:
        super().__init__(*args, **kw)
        self.since, self.gone, self.asked = since, gone, 0

    def get_node_ids(self) -> list[int]:
        self.asked += 1
        there = []
        for node_id, context in self.contexts.items():
            partition = int(context.node_config["partition-id"])
            if self.asked > self.since.get(partition, 0) and not self.gone(partition, self.asked):
                there.append(node_id)
        return there


def test_a_round_waits_for_nodes_that_come_back(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedavg", clients=3)
    # Asked once before round 1, once per round, and again while waiting.
    grid = Coming(fed.app(), 3, since={}, gone=lambda partition, asked: partition < 2 and 3 <= asked <= 6)
    result = fed.strategy(min_train_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [(r.participants, r.void) for r in result.rounds] == [(3, False)] * 3
    assert grid.asked > 6
    assert any("1 clients are there, a round needs 2: waiting" in line for line in flower_log)


@pytest.mark.parametrize("first", [0, 3])
def test_one_silent_client_does_not_cost_the_answers_of_the_others(first: int, federation: Any) -> None:
    """Wherever it stands in the order: theirs live until they are fetched."""
    faults = {first: Fault("silent", frozenset({1}))}
    _, result = federation("fedavg").run(rounds=2, grid={"faults": faults}, timeout=1.0)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    assert lifetime(100.0, 50) == 100 + 200 + 2 * 50


def test_an_answer_whose_time_is_over_is_gone(federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before rests on: the grid treats messages as a SuperLink does."""
    monkeypatch.setattr("flwr_kd.server.messages.lifetime", lambda timeout, count: timeout)
    faults = {0: Fault("silent", frozenset({1}))}
    # Round 2 has to be over before its messages expire.
    _, result = federation("fedavg").run(rounds=2, grid={"faults": faults}, timeout=3.0)
    assert [(r.participants, r.failures) for r in result.rounds] == [(0, 4), (4, 0)]


@pytest.mark.parametrize("name", ["fedhead", "fedhead-plus"])
def test_fedhead_goes_on_with_fewer_clients_than_sectors(name: str, federation: Any) -> None:
    """Sectors are those of the clients that were there when the run began."""
    fed = federation(name, clients=2)
    grid = Coming(fed.app(), 2, since={}, gone=lambda partition, asked: partition == 1 and asked == 2)
    result = fed.strategy("sectors=2").start(grid, fed.initial(), num_rounds=2, timeout=30.0)
    assert [r.participants for r in result.rounds] == [1, 2]


@pytest.mark.parametrize("name", METHODS)
def test_one_that_comes_first_neither_ends_the_run_nor_decides_it(
    name: str, federation: Any, flower_log: list[str]
) -> None:
    """Its model has other classes, features and arrays; three that fit come later."""
    fed = federation(name)
    odd = build_model("lenet", input_shape=(1, 4, 4), num_classes=7, seed=0, feature_dim=5)
    method = fed.method

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 0:
            data = ArrayDataset(torch.zeros(14, 1, 4, 4), torch.arange(14) % 7)
            public = {"public_set": data} if method.public_at == "clients" else {}
            client = method.client(
                odd, data, context=context, device="cpu", **method.client_options, **public
            )
            return client.to_client()
        return fed.client_fn(context)

    grid = Coming(ClientApp(client_fn=client_fn), 4, since={1: 2, 2: 4, 3: 6}, gone=lambda *_: False)
    result = fed.strategy(min_available_nodes=3).start(grid, fed.initial(), num_rounds=1, timeout=60.0)
    assert result.rounds[0].participants == 3
    assert set(result.rounds[0].bytes_by_partition) == {1, 2, 3}
    (line,) = [line for line in flower_log if "is refused" in line]
    (liar,) = [i for i, c in grid.contexts.items() if c.node_config["partition-id"] == 0]
    assert line.startswith(f"node {liar} is refused")


def test_a_node_that_joins_late_takes_part_from_the_next_round(federation: Any) -> None:
    fed = federation("fedhkd", clients=3)
    grid = Coming(fed.app(), 3, since={2: 2}, gone=lambda *_: False)
    strategy = fed.strategy(min_available_nodes=2)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [sorted(r.bytes_by_partition) for r in result.rounds] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert [r.participants for r in result.rounds] == [2, 3, 3]


# ---------------------------------------------------------------------- a server that ends and is resumed


def states_of(folder: Path, clients: int = 4) -> dict[str, Any]:
    return {"node_configs": [{"state-dir": str(folder)}] * clients}


@every
@pytest.mark.parametrize("when", ["between", "inside"])
def test_a_killed_server_goes_on_to_the_same_numbers(
    name: str,
    when: str,
    federation: Any,
    numbers: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """To the last bit, also where clients keep their models: those of a ``state-dir`` outlive the run."""
    fed = federation(name)
    whole, expected = fed.run(rounds=3, grid=states_of(tmp_path / "undisturbed"))

    def kill(stats: Any) -> None:
        if stats.server_round == 2:
            raise Killed

    broken = fed.strategy(
        checkpoint_dir=tmp_path / "checkpoint", on_round=kill if when == "between" else None
    )
    save = Checkpoint.save

    def killed(self: Checkpoint, folder: Path) -> Path:
        if self.server_round == 2:
            raise Killed
        return save(self, folder)

    grid = InlineGrid(fed.app(), 4, **states_of(tmp_path / "states"))
    with monkeypatch.context() as patch:
        if when == "inside":
            # The clients have trained and replied; the round is not written yet.
            patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(Killed):
            broken.start(grid, fed.initial(), num_rounds=3)
    last = 2 if when == "between" else 1

    # A new run: other node ids, nothing in Flower's state.
    resumed = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", resume=True)
    grid = InlineGrid(fed.app(), 4, seed=9, **states_of(tmp_path / "states"))
    result = resumed.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [r.server_round for r in result.rounds] == list(range(last + 1, 4))
    sent = name == "ktpfl-weights"  # it cannot know that the clients still have their models, and sends them
    for found, other in zip(numbers(result), numbers(expected)[last:], strict=False):
        assert found[:3] == other[:3]
        assert sent or found == other
    left, right = whole.state_arrays(), resumed.state_arrays()
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[key], right[key]) for key in left)
    kept = [
        {
            path.name.partition("-node-")[2]: path.read_bytes()
            for path in folder.iterdir()
            if "-round-3" in path.name
        }
        for folder in (tmp_path / "undisturbed", tmp_path / "states")
        if folder.exists()
    ]
    # pFedDF's clients keep what they fine-tuned after the last round.
    assert len(kept) == (2 if name in (*PERSONAL, "pfeddf") else 0)
    if kept:
        assert len(kept[0]) == 4
        assert kept[0] == kept[1]


@pytest.mark.parametrize("name", PERSONAL)
def test_models_of_void_rounds_do_not_displace_those_of_the_checkpoint(
    name: str, federation: Any, flower_log: list[str], numbers: Any, tmp_path: Path
) -> None:
    """Rounds 2 and 3 are void, though half of the clients trained in them; the run is resumed after round 1."""
    fed = federation(name)
    _, expected = fed.run(rounds=3, grid=states_of(tmp_path / "undisturbed"))
    broken = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", min_train_nodes=3, max_void_rounds=2)
    grid = InlineGrid(fed.app(), 4, faults=failing(2, {2, 3}), **states_of(tmp_path / "states"))
    with pytest.raises(VoidRoundsError):
        broken.start(grid, fed.initial(), num_rounds=5)
    files = [path.name.partition("-node-3-")[2] for path in (tmp_path / "states").glob("*-node-3-*")]
    assert sorted(files) == ["round-1.safetensors", "round-3.safetensors"]
    resumed = fed.strategy(checkpoint_dir=tmp_path / "checkpoint", resume=True)
    grid = InlineGrid(fed.app(), 4, seed=9, **states_of(tmp_path / "states"))
    result = resumed.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert not [line for line in flower_log if "lost" in line]
    for found, other in zip(numbers(result), numbers(expected)[1:], strict=False):
        assert found[:3] == other[:3]


@pytest.mark.parametrize("name", PERSONAL)
def test_checkpoints_that_could_not_be_written_do_not_cost_models(
    name: str, federation: Any, flower_log: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fed = federation(name)
    save = Checkpoint.save

    def full(self: Checkpoint, folder: Path) -> Path:
        if self.server_round > 1:
            raise OSError(28, "No space left on device")
        return save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", full)
        fed.run(rounds=4, checkpoint_dir=tmp_path / "checkpoint", grid=states_of(tmp_path / "states"))
    assert sum("no checkpoint could be written" in line for line in flower_log) == 3
    fed.run(
        rounds=2, checkpoint_dir=tmp_path / "checkpoint", resume=True, grid=states_of(tmp_path / "states")
    )
    assert not [line for line in flower_log if "lost" in line]


@pytest.mark.parametrize("name", PERSONAL)
def test_without_a_state_dir_resumed_clients_begin_anew_with_a_warning(
    name: str, federation: Any, flower_log: list[str], tmp_path: Path
) -> None:
    fed = federation(name)
    fed.run(rounds=2, checkpoint_dir=tmp_path)
    assert not flower_log
    _, result = fed.run(rounds=3, checkpoint_dir=tmp_path, resume=True)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
    told = [line for line in flower_log if "has lost its personal model, which it had after round 2" in line]
    assert sorted(line.partition("(partition ")[2][0] for line in told) == list("0123")


def test_a_first_visit_is_no_loss(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedproto", clients=3)
    grid = Coming(fed.app(), 3, since={2: 2}, gone=lambda *_: False)
    fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert not [line for line in flower_log if "lost" in line]


@pytest.mark.parametrize("name", PERSONAL)
def test_a_client_that_lost_its_model_is_told_apart_from_a_new_one(
    name: str, federation: Any, flower_log: list[str]
) -> None:
    fed = federation(name)

    def lose(stats: Any) -> None:
        if stats.server_round == 1:
            (context,) = [c for c in grid.contexts.values() if c.node_config["partition-id"] == 1]
            context.state = RecordDict()

    grid = InlineGrid(fed.app(), 4)
    strategy = fed.strategy(on_round=lose)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    lost = [line for line in flower_log if "has lost its personal model" in line]
    if name == "ktpfl-weights":
        # It goes by a model that is not there: this round is lost, in the next it is sent one.
        assert [r.participants for r in result.rounds] == [4, 3, 4]
        assert any("no model of an earlier round is kept here" in line for line in flower_log)
        return
    assert [(r.participants, r.failures) for r in result.rounds] == [(4, 0)] * 3
    (line,) = lost
    assert "(partition 1) has lost its personal model, which it had after round 1: it began anew" in line


# ---------------------------------------------------------------------- checkpoints


def in_a_process(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that may be killed, or may change what its whole process is allowed."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


SERVERS = """
    import os, signal, sys
    from pathlib import Path
    from flwr_kd.testing import Federation
    from flwr_kd import InlineGrid

    folder, when = Path(sys.argv[1]), ""
    writes = 0
    real = os.fsync

    def fsync(handle):
        global writes
        if when == "writing" and "checkpoint" in os.readlink(f"/proc/self/fd/{handle}") and "probe" not in \\
                os.readlink(f"/proc/self/fd/{handle}"):
            writes += 1
            if writes == 2:
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    def between(stats):
        if when == "between" and stats.server_round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    for when in sys.argv[2:]:
        child = os.fork()
        if not child:
            fed = Federation("fedhkd")
            fed.strategy(checkpoint_dir=folder / when, on_round=between).start(
                InlineGrid(fed.app(), 4), fed.initial(), num_rounds=3
            )
            os._exit(0)
        print(when, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
KILLED = {"writing": 1, "between": 2}
"""By when it is killed, the round of the last whole checkpoint."""


@pytest.fixture(scope="module")
def killed_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints of two servers, which were killed in different moments."""
    folder = tmp_path_factory.mktemp("killed")
    done = in_a_process(SERVERS, folder, *KILLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{when} {-signal.SIGKILL}" for when in KILLED], done.stderr
    return folder


@pytest.mark.program
@pytest.mark.xdist_group("killed servers")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the checkpoint's file by /proc")
@pytest.mark.parametrize(("when", "last"), KILLED.items())
def test_a_killed_process_leaves_a_whole_checkpoint(
    when: str, last: int, federation: Any, numbers: Any, killed_servers: Path
) -> None:
    """SIGKILL with half of round 2's checkpoint written, or after it: the last whole one is read."""
    folder = killed_servers / when
    assert len(list(folder.iterdir())) == (2 if when == "writing" else 1)
    found = Checkpoint.load(folder, "FedHKD")
    assert found is not None
    assert found.server_round == last
    fed = federation("fedhkd")
    _, expected = fed.run(rounds=3)
    _, result = fed.run(rounds=3, checkpoint_dir=folder, resume=True)
    assert numbers(result) == numbers(expected)[last:]
    # What the broken-off write left is gone.
    assert [path.name for path in folder.iterdir()] == [CHECKPOINT]


@pytest.mark.parametrize("place", ["file", "proc"])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_round_1(
    place: str, federation: Any, tmp_path: Path
) -> None:
    fed = federation("fedavg")
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints" if place == "file" else Path("/proc/checkpoints")
    asked: list[int] = []

    def client_fn(context: Context) -> Any:
        asked.append(1)
        raise AssertionError

    with pytest.raises(
        ConfigError, match=r"checkpoint_dir must be a folder that can be written to: .*checkpoints"
    ):
        fed.strategy(checkpoint_dir=folder).start(
            InlineGrid(ClientApp(client_fn=client_fn), 4), fed.initial(), num_rounds=1
        )
    assert not asked


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path
    from flwr_kd.testing import Federation
    from flwr_kd import InlineGrid

    fed = Federation("fedavg")

    def fill(stats):
        # From now on no file may grow beyond 100 bytes, as on a disk that is full.
        if stats.server_round == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        if stats.server_round == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    for rounds in sys.argv[2:]:
        result = fed.strategy(checkpoint_dir=Path(sys.argv[1], rounds), on_round=fill).start(
            InlineGrid(fed.app(), 4), fed.initial(), num_rounds=int(rounds)
        )
        print([r.participants for r in result.rounds])
        print("== the end of a run", file=sys.stderr, flush=True)
"""


@pytest.mark.program
def test_a_disk_that_is_full_costs_a_warning(tmp_path: Path) -> None:
    """Two runs: one ends with the disk still full, the other after there is space again."""
    done = in_a_process(FULL_DISK, tmp_path, 3, 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([4] * rounds) for rounds in (3, 4)]
    *logs, _ = done.stderr.split("== the end of a run")
    for rounds, last, log in zip((3, 4), (1, 4), logs, strict=True):
        for number in (2, 3):
            assert log.count(f"round {number}: no checkpoint could be written ([Errno 27]") == 1
        folder = tmp_path / str(rounds)
        assert [path.name for path in folder.iterdir()] == [CHECKPOINT]
        found = Checkpoint.load(folder, "FedAvg")
        assert found is not None
        assert found.server_round == last


@pytest.mark.parametrize("damage", ["empty", "half", "text"])
def test_a_checkpoint_that_cannot_be_read_is_refused(damage: str, federation: Any, tmp_path: Path) -> None:
    fed = federation("fedavg")
    fed.run(rounds=1, checkpoint_dir=tmp_path)
    file = tmp_path / CHECKPOINT
    data = file.read_bytes()
    file.write_bytes({"empty": b"", "half": data[: len(data) // 2], "text": b"no checkpoint " * 9}[damage])
    with pytest.raises(ConfigError, match=rf"{CHECKPOINT} cannot be read"):
        fed.run(rounds=2, checkpoint_dir=tmp_path, resume=True)


# ---------------------------------------------------------------------- personal models


def test_a_model_that_cannot_be_kept_is_refused_before_training(
    federation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 100)
    fed = federation("fedproto", clients=3)
    trained: list[int] = []
    monkeypatch.setattr(FedProtoClient, "train", lambda *_, **__: trained.append(1))
    with pytest.raises(
        HandshakeError, match=r"0 clients fit, 3 are needed; refused: .*a personal model of .*state-dir"
    ):
        fed.run()
    assert not trained
    # Those that name a folder take part.
    configs = [{"state-dir": str(tmp_path / "states")}, {}, {"state-dir": str(tmp_path / "states")}]
    monkeypatch.undo()
    monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 100)
    _, result = fed.run(grid={"node_configs": configs}, min_available_nodes=2)
    assert [sorted(r.bytes_by_partition) for r in result.rounds] == [[0, 2], [0, 2]]


def test_a_state_dir_that_cannot_be_written_is_refused_before_training(
    federation: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    configs = [{"state-dir": str(tmp_path / "file" / "states")}] * 2
    with pytest.raises(
        HandshakeError, match=r"state-dir must be a folder that can be written to: .*Not a directory"
    ):
        federation("fedproto", clients=2).run(grid={"node_configs": configs})


def test_a_state_dir_without_space_is_refused_before_training(
    federation: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    configs = [{"state-dir": str(tmp_path)}] * 2
    with pytest.raises(
        HandshakeError, match=r"state-dir .* has 0 MB free; a personal model of 0 MB needs twice"
    ):
        federation("fedproto", clients=2).run(grid={"node_configs": configs})


@pytest.mark.parametrize("run", ["../../etc", "a/b", "x" * 65, "ab\0", "é"])
def test_the_name_of_a_run_leads_nowhere_else(run: str, tmp_path: Path) -> None:
    context = Context(1, 2, {"state-dir": str(tmp_path)}, RecordDict(), {})
    with pytest.raises(personal_state.StateError, match=r"run-key must be at most 64 letters and digits"):
        personal_state.PersonalState(context).at(run, 1, known=0, saved=0)


def test_runs_on_the_same_nodes_do_not_share_models(federation: Any) -> None:
    """Flower gives each run a state of its own; so does a run-key where the state is the same."""
    fed = federation("fedproto")
    grid = InlineGrid(fed.app(), 4)
    losses = [
        [r.train_loss for r in fed.strategy().start(grid, fed.initial(), num_rounds=2).rounds]
        for _ in range(2)
    ]
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------- claims


def claiming(count: Any) -> Fault:
    def garble(content: RecordDict) -> None:
        content.metric_records["fitres.num_examples"] = MetricRecord({"num_examples": count})

    return Fault("garbage", garble=garble)


def test_the_weight_that_a_client_claims_is_capped(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedavg", clients=3)
    models: list[list[np.ndarray]] = []

    class Noting(FedAvg):
        def aggregate_phase(self, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
            kept = list(replies)
            models.extend([np.array(a) for a in reply.arrays] for reply in kept)
            weights.extend(reply.num_examples for reply in kept)
            return super().aggregate_phase(phase, server_round, kept, arrays)

    weights: list[int] = []
    strategy = Noting(max_examples=30, min_available_nodes=3, **QUICK)
    grid = InlineGrid(fed.app(), 3, faults={1: claiming(2**53)})
    result = strategy.start(grid, fed.initial(), num_rounds=2)
    assert weights == [24, 30, 26, 24, 30, 26]
    last = [np.average(np.float64(c), axis=0, weights=[24, 30, 26]) for c in zip(*models[3:], strict=True)]
    for found, expected in zip(result.arrays.to_numpy_ndarrays(), last, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    (line,) = flower_log
    assert f"(partition 1) claims {2**53} samples, and counts as 30 (max_examples)" in line


@pytest.mark.parametrize("name", ["fedproto", "fedhkd"])
def test_class_counts_are_capped_too(name: str, federation: Any) -> None:
    strategy, _ = federation(name).run(max_examples=2, rounds=1)
    counts = {k: v for k, v in strategy.state_arrays().items() if "counts" in k}
    (found,) = counts.values()
    # Each of the four clients has six or seven samples of each class; FedHKD does not share all of them.
    assert found.max() == 8
    assert name == "fedhkd" or found.tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("option", "value"), [("max_void_rounds", 0), ("max_examples", 0), ("max_examples", 2**54)]
)
def test_options_are_checked(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{option} must be in \[1, .*\], got {value}"):
        FedAvg(**{option: value})


def test_a_payload_cannot_be_larger_than_what_the_classes_need() -> None:
    node = Node(1, num_classes=10, feature_shape=(64,))
    hkd = registry.get("fedhkd").strategy()
    assert hkd.payload_limit("train", node) == 10 * (8 + 64 * 4 + 10 * 4 + 8)
    assert registry.get("fedhkd").strategy(max_payload_bytes=100).payload_limit("train", node) == 100
    proto = FedProto()
    assert proto.payload_limit("train", node) == 10 * (8 + 64 * 4 + 8)
    with pytest.raises(PayloadError, match=r"3000000 bytes is more than max_payload_bytes = 2720"):
        proto.reply_payloads["train"].from_bytes(
            b"x" * 3_000_000, max_bytes=proto.payload_limit("train", node)
        )


# ---------------------------------------------------------------------- introductions


def test_a_node_that_cannot_introduce_itself_is_told_of_once(
    federation: Any, flower_log: list[str], make_model: Any, make_blobs: Any
) -> None:
    calls: list[int] = []

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 1:
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("the data is not mounted yet")
        return FedAvgClient(make_model(), make_blobs(16, 0), context=context, device="cpu").to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), 2)
    result = FedAvg(min_available_nodes=2, **QUICK).start(
        grid, ArrayRecord(make_model().state_dict()), num_rounds=1, timeout=30.0
    )
    assert result.rounds[0].participants == 2
    (line,) = flower_log
    assert "did not introduce itself, and is asked again" in line
    assert "the data is not mounted yet" in line


@pytest.mark.parametrize("again", [True, False], ids=["told", "silent"])
def test_what_flower_cannot_decode_costs_its_own_contribution(
    again: bool, federation: Any, flower_log: list[str]
) -> None:
    """A client's bytes are decoded inside ``pull_messages``; what that raises must not end the run, nor hold it up.

    As a SuperLink does, the grid hands out each answer once.
    """

    class Undecodable(InlineGrid):
        lost: ClassVar[dict[str, Message]] = {}

        def pull_messages(self, message_ids: Any) -> Any:
            for message_id in message_ids:
                if message_id in self.lost:
                    return [self.lost[message_id]]
            came = list(super().pull_messages(message_ids))
            for reply in came:
                node = self.contexts[reply.metadata.src_node_id].node_config["partition-id"]
                if node == 2 and reply.metadata.message_type == "train":
                    if again:
                        sent = self.sent[reply.metadata.reply_to_message_id]
                        self.lost[sent.metadata.message_id] = Message(Error(3, "gone"), reply_to=sent)
                    raise ValueError("Invalid header\nof an object")
            return came

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            self.sent = dict(zip(ids, messages, strict=True))
            return ids

    fed = federation("fedavg")
    strategy: KDStrategy = fed.strategy()
    # After an error nothing waits for the timeout, which is longer than a test may take.
    result = strategy.start(
        Undecodable(fed.app(), 4), fed.initial(), num_rounds=2, timeout=3600.0 if again else 2.0
    )
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1)] * 2
    assert len(flower_log) == 2
    if again:
        assert all("is dropped: it cannot be fetched: Invalid header" in line for line in flower_log)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedhkd"])
def test_a_mean_holds_no_more_for_more_clients(name: str, make_blobs: Any) -> None:
    """In models; the client that is at work and Flower's copies of its answer are among them."""
    method = registry.get(name)

    class Echo(method.client):  # type: ignore[misc, name-defined]
        def phase_train(self, task: Any) -> Any:
            self.load(task)
            return Answer(self.arrays(task.names), self.knowledge(task), num_examples=12)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, 20_000), torch.nn.Linear(20_000, 4)
        )

    def client_fn(context: Context) -> Any:
        return Echo(model(), make_blobs(12, 0), context=context, device="cpu").to_client()

    def peak(clients: int, kind: Any) -> float:
        grid = InlineGrid(ClientApp(client_fn=client_fn), clients)
        initial = ArrayRecord(model().state_dict())
        strategy = kind(method.config(["batch-size=8"]), min_available_nodes=clients)
        gc.collect()
        tracemalloc.start()
        try:
            result = strategy.start(grid, initial, num_rounds=1)
            highest = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert result.rounds[0].participants == clients
        return highest / sum(len(array.data) for array in initial.values())

    class HoldsAll(method.strategy):  # type: ignore[misc, name-defined]
        def aggregate_phase(self, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
            return super().aggregate_phase(phase, server_round, list(replies), arrays)

    few, many = peak(3, method.strategy), peak(30, method.strategy)
    assert many < few + 1.5 < 15
    # As it would be if all were held.
    assert peak(30, HoldsAll) > 30


# ---------------------------------------------------------------------- what the log says of an error

RAY = """ray::ClientAppActor.run() (pid=71, ip=127.0.0.1, actor_id=9f)
  File "client_app.py", line 163, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: no room"""
RAY_SAYS = "Exception ClientAppException occurred. Message: no room"


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (2, "<class 'ValueError'>:<'no room\nfor it'>", "ValueError: no room"),
        (
            2,
            "<class 'flwr_kd.checks.ConfigError'>:<'model must be there'>",
            "flwr_kd.checks.ConfigError: model must be there",
        ),
        (2, "<class 'KeyError'>:<''a''>", "KeyError: 'a'"),
        (2, "<class 'RuntimeError'>:<''>", "RuntimeError"),
        (2, f"<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'{RAY}'>", RAY_SAYS),
        (2, f"<class 'x.RayTaskError'>:<'{RAY}'>", RAY_SAYS),
        (
            0,
            "<class 'ray.exceptions.ActorUnavailableError'>:<'The actor 9f is unavailable: x'>",
            "its process died",
        ),
        (0, "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly'>", "its process died"),
        (0, "<class 'ray.exceptions.OutOfMemoryError'>:<'Task was killed'>", "its process died"),
        (8, "ClientApp stopped responding.", "its process died"),
        (5, "Error: Node Unavailable", "its SuperNode is gone (Error: Node Unavailable)"),
        (3, "Error: Message Unavailable", "it did not answer in time, or its answer was lost"),
        (2, "", "no reason given"),
        (2, "\n \n", "no reason given"),
        (2, "a\n\x1b[31mWARNING: forged\x00", "?[31mWARNING: forged?"),
        (2, "x" * 5000, "x" * 300 + "..."),
    ],
)
def test_an_error_is_told_in_one_line(code: int, reason: str, expected: str) -> None:
    assert reason_of(Error(code, reason)) == expected


def test_a_node_that_was_mended_is_asked_again(federation: Any, flower_log: list[str]) -> None:
    """Refused for its model, away for a round, and back under the same id, as a SuperNode with a key is."""
    fed = federation("fedavg", clients=3)
    fed.models = ["mlp", "mlp", "lenet"]
    grid = Coming(fed.app(), 3, since={}, gone=lambda partition, asked: partition == 2 and asked == 3)

    def mend(stats: Any) -> None:
        fed.models = ["mlp", "mlp", "mlp"]

    strategy = fed.strategy(min_available_nodes=2, on_round=mend)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [r.participants for r in result.rounds] == [2, 2, 3]
    assert sum("is refused" in line for line in flower_log) == 1


def test_another_node_under_a_partitions_name_is_told_of(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedavg", clients=3)
    claims = [{}, {}, {"partition-id": 1}]
    first, second, third = InlineGrid(fed.app(), 3).contexts
    away = {first: lambda asked: False, second: lambda asked: asked >= 3, third: lambda asked: asked < 3}

    class Replaced(InlineGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            return [i for i in self.contexts if not away[i](self.asked)]

    grid = Replaced(fed.app(), 3, node_configs=claims)
    result = fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [sorted(r.bytes_by_partition) for r in result.rounds] == [[0, 1]] * 3
    (line,) = flower_log
    assert f"node {third} (partition 1) comes in place of node {second}" in line


def test_a_round_is_kept_before_it_is_evaluated(federation: Any, tmp_path: Path) -> None:
    fed = federation("fedavg")

    def fail(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            raise RuntimeError("no test data")
        return None

    strategy = fed.strategy(checkpoint_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"no test data"):
        strategy.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=2, evaluate_fn=fail)
    found = Checkpoint.load(tmp_path, "FedAvg")
    assert found is not None
    assert found.server_round == 1


@pytest.mark.parametrize("name", ["fedproto", "fedhkd"])
def test_knowledge_beyond_all_measure_is_refused(name: str, federation: Any, flower_log: list[str]) -> None:
    """Squares of it would be infinite at every client in the next round."""
    fed = federation(name)
    kind = fed.strategy().reply_payloads["train"]
    field = {"fedproto": "prototypes", "fedhkd": "representations"}[name]

    def garble(content: RecordDict) -> None:
        record = content.config_records["fitres.metrics"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "check", lambda self: None)
            message = kind.from_bytes(record["payload"])
            values = np.full_like(getattr(message, field), 1e30)
            record["payload"] = replace(message, **{field: values}).to_bytes()

    faults = {1: Fault("garbage", frozenset({1}), garble)}
    _, result = fed.run(rounds=2, grid={"faults": faults})
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    (line,) = [line for line in flower_log if "is dropped" in line]
    assert f"field '{field}' must be within ±65504, got 1e+30" in line


def test_a_handshake_has_a_bound(federation: Any, flower_log: list[str]) -> None:
    class Endless(FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            names = json.dumps(["x" * 20] * 300_000)
            return {**super().get_properties(config), "arrays": f"[{names}, {names}, {names}]"}

    fed = federation("fedavg")
    ours = fed.client_fn

    def client_fn(context: Context) -> Any:
        client = ours(context)
        if context.node_config["partition-id"] == 1:
            client.numpy_client.__class__ = Endless
        return client

    result = fed.strategy(min_available_nodes=3).start(
        InlineGrid(ClientApp(client_fn=client_fn), 4), fed.initial(), num_rounds=1
    )
    assert result.rounds[0].participants == 3
    (line,) = flower_log
    assert "is refused: 'arrays' has 21600006 characters, more than 4000000" in line
