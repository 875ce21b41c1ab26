"""What steps cost on a device beyond waits: copies to it."""

from __future__ import annotations

import pytest

from flwr_kd.testing.kept_runs import counts_by_size
from tests.tiers import first_variants

COPIES = {
    # One per step and sub-network: the random views' coefficients, which are drawn on the CPU.
    **dict.fromkeys(("fedhyb", "fedhyb-1", "fedhyb-2", "fedhyb-star"), 24),
    # The clients' features, which the server keeps in memory, with labels and logits: three per batch, and one for
    # each batch of its predictions.
    **dict.fromkeys(("feddkc-kkr", "feddkc-skr", "fedgkt"), 40),
    # The noise, which is drawn on the CPU: one per step that trains the generator or a discriminator.
    **dict.fromkeys(("dafkd", "fedhkd-dafkd"), 24),
    # The labels for the generator, drawn on the CPU.
    **dict.fromkeys(("fedgen", "fedgen-head"), 12),
    # They count steps, not epochs: with twice as many samples there is a pass less.
    **dict.fromkeys(("pfedhn", "pfedhn-pc"), -2),
}
"""Copies to the device that two rounds have more with twice as many steps; none of methods that are not here."""


@pytest.mark.parametrize(
    "name",
    # On the worker that counts for the check of waits as well.
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"runs of {name}"))
        for name in sorted(first_variants())
    ],
)
def test_batches_are_on_the_device_already(name: str) -> None:
    few, many = counts_by_size(name)
    assert (many.counts - few.counts).to_device == COPIES.get(name, 0)
