"""The backend that ``auto`` stands for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from flwr_kd.experiments import backends
from flwr_kd.experiments.backends import chosen_backend
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.options import ExperimentOptions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "processes"),
        ({"workers": 1}, "inline"),
        ({"clients": 1}, "inline"),
        ({"workers": 1, "backend": "processes"}, "processes"),
        ({"backend": "inline"}, "inline"),
        ({"backend": "ray"}, "ray"),
    ],
)
def test_on_a_cpu(options: dict[str, Any], expected: str) -> None:
    assert chosen_backend(ExperimentOptions(device="cpu", **options)) == expected
    assert Experiment(device="cpu", **options).shared()["backend"] == expected


@pytest.mark.parametrize(
    ("workers", "installed", "expected"), [(2, True, "ray"), (2, False, "processes"), (1, True, "inline")]
)
def test_several_workers_share_gpus_by_ray(
    workers: int, installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(backends, "resolve_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (name if installed else None) if name == "ray" else real(name),
    )
    assert chosen_backend(ExperimentOptions(workers=workers)) == expected
