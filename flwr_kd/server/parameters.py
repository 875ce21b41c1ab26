"""How many parameters a run's clients and server have."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["parameters_of"]


def parameters_of(strategy: KDStrategy[Any, Any]) -> dict[str, float]:
    """Return the numbers of parameters in a run that has ended.

    Returns
    -------
    dict
        ``trained``: of a client's model, without frozen ones. ``held``: what a client needs in memory while it
        trains, see :meth:`flwr_kd.KDClient.held_parameters`. Both are means over the clients that named them in the
        handshake, and are left out if none did. ``server``: see :meth:`flwr_kd.KDStrategy.held_parameters`.
    """
    nodes = [node for node in strategy.current_run.roster.nodes.values() if node.num_held]
    counts: dict[str, float] = {"server": strategy.held_parameters()}
    if nodes:
        counts["trained"] = fmean(node.num_parameters for node in nodes)
        counts["held"] = fmean(node.num_held for node in nodes)
    return counts
