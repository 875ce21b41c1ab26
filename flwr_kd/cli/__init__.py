"""The command ``flwr-kd``.

``from flwr_kd.cli import main`` is callable. Each command has a module of its own.
"""

from flwr_kd.cli.app import main

__all__ = ["main"]
