"""Faults of real processes: each costs a run what docs/deploy.md says, and no more."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import registry
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run as simulate
from flwr_kd.results.schema import Comparison
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.inline_grid import InlineGrid
from tests.superlink import Deployment, living, wait_for

APP = Path(__file__).resolve().parent / "faulty"
SEED = 5
TIMED_OUT = "did not reply in time"
"""In the log where the timeout of a phase, and not Flower, ended the wait for a reply."""


def settings(faults: list[tuple[int, int, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a run config with these faults, each of which is (partition, round, kind)."""
    text = " ".join(f"{partition}@{server_round}@{kind}" for partition, server_round, kind in faults or [])
    return {"faults": text, **{name.replace("_", "-"): value for name, value in changes.items()}}


def counts(comparison: Comparison) -> list[tuple[int, int]]:
    """Return (participants, failures) by round."""
    (run,) = comparison.runs
    return [(r.participants, r.failures) for r in run.rounds]


def simulated(method: str, rounds: int, monkeypatch: pytest.MonkeyPatch, faults: dict[int, Fault]) -> Any:
    """Run the inline backend with the same partitions and the same faults, and return its result."""
    kind = registry.get(method)
    grid = InlineGrid.__init__

    def with_faults(self: InlineGrid, *args: Any, **kwargs: Any) -> None:
        grid(self, *args, **kwargs, faults=faults)

    monkeypatch.setattr(InlineGrid, "__init__", with_faults)
    experiment = Experiment(clients=3, rounds=rounds, seed=SEED, backend="inline", workers=1, device="cpu")
    return simulate(kind, experiment, kind.config(["local-epochs=1", "batch-size=64"]))


def same(comparison: Comparison, expected: Any, *, last: int) -> None:
    """Compare the numbers of the last rounds."""
    (run,) = comparison.runs
    pairs = list(zip(run.rounds[-last:], expected.rounds[-last:], strict=True))
    assert len(pairs) == last
    for ours, theirs in pairs:
        assert ours.local_accuracy == pytest.approx(theirs.local_accuracy, abs=1e-6)
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-6)
        # This app's clients have no common test set.
        mine, simulated = (
            {key: (values["local_accuracy"], values["local_top5"]) for key, values in each.clients.items()}
            for each in (ours, theirs)
        )
        assert mine == simulated


@pytest.mark.flwr_run
@pytest.mark.slow
def test_clients_that_raise_or_end_their_process(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds 1 and 2 use the replies of the others, with a line in the log for each fault. Round 3 has all clients.

    Slow, since Flower reports the end of a process only after heartbeats are missed.
    """
    run = deployment.submit(APP, settings([(0, 1, "raise"), (1, 2, "exit")], num_server_rounds=3))
    result = run.result()
    assert counts(result) == [(2, 1), (2, 1), (3, 0)]
    raised(run.log, deployment, times=1)
    (line,) = re.findall(r"^.*process died.*$", run.log, flags=re.MULTILINE)
    assert f"node {deployment.nodes[1].node_id} (partition 1) failed: its process died" in line
    # Flower reports both faults. The run does not wait until the timeout of the phase.
    assert TIMED_OUT not in run.log
    faults = {0: Fault("raise", frozenset({1})), 1: Fault("raise", frozenset({2}))}
    same(result, simulated("fedavg", 3, monkeypatch, faults), last=3)


@pytest.mark.flwr_run
@pytest.mark.slow
def test_clients_of_the_message_api_beside_a_numpy_client(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of the simulation, also of a round in which one of them raises."""
    changes: dict[str, Any] = {"by_messages": "0 2", "num_server_rounds": 2, "method": "fedhkd"}
    run = deployment.submit(APP, settings([(0, 1, "raise")], **changes))
    result = run.result()
    assert counts(result) == [(2, 1), (3, 0)]
    raised(run.log, deployment, times=1)
    same(result, simulated("fedhkd", 2, monkeypatch, {0: Fault("raise", frozenset({1}))}), last=2)


def raised(log: str, link: Deployment, times: int) -> None:
    """Check that a client of partition 0 that raised is logged this many times, in one line each."""
    lines = re.findall(r"^.*no room on the device.*$", log, flags=re.MULTILINE)
    expected = f"node {link.nodes[0].node_id} (partition 0) failed: ValueError: no room on the device"
    assert [expected in line for line in lines] == [True] * times
    assert "a second line" not in log


@pytest.mark.slow
@pytest.mark.flwr_run
def test_a_straggler_is_not_counted_into_a_later_round(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its reply to round 1 comes in round 2: the numbers are those of a client that did not reply in round 1.

    The straggler is the first whose reply is fetched: the replies of the others are still there after the timeout,
    which is a multiple of the time that the handshakes take. Like a training, each of them starts a process.
    """
    answer = tmp_path / "answer"
    run = deployment.submit(APP, settings([(0, 1, answer)], patience=5.0, num_server_rounds=2))
    run.wait_for_log(r"\[ROUND 2/")
    answer.touch()
    result = run.result()
    assert counts(result) == [(2, 1), (3, 0)]
    (line,) = re.findall(rf"^.*{TIMED_OUT}.*$", run.log, flags=re.MULTILINE)
    assert f"node {deployment.nodes[0].node_id} (partition 0)" in line
    same(result, simulated("fedavg", 2, monkeypatch, {0: Fault("raise", frozenset({1}))}), last=2)


@pytest.mark.slow
@pytest.mark.flwr_run
def test_too_few_answers_end_the_run(deployment: Deployment) -> None:
    faults = [(0, r, "raise") for r in (2, 3)]
    run = deployment.submit(APP, settings(faults, min_train_nodes=3, max_void_rounds=2, num_server_rounds=5))
    assert run.wait() == "finished:failed"
    assert "round 2 is void: 2 usable replies, at least 3 are needed" in run.log
    assert "VoidRoundsError: 2 rounds in a row were void: the last, round 3, had 2 usable replies" in run.log
    assert "[ROUND 4/" not in run.log
    assert not run.out.exists()
    raised(run.log, deployment, times=2)


@pytest.mark.flwr_run
@pytest.mark.slow
def test_a_personal_model_of_300_mb(deployment: Deployment) -> None:
    """It is kept in a ``state-dir``. A SuperNode without one is refused before it trains."""
    other = deployment.add(partition_id=3, num_partitions=4, state_dir=None).wait_online()
    folder = deployment.nodes[0].state_dir
    # Files of earlier runs stay.
    before = set(folder.glob("run-*"))
    kept = deployment.submit(APP, settings([], method="fedproto", large=0, min_nodes=4, num_server_rounds=2))
    assert counts(kept.result()) == [(4, 0), (4, 0)]
    sizes = [file.stat().st_size for file in set(folder.glob("run-*-node-0-*")) - before]
    assert len(sizes) == 2
    assert all(300_000_000 < size < 301_000_000 for size in sizes)
    # Flower's own state drops 300 MB without a warning. With it the client would begin anew in round 2.
    assert "lost" not in kept.log
    refused = deployment.submit(APP, settings([], method="fedproto", large=3, num_server_rounds=1))
    assert counts(refused.result()) == [(3, 0)]
    (line,) = re.findall(r"^.*is refused.*$", refused.log, flags=re.MULTILINE)
    assert f"node {other.node_id} is refused: a personal model of 300 MB is more than the 150 MB" in line
    assert "--node-config 'state-dir=" in line


@pytest.mark.flwr_run
@pytest.mark.slow
def test_nodes_come_late_and_are_killed_and_come_back(
    new_deployment: Callable[..., Deployment], tmp_path: Path
) -> None:
    """A third SuperNode joins in round 1, is killed while it trains in round 3, and is back in round 4.

    Without a ``state-dir`` it has lost its model, which the log does not confuse with its first visit. Slow, since
    Flower reports a SuperNode as gone only after heartbeats are missed.
    """
    link = new_deployment(2)
    go_on, never = tmp_path / "go-on", tmp_path / "never"
    run = link.submit(
        APP,
        settings([(0, 1, go_on), (2, 3, never)], method="fedproto", min_nodes=2, num_server_rounds=4),
    )
    run.wait_for_log(r"\[ROUND 1/")
    late = link.add(partition_id=2, num_partitions=3, state_dir=None).wait_online()
    first_id = late.node_id
    go_on.touch()
    run.wait_for_log(r"\[ROUND 3/")
    wait_for(late.clients, "its training in round 3")
    kill(late)
    late.restart()
    assert late.node_id != first_id
    result = run.result()
    assert counts(result) == [(2, 0), (3, 0), (2, 1), (3, 0)]
    # Flower reports it. The run does not wait until the timeout of the phase.
    assert TIMED_OUT not in run.log
    (line,) = re.findall(r"^.*SuperNode is gone.*$", run.log, flags=re.MULTILINE)
    assert f"node {first_id} (partition 2) failed: its SuperNode is gone" in line
    (line,) = re.findall(r"^.*lost its personal model.*$", run.log, flags=re.MULTILINE)
    assert (
        f"node {late.node_id} (partition 2) has lost its personal model, which it had after round 2" in line
    )
    assert "the personal model of round 2 is no longer here" in late.log


def kill(node: Any) -> None:
    """End a SuperNode and its clients at once, as a power failure does."""
    for pid in node.clients():
        os.kill(pid, signal.SIGKILL)
    node.kill()


def server_app(link: Deployment) -> int:
    """Return the id of the process in which the ServerApp runs."""
    processes = []
    for pid, _ in living():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        mine = f"FLWR_KD_TESTS={link.folder}".encode() in environment
        if mine and any(word.endswith(b"/flwr-serverapp") for word in words):
            processes.append(pid)
    (pid,) = processes
    return pid


@pytest.mark.flwr_run
def test_a_killed_server_is_resumed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server is killed in round 3. A new ``flwr run`` ends with the numbers of an undisturbed one.

    Client 1 had already trained in round 3. It repeats that round from the same model as the first time.
    """
    go_on = tmp_path / "go-on"
    shared = {
        "method": "fedproto",
        "num_server_rounds": 3,
        "checkpoint_dir": str(tmp_path / "checkpoint"),
    }
    broken = deployment.submit(APP, settings([(0, 3, go_on)], **shared))
    broken.wait_for_log(r"\[ROUND 3/")
    states = deployment.nodes[1].state_dir
    wait_for(lambda: list(states.glob("run-*-node-1-round-3.*")), "client 1's round 3")
    os.kill(server_app(deployment), signal.SIGKILL)
    go_on.touch()
    assert broken.wait() == "finished:failed"
    resumed = deployment.submit(APP, settings([], resume=True, **shared))
    result = resumed.result()
    assert "Resuming after round 2" in resumed.log
    assert counts(result) == [(3, 0)]
    assert "lost" not in resumed.log
    same(result, simulated("fedproto", 3, monkeypatch, {}), last=1)


def test_the_partitions_are_those_of_the_simulation() -> None:
    """The comparisons above need three clients that all have data."""
    splits = client_splits(Experiment(clients=3, seed=SEED))
    assert len(splits) == 3
    assert all(len(train) and len(test) for train, test in splits)
