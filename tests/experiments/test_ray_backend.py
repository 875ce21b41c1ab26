"""Clients whose process ends in the Ray simulation, and personal models in files with each backend."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

import flwr_kd
from flwr_kd import registry
from flwr_kd.experiments import ray_backend, runner
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.server.records import KDResult
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.inline_grid import InlineGrid
from tests.processes import wait_for

# A method with personal models, so that what a client kept before a round decides its numbers.
METHOD = "fedproto"
SMALL: dict[str, Any] = {
    "clients": 4, "rounds": 3, "limit": 200, "workers": 2, "backend": "inline", "device": "cpu"
}  # fmt: skip
FAULTS = {
    0: [Fault("raise", frozenset({1}))],
    1: [Fault("raise", frozenset({1})), Fault("raise", frozenset({3}))],
    2: [Fault("raise", frozenset({2}))],
}


def client_app(experiment: Experiment, state_dir: Path | None, **options: Any) -> ClientApp:
    folder = None if state_dir is None else str(state_dir)
    build = functools.partial(runner.build_client, METHOD, experiment, folder)
    return ClientApp(client_fn=build, **options)


def server(experiment: Experiment, results: list[KDResult]) -> Callable[[Grid], None]:
    method = registry.get(METHOD)
    strategy = method.strategy(method.config(), min_available_nodes=experiment.clients)

    def serve(grid: Grid) -> None:
        results.append(strategy.start(grid, ArrayRecord(), num_rounds=experiment.rounds))

    return serve


def numbers(result: KDResult) -> list[dict[str, Any]]:
    rounds = [dataclasses.asdict(stats) for stats in result.rounds]
    for stats in rounds:
        assert stats.pop("seconds") > 0
    return rounds


def inline_numbers(experiment: Experiment) -> list[dict[str, Any]]:
    results: list[KDResult] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        server(experiment, results)(
            InlineGrid(client_app(experiment, None), experiment.clients, faults=FAULTS)
        )
    finally:
        torch.set_num_threads(threads)
    return numbers(results[0])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.ray
def test_a_client_whose_process_dies_costs_its_own_answer_only(tmp_path: Path, flower_log: list[str]) -> None:
    """Two processes end in round 1, as many as there are workers, and one in round 2. One client is asked again.

    That is client 2, whose process ends only at the first attempt of round 3.
    """
    experiment = Experiment(**{**SMALL, "backend": "ray"})
    calls_file, states = tmp_path / "calls", tmp_path / "states"
    # Inside this function, so that Ray sends it by value: its workers cannot import this module.
    faults, raises = FAULTS, "3"

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        partition, about = int(context.node_config["partition-id"]), message.metadata
        call = f"{about.message_type} {about.group_id} {partition}"
        with calls_file.open("a+") as file:
            file.write(f"{call} {os.getpid()}\n")
            file.seek(0)
            first = file.read().count(f"{call} ") == 1
        if any(fault.applies(message) for fault in faults.get(partition, ())):
            if about.group_id == raises:
                raise RuntimeError("injected fault")
            os._exit(1)
        if call == "train 2 3" and first:
            os._exit(1)
        return call_next(message, context)

    results: list[KDResult] = []
    app = client_app(experiment, states, mods=[mod])
    ray_backend.run_ray(app, experiment, server(experiment, results))
    failed = [line for line in flower_log if " failed: " in line]
    actual = numbers(results[0])
    assert [(stats["participants"], stats["failures"]) for stats in actual] == [(2, 2), (3, 1), (3, 1)]
    assert [sorted(stats["clients"]) for stats in actual] == [[2, 3], [0, 1, 3], [0, 2, 3]]
    assert actual == inline_numbers(experiment)

    lines = [line.rsplit(maxsplit=1) for line in calls_file.read_text().splitlines()]
    calls = Counter(call for call, _ in lines if call.startswith("train"))
    # Ray may make one more call where the process ended, and makes none where the client raised.
    twice = {"train 1 0", "train 1 1", "train 2 2", "train 2 3"}
    assert set(calls) == {f"train {r} {p}" for r in (1, 2, 3) for p in range(4)}
    assert {name for name, count in calls.items() if count > 1} <= twice
    assert max(calls.values()) <= 2
    assert [sum(f"(partition {p})" in line for line in failed) for p in range(4)] == [1, 2, 1, 0]
    assert all(len(line.splitlines()) == 1 for line in failed)
    # Ray's workers also store the personal models in the folder that the node config names.
    assert {file.name.split("-node-")[1].split("-")[0] for file in states.iterdir()} == set("0123")

    wait_for(lambda: not any(alive(int(pid)) for _, pid in lines), "the end of the clients' processes")


@pytest.mark.slow
@pytest.mark.ray
def test_clients_of_the_message_api_in_ray(flower_log: list[str]) -> None:
    """What raises, and what personal models give, is the same as with a ``NumPyClient`` in this process."""
    experiment = Experiment(**{**SMALL, "backend": "ray"})
    results: list[KDResult] = []
    # Inside this function, so that Ray sends it by value: its workers cannot import this module.
    faults = FAULTS

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        if any(fault.applies(message) for fault in faults.get(int(context.node_config["partition-id"]), ())):
            raise RuntimeError("injected fault")
        return call_next(message, context)

    build = functools.partial(runner.build_client, METHOD, experiment, None)
    app = flwr_kd.client_app(build, mods=[mod])
    ray_backend.run_ray(app, experiment, server(experiment, results))
    assert numbers(results[0]) == inline_numbers(experiment)
    assert sum(" failed: RuntimeError: injected fault" in line for line in flower_log) == 4


@pytest.mark.parametrize("backend", ["inline", "ray", pytest.param("processes", marks=pytest.mark.program)])
def test_large_personal_models_are_kept_in_files(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The inline backend runs what Ray would get.
    monkeypatch.setattr(runner, "run_ray", lambda *args, **_: runner.run_inline(*args))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    method, experiment = registry.get(METHOD), Experiment(**{**SMALL, "backend": backend})
    seen: list[list[str]] = []

    def look(stats: Any) -> None:
        seen.append(sorted(file.name.split("-node-")[1] for file in tmp_path.rglob("*.safetensors")))

    small = run(method, experiment, on_round=look)
    assert seen == [[], [], []]
    monkeypatch.setattr(runner, "LARGE_STATE", 0)
    large = run(method, experiment, on_round=look)
    # The models of the last two rounds of each client.
    kept = [
        [f"{p}-round-{r}.safetensors" for p in range(4) for r in rounds] for rounds in ([1], [1, 2], [2, 3])
    ]
    assert seen[3:] == kept
    assert list(tmp_path.iterdir()) == []
    assert [dataclasses.replace(stats, seconds=0.0) for stats in large.rounds] == [
        dataclasses.replace(stats, seconds=0.0) for stats in small.rounds
    ]
