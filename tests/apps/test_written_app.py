"""An app that ``flwr-kd app`` has written, with ``flwr run``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import registry
from flwr_kd.app_files import AppProject


@pytest.mark.slow
@pytest.mark.flwr_run
@pytest.mark.ray
@pytest.mark.xdist_group("simulation")
@pytest.mark.parametrize(("name", "settings"), [("fedproto", {"global-model": "average"}), ("feddf", {})])
def test_it_runs_in_flowers_simulation(
    name: str, settings: dict[str, Any], superlink: Any, tmp_path: Path
) -> None:
    AppProject(name=f"my-{name}", methods=(registry.get(name),)).write(tmp_path / f"my-{name}")
    given = {"num-server-rounds": 2, "min-nodes": 3, "limit": 300, "local-epochs": 1, **settings}
    (run,) = superlink.run(tmp_path / f"my-{name}", given, 3).runs
    assert run.method == name
    assert [(stats.participants, stats.failures) for stats in run.rounds] == [(3, 0)] * 2
    # In a simulation no client has to allow that its model is measured.
    assert all(math.isfinite(stats.global_accuracy) for stats in run.rounds)
