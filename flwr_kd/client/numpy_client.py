"""Flower's ``NumPyClient``, as long as Flower has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.client import NumPyClient
else:
    try:
        from flwr.client import NumPyClient
    except ImportError:

        class NumPyClient:
            """Stands for it in a Flower without it, where :func:`flwr_kd.client_app` serves the clients."""


__all__ = ["NumPyClient"]
