"""Names in experiments' files that this version does not know yet; a cell with one of them says so at its start."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COMING"]

COMING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "data set": frozenset(),
        "option": frozenset({"measure", "test-fraction"}),
    }
)
"""By kind of name."""
