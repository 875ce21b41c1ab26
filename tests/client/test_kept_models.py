"""Personal models between rounds: where they cannot be kept, and whose they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd.client import personal_state
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.fedproto import FedProtoClient
from flwr_kd.transport.inline_grid import InlineGrid


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
def test_a_run_key_cannot_lead_to_another_folder(run: str, tmp_path: Path) -> None:
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
