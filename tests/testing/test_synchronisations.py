"""The counting device has the CPU's numbers, a GPU's rules, and counts each wait and copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.testing.synchronisations import DEVICE, CountingDevice, Counts

ROW = torch.arange(4)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda x: float(x.sum()), Counts(waits=1)),
        (lambda x: bool((x > 1).any()), Counts(waits=1)),
        (lambda x: x[x > 1].cpu(), Counts(waits=1, to_host=1)),
        (lambda x: torch.masked_select(x, x > 1).cpu(), Counts(waits=1, to_host=1)),
        (lambda x: x.nonzero().cpu(), Counts(waits=1, to_host=1)),
        (lambda x: x.unique().cpu(), Counts(waits=1, to_host=1)),
        (lambda x: torch.bincount(x).cpu(), Counts(waits=1, to_host=1)),
        (lambda x: torch.equal(x, x), Counts(waits=1)),
        (lambda x: x.repeat_interleave(x).cpu(), Counts(waits=1, to_host=1)),
        (lambda x: x.repeat_interleave(x, output_size=6).cpu(), Counts(to_host=1)),
        (lambda x: x.tolist(), Counts(to_host=1)),
        (lambda x: x[[2, 0]].cpu(), Counts(to_host=1, to_device=1)),
        (lambda x: x[torch.tensor([2, 0])].cpu(), Counts(to_host=1, to_device=1)),
        (lambda x: x[1:].square().cpu(), Counts(to_host=1)),
        (lambda x: torch.where(x > 1, x, 0).cpu(), Counts(to_host=1)),
        (lambda x: x.add_(torch.tensor([1, 2, 3, 4], device=x.device)).cpu(), Counts(to_host=1, to_device=1)),
        (lambda x: torch.zeros(3, device=x.device).cpu(), Counts(to_host=1)),
    ],
)
def test_waits_and_copies(use: Callable[[Tensor], Any], expected: Counts) -> None:
    with CountingDevice() as device:
        x = ROW.to(DEVICE)
        before = device.counts
        out = use(x)
        assert device.counts - before == expected
    alone = use(ROW.clone())
    assert torch.equal(out, alone) if isinstance(out, Tensor) else out == alone


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + torch.ones(4),
        lambda x: x.numpy(),
        lambda x: torch.randn(2, device=x.device, generator=torch.Generator()),
    ],
)
def test_what_a_gpu_refuses(use: Callable[[Tensor], Any]) -> None:
    with CountingDevice(), pytest.raises((RuntimeError, TypeError), match=DEVICE.type):
        use(ROW.to(DEVICE))


def test_training_has_the_numbers_of_the_cpu() -> None:
    torch.manual_seed(0)
    here: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    x, y, results = torch.randn(6, 1, 4, 4), torch.arange(6) % 3, []
    for where in (torch.device("cpu"), DEVICE):
        with CountingDevice() as device:
            model = copy.deepcopy(here).to(where)
            inputs, labels = x.to(where), y.to(where)
            optimizer, before = torch.optim.Adam(model.parameters()), device.counts
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            assert device.counts == before
            results.append([value.cpu() for value in model.state_dict().values()])
    assert all(map(torch.equal, *results))


def test_threads_have_a_sum() -> None:
    device = CountingDevice()

    def work() -> None:
        with device:
            ROW.to(DEVICE).tolist()

    thread = Thread(target=work)
    with device:
        thread.start()
        thread.join()
        ROW.to(DEVICE)
    assert device.counts == Counts(to_host=1, to_device=2)
    assert device.by_operation == {("to_device", "_to_copy"): 2, ("to_host", "_to_copy"): 1}
