"""Outputs of many batches come from a device in as few copies as a bound allows."""

from __future__ import annotations

import pytest
import torch

from flwr_kd.learning.fetched import Fetched
from flwr_kd.testing.synchronisations import DEVICE, CountingDevice, Counts


@pytest.mark.parametrize(("limit", "copies"), [(10**6, 1), (24, 2), (1, 5)])
def test_copies_follow_from_the_bound(limit: int, copies: int) -> None:
    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    with CountingDevice() as device:
        rows, there = Fetched(limit), x.to(DEVICE)
        before = device.counts
        for start in range(5):
            rows.add(there[start : start + 1], y[start : start + 1])
        features, labels = rows.tensors()
        assert device.counts - before == Counts(to_host=copies)
    assert torch.equal(features, x)
    assert torch.equal(labels, y)
