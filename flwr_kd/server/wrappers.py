"""Flower's wrappers of strategies for differential privacy: which of them protect what a method sends."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from flwr_kd.checks import ConfigError
from flwr_kd.server.records import Node
from flwr_kd.transport.payload import PayloadError
from flwr_kd.wording import option

if TYPE_CHECKING:
    from flwr_kd.server.strategy import KDStrategy

__all__ = ["check_clipped", "check_wrapper", "unfit_for_wrapper", "wrapper_of"]

NDArray = npt.NDArray[Any]
_ROUNDING = 1e-3
_PRIVACY, _ADAPTIVE_AT_CLIENTS = "DifferentialPrivacy", "DifferentialPrivacyClientSideAdaptiveClipping"


def wrapper_of(strategy: Strategy, depth: int = 2) -> str | None:
    """Return the class of the strategy whose method called a method of this one; None if no other did.

    Flower gives a wrapper's strategy nothing by which it could know the wrapper, so the caller is looked at.

    Parameters
    ----------
    strategy : Strategy
        The one that is called.
    depth : int
        Number of calls between this function and the wrapper's.
    """
    caller = sys._getframe(depth).f_locals.get("self")
    return type(caller).__name__ if isinstance(caller, Strategy) and caller is not strategy else None


def check_wrapper(strategy: KDStrategy[Any, Any], wrapper: str | None) -> None:
    """Refuse a wrapper that does not protect what the method sends, and warn of what it leaves out.

    Parameters
    ----------
    strategy : KDStrategy
        The method's.
    wrapper : str, optional
        As from :func:`wrapper_of`.

    Raises
    ------
    ConfigError
        If the method sends no weights, or if its server does more than to average them.
    """
    if wrapper is None or not wrapper.startswith(_PRIVACY):
        return
    name, phase = type(strategy).__name__, strategy.phases[0]
    if phase not in strategy.reply_arrays or not strategy.sends_weights:
        raise ConfigError(
            f"{wrapper} protects the weights of a global model, and {name} sends none: it would protect nothing"
        )
    if not strategy.averages:
        raise ConfigError(
            f"{wrapper} adds noise for a mean of clipped weights, and {name} makes its global model in another "
            "way: it would not protect the clients as it says"
        )
    if not strategy.rule.is_mean:
        raise ConfigError(
            f"{wrapper} adds noise for a mean of clipped weights, and {name} has "
            f"{option('aggregation', strategy.aggregation)}: it would not protect the clients as it says"
        )
    if phase in strategy.reply_payloads:
        log(
            WARNING,
            "%s protects the weights; the knowledge that %s's clients send beside them (%s) is not covered",
            wrapper,
            name,
            strategy.reply_payloads[phase].__name__,
        )


def unfit_for_wrapper(wrapper: str | None, node: Node) -> str | None:
    """Say why a client cannot send what a wrapper reads; None if it can.

    Examples
    --------
    >>> unfit_for_wrapper(None, Node(7)) is unfit_for_wrapper("DifferentialPrivacyServerSideFixedClipping", Node(7))
    True
    >>> unfit_for_wrapper("DifferentialPrivacyClientSideAdaptiveClipping", Node(7, message_api=True))
    >>> print(unfit_for_wrapper("DifferentialPrivacyClientSideAdaptiveClipping", Node(7))[:60])
    DifferentialPrivacyClientSideAdaptiveClipping reads norm_bit
    """
    if wrapper != _ADAPTIVE_AT_CLIENTS or node.message_api:
        return None
    return (
        f"{wrapper} reads norm_bit from a MetricRecord, in which a NumPyClient cannot send it: serve it by "
        "flwr_kd.client_app with adaptiveclipping_mod in train_mods, or use "
        "DifferentialPrivacyServerSideAdaptiveClipping"
    )


def check_clipped(arrays: Sequence[NDArray], before: Sequence[NDArray], largest: float) -> None:
    """Check that a client has clipped its update, on which a wrapper relies that leaves the clipping to clients.

    Parameters
    ----------
    arrays, before : sequence of ndarray
        The client's weights, and those that it was sent.
    largest : float
        Norm to which the difference is clipped.

    Raises
    ------
    PayloadError
        If its norm is larger, beyond rounding.
    """
    # A mask with -inf is the same in both, and has no part in the norm.
    differences = (
        np.subtract(new, old, where=np.isfinite(old), out=np.zeros(old.shape))
        for new, old in zip(arrays, before, strict=True)
    )
    norm = math.sqrt(sum(float(np.square(difference).sum()) for difference in differences))
    if norm > largest * (1 + _ROUNDING):
        raise PayloadError(
            f"its update has the norm {norm:.4g}, above the clipping norm {largest:.4g}: its ClientApp needs "
            "fixedclipping_mod, of flwr.clientapp.mod in flwr_kd.client_app or of flwr.client.mod for a NumPyClient"
        )
