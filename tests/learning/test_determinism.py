"""CUDA's settings are made for a run and restored after it. No GPU is needed to read and write them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from flwr_kd.learning.determinism import deterministic


def settings() -> dict[str, Any]:
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def test_cuda_is_set_inside_the_block_also_in_one_of_its_own() -> None:
    before = settings()
    assert not before["algorithms"]
    with deterministic(torch.device("cuda")):
        with deterministic(torch.device("cuda", 0)):
            pass
        assert settings() == {
            "algorithms": True, "warn only": True, "benchmark": False, "tf32": (False, False), "fill": False,
            "workspace": ":4096:8",
        }  # fmt: skip
    assert settings() == before


def test_the_settings_are_restored_after_an_error() -> None:
    before = settings()
    with pytest.raises(KeyError), deterministic(torch.device("cuda")):
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_other_devices_need_nothing(device: str) -> None:
    before = settings()
    with deterministic(torch.device(device)):
        assert settings() == before


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")

    class Refusing:
        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("a mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Refusing())
    with deterministic(torch.device("cuda")):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert not torch.backends.cudnn.allow_tf32
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
