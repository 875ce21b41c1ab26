"""The distances of a run's global models to its last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flwr_kd import registry
from flwr_kd.experiments import distances
from flwr_kd.experiments.distances import Trajectory
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.results.schema import RoundResult


def arrays(value: float) -> ArrayRecord:
    state = {
        "a": torch.full((2, 3), value),
        "running": torch.full((4,), 100 * value),
        "b": torch.tensor([2 * value]),
    }
    return ArrayRecord(state)


def test_distances_are_of_the_parameters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_BLOCK", 4)
    kept = Trajectory(tmp_path / "models", ["a", "b"])
    for number, value in ((0, 9.0), (1, 5.0), (2, 2.0), (2, 3.0), (4, 1.0)):
        kept.keep(number, arrays(value))
    # Six numbers differ by d, and one by 2 d.
    assert kept.squared_distances([1, 2, 3, 4]) == {1: 160.0, 2: 40.0, 4: 0.0}
    # Without the last model there is nothing to measure from.
    assert kept.squared_distances([1, 2, 3]) == {}
    rounds = [RoundResult(n, None, None, None, 1, 1, 1.0, 1, 0) for n in (1, 4)]
    assert [each.distance_to_last for each in kept.measured(rounds)] == [160.0, 0.0]
    assert not (tmp_path / "models").exists()


def test_a_run_measures_the_distances_of_its_models(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clients": 2, "rounds": 3, "limit": 100, "backend": "inline", "device": "cpu"}
    method = registry.get("fedavg")
    plain = run(method, Experiment(**options), keep=tmp_path / "kept")
    result = run(method, Experiment(**options, distances=True), checkpoint_dir=tmp_path / "run")
    found = [each.distance_to_last for each in result.rounds]
    assert found[2] == 0
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] > found[1] > 0
    assert [each.local_accuracy for each in result.rounds] == [each.local_accuracy for each in plain.rounds]
    assert [each.distance_to_last for each in plain.rounds] == [None] * 3
    assert not list((tmp_path / "run").rglob("*.npy"))


def test_a_resumed_run_has_the_distances_of_a_whole_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clients": 2, "rounds": 3, "limit": 100, "backend": "inline", "device": "cpu"}
    experiment, method = Experiment(**options, distances=True), registry.get("fedavg")
    whole = run(method, experiment)

    def stop(stats: Any) -> None:
        if stats.server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(method, experiment, checkpoint_dir=tmp_path, on_round=stop)
    resumed = run(method, experiment, checkpoint_dir=tmp_path, resume=True)
    expected = [each.distance_to_last for each in whole.rounds]
    assert [each.distance_to_last for each in resumed.rounds] == pytest.approx(expected)
    assert np.isfinite(expected).all()


def test_a_method_without_a_global_model_has_no_distances() -> None:
    options: dict[str, Any] = {"clients": 2, "rounds": 1, "limit": 100, "backend": "inline", "device": "cpu"}
    result = run(registry.get("fedproto"), Experiment(**options, distances=True))
    assert result.rounds[0].distance_to_last is None
