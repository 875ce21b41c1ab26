"""What steps cost on a device beyond waits: copies to it."""

from __future__ import annotations

import pytest

from flwr_kd.testing.device_checks import counts_by_size
from tests.tiers import first_variants

COPIES = {
    # One per step and sub-network: the random views' coefficients, which are drawn on the CPU.
    **dict.fromkeys(("fedhyb", "fedhyb-1", "fedhyb-2", "fedhyb-star"), 24),
    # The clients' features, which the server keeps in memory, with labels and logits: three per batch.
    **dict.fromkeys(("feddkc-kkr", "feddkc-skr", "fedgkt"), 36),
}
"""Copies to the device that two rounds have more with twice as many steps; none of methods that are not here."""


@pytest.mark.parametrize("name", sorted(first_variants()))
def test_batches_are_on_the_device_already(name: str) -> None:
    few, many = counts_by_size(name)
    assert (many.counts - few.counts).to_device == COPIES.get(name, 0)
