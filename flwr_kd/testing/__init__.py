"""Faults, garbage and the checks that every method must pass, for tests of this library and of its users.

>>> from flwr_kd.testing import check_method
>>> check_method("fedavg", checks=["method-is-described"])
"""

from typing import TYPE_CHECKING

from flwr_kd.lazy import exports

if TYPE_CHECKING:
    from .faults import FAULTS, Fault
    from .federation import Federation
    from .garbage import GARBAGE
    from .matrix import CHECKS, Check, check_method
    from .outcomes import CheckError

__all__ = [
    "CHECKS",
    "FAULTS",
    "GARBAGE",
    "Check",
    "CheckError",
    "Fault",
    "Federation",
    "check_method",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "faults": ("FAULTS", "Fault"),
        "federation": ("Federation",),
        "garbage": ("GARBAGE",),
        "matrix": ("CHECKS", "Check", "check_method"),
        "outcomes": ("CheckError",),
    },
)
