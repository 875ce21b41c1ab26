"""How many parameters a run's clients and server have."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from flwr_kd.transport.template import ArrayTemplate

if TYPE_CHECKING:
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["in_model", "parameters_of"]


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


def in_model(strategy: KDStrategy[Any, Any], template: ArrayTemplate) -> int:
    """Return the number of parameters of a model; its buffers, as clients name them, are left out."""
    nodes = strategy.current_run.roster.nodes.values()
    buffers = next((node.template.buffers for node in nodes if node.template.buffers), ())
    return template.size(without=buffers)
