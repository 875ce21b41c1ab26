"""Malicious clients on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flwr_kd.cli import app
from flwr_kd.experiments.experiment import Experiment, attacker_ids


def test_a_comparison_with_malicious_clients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--backend inline --clients 3 --rounds 2 --limit 150 --device cpu --attackers 1 --out o"
    argv = ["flwr-kd", "compare", "fedavg", "fedproto", "--seeds", "0", "--attack", "nan", *options.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert not caught.value.code, capsys.readouterr().err
    document = json.loads((tmp_path / "o" / "result.json").read_text())
    assert (document["config"]["attack"], document["config"]["attackers"]) == ("nan", 1)
    failures = {run["method"]: [r["failures"] for r in run["rounds"]] for run in document["runs"]}
    assert failures == {"fedavg": [1, 1], "fedproto": [0, 0]}
    assert "note: nan changes nothing of what fedproto send" in capsys.readouterr().out
    experiment = Experiment(clients=3, attack="nan", attackers=1)
    assert document["config"]["attacker_ids"] == {"0": sorted(attacker_ids(experiment))}
