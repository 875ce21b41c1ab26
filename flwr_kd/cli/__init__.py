"""The command ``flwr-kd``.

``from flwr_kd.cli import main`` is callable; the commands are in the modules beside, one each.
"""

from flwr_kd.cli.app import main

__all__ = ["main"]
