"""Checks of what a method costs on a GPU, on a device that is not there."""

from __future__ import annotations

from flwr_kd.testing.kept_runs import counts_by_size
from flwr_kd.testing.outcomes import ensure
from flwr_kd.testing.recording import Case

__all__ = ["steps_do_not_wait_for_a_gpu"]


def steps_do_not_wait_for_a_gpu(case: Case) -> None:
    """Check that the host waits no longer for a GPU with more steps, and reads no more from it.

    Copies to the device are allowed: the host does not wait for small ones.
    """
    few, many = counts_by_size(case.method_name)
    more = many.counts - few.counts
    operations = {
        f"{operation} ({kind})": number - few.by_operation[kind, operation]
        for (kind, operation), number in many.by_operation.items()
        if kind != "to_device" and number > few.by_operation[kind, operation]
    }
    ensure(
        not (more.waits or more.to_host),
        f"with twice as many steps {more.waits} waits and {more.to_host} copies to the host more: {operations}",
        "as many: keep sums on the device until the end of the phase, and masks in torch.where",
    )
