"""A run of an app with few settings: its log, its result and its tracker are in the home folder of the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flwr_kd.results import files
from tests.apps.applications import APPS
from tests.apps.conftest import Simulation
from tests.processes import wait_for


@pytest.mark.flwr_run
@pytest.mark.ray
@pytest.mark.xdist_group("superlink")
def test_the_log_names_the_result_and_has_a_line_per_round(superlink: Simulation) -> None:
    federation = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
    values = 'num-server-rounds=2 min-nodes=2 limit=200 local-epochs=1 log="tensorboard"'
    command = (
        "flwr",
        "run",
        APPS / "fedhkd",
        "--stream",
        "--run-config",
        values,
        "--federation-config",
        federation,
    )
    stream = superlink.start("default-result", *command)
    file = Path(stream.wait_for_log(r"result: (\S+/result\.json)")[1])
    home = Path(superlink.environment["HOME"])
    assert file.parent.parent == home / "flwr-kd" / "runs"
    assert file.parent.name.isdigit()
    wait_for(file.exists, "the result is written")
    (run,) = files.load(file.parent).runs
    for stats in run.rounds:
        assert stats.local_accuracy is not None
        assert re.search(
            rf"round {stats.round} of 2: accuracy local {100 * stats.local_accuracy:.1f} %, .*"
            rf"{stats.bytes_up / 1e6:.3g} MB up, .*{stats.seconds:.1f} s; 2 of 2 clients",
            stream.log,
        )
    assert f"log: tensorboard --logdir {file.parent / 'tensorboard'}" in stream.log
    assert list((file.parent / "tensorboard" / "FedHKD-seed0").glob("events.out.tfevents.*"))
