"""The shared matrix finds methods that break its contracts, and says which, where and how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from torch import Tensor
from torch.nn import functional

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.server.records import Reply
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedproto import FedProto
from flwr_kd.testing import CHECKS, CheckError, check_method
from flwr_kd.testing.recording import Case, cases


def refused(name: str, check: str) -> str:
    with pytest.raises(CheckError) as caught:
        check_method(name, checks=[check])
    return str(caught.value)


def test_state_of_an_earlier_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedProto, "reset", lambda self: None)
    text = refused("fedproto", "a-strategy-can-be-started-again")
    parts = re.fullmatch(
        "fedproto: a-strategy-can-be-started-again: the second start has other numbers than the first one "
        r"of another strategy: (\w+) of compared round 1 is (\S+), and not (\S+); "
        "expected: the same: reset all state",
        text,
    )
    assert parts is not None, text
    assert parts[1] in ("local_accuracy", "train_loss", "bytes_up", "bytes_down")
    assert parts[2] != parts[3]


def test_what_a_client_failed_with_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    real, here = FedAvgClient.phase_train, os.getpid()
    rounds: set[int] = {2}

    def failing(self: Any, task: Any) -> Any:
        if os.getpid() != here and task.server_round in rounds:
            raise RuntimeError("no memory left")
        return real(self, task)

    monkeypatch.setattr(FedAvgClient, "phase_train", failing)
    text = refused("fedavg", "processes-give-the-same-numbers")
    assert (
        "2 processes give other numbers than this one: failures of compared round 2 is 4, and not 0; " in text
    )
    assert "logged meanwhile:\n- " in text
    assert "no memory left" in text
    rounds.add(1)
    text = refused("fedavg", "processes-give-the-same-numbers")
    assert "raised VoidRoundsError: every round was void" in text
    assert "no memory left" in text


def test_a_rule_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedProto, "check_reply", lambda self, phase, reply: None)
    text = refused("fedproto", "broken-rules-are-named")
    assert text.startswith("fedproto: broken-rules-are-named: 3 kinds of faults:\n- 'used: ")
    assert "more samples than there are" in text
    assert "another C" in text


def test_a_global_generator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FedAvg.aggregate_phase

    def noisy(self: Any, phase: str, server_round: int, replies: Iterable[Reply], arrays: Any) -> Any:
        new = real(self, phase, server_round, replies, arrays)
        rng = np.random.default_rng()
        return ArrayRecord([value.numpy() + rng.random() * 1e-3 for value in (new or ArrayRecord()).values()])

    monkeypatch.setattr(FedAvg, "aggregate_phase", noisy)
    assert refused("fedavg", "same-seed-same-numbers").startswith("fedavg: same-seed-same-numbers: ")


def test_an_error_in_the_method_is_a_failure_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "aggregate_phase", lambda *_: 1 / 0)
    text = refused("fedavg", "two-rounds-reach-everyone")
    assert text.startswith("fedavg: two-rounds-reach-everyone: raised ZeroDivisionError: ")
    assert text.endswith("; expected: no error")


def test_a_registration_that_contradicts_its_classes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedProto, "sends_weights", True)
    text = refused("fedproto", "method-is-described")
    assert text == (
        "fedproto: method-is-described: the registration's global_model: got False; expected: True"
    )


def test_a_loss_that_waits_for_a_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def objective(self: Any, task: Any) -> Any:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(self.model(x[y >= 0]), y)

        return loss

    monkeypatch.setattr(FedAvgClient, "objective", objective)
    text = refused("fedavg", "steps-do-not-wait-for-a-gpu")
    # In two rounds each of two clients has three steps more.
    assert "with twice as many steps 12 waits and 0 copies to the host more: {'index (waits)': 12}" in text


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'fedavgg'"):
        check_method("fedavgg")
    with pytest.raises(ConfigError, match=r"unknown check 'nothing'"):
        check_method("fedavg", checks=["nothing"])
    with pytest.raises(ConfigError, match=r"mutations must be .* from 20, got 3"):
        check_method("fedavg", mutations=3)


def test_every_method_has_checks_and_every_check_methods() -> None:
    for check in CHECKS.values():
        assert any(check.cases(name) for name in registry.methods()), check
    assert [str(case) for case in cases("fedgkt")] == ["fedgkt", "fedgkt, float16"]
    seen: list[tuple[str, str]] = []
    check_method("fedavg", checks=["error-replies"], on_check=lambda case, check: seen.append((case, check)))
    assert seen == [("fedavg", "error-replies"), ("fedavg, batch norm", "error-replies")]
    assert Case("fedavg").settings == ()


@pytest.mark.program
def test_the_checks_need_no_test_framework() -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from flwr_kd.testing import CHECKS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
