"""Where data and models are, and how CUDA is set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flwr_kd.learning import device


def test_data_is_placed_on_a_gpu_up_to_a_quarter_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(where: torch.device) -> SimpleNamespace:
        asked.append(where)
        return SimpleNamespace(total_memory=1600)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    x, y = torch.zeros(80), torch.zeros(10, dtype=torch.int64)  # 400 bytes
    moved: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, where: moved.append((len(tensor), where)))
    gpu = torch.device("cuda", 1)
    device.placed((x, y), gpu)
    assert moved == [(80, gpu), (10, gpu)]
    assert device.placed((x, y), gpu, processes=2) == (x, y)
    assert asked == [gpu, gpu]
