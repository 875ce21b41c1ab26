"""Differential privacy of clients' updates, as a run states it; which methods have it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig
from flwr_kd.update_privacy import DELTA, SgdBudget, UpdateBudget, sgd_budget, update_budget
from flwr_kd.wording import assignment

__all__ = ["check_privacy", "releases_per_round", "stated_privacy"]

_UNCOVERED = (
    "not covered: knowledge beside the weights, the handshake, numbers of replies (flwr-kd privacy lists all)"
)


def check_privacy(name: str, config: MethodConfig, reply_arrays: Collection[str]) -> None:
    """Refuse protection of weights by a method whose clients send none.

    Parameters
    ----------
    name : str
        The strategy's class.
    config : MethodConfig
        The hyper-parameters.
    reply_arrays : collection of str
        Phases whose replies have weights.

    Raises
    ------
    ConfigError
        With the hyper-parameter and what to do.
    """
    if config.dp_clip and not reply_arrays:
        raise ConfigError(
            f"dp-clip must be 0 for {name}, whose clients send no weights that it could protect, got "
            f"{config.dp_clip:g}: set {assignment('dp_clip', 0)} and {assignment('dp_noise', 0)}"
        )


def releases_per_round(phases: Sequence[str], reply_arrays: Collection[str]) -> int:
    """Return how often a client may send weights in a round.

    In a phase ``X-again`` a client takes the place of another one that failed in phase ``X``, so that it replies to
    one of both.

    >>> releases_per_round(("train", "distill", "distill-again"), {"train", "distill", "distill-again"})
    2
    """
    return sum(phase in reply_arrays and not phase.endswith("-again") for phase in phases)


def stated_privacy(
    config: MethodConfig,
    phases: Sequence[str],
    reply_arrays: Collection[str],
    rounds: int,
    *,
    uncovered: bool = True,
) -> list[str]:
    """Return what a run states of the privacy of its clients' weights, one line each; nothing without any.

    Parameters
    ----------
    config : MethodConfig
        The hyper-parameters.
    phases, reply_arrays
        The strategy's phases, and those whose replies have weights.
    rounds : int
        Rounds of the run, at least 1; a client takes part in all of them, at most.
    uncovered : bool
        Whether the last line says what is not covered.
    """
    lines = []
    if config.dp_clip:
        releases = rounds * releases_per_round(phases, reply_arrays)
        lines.append(
            _stated(
                "dp",
                config.dp_noise,
                lambda: update_budget(noise=config.dp_noise, releases=releases, delta=DELTA),
            )
        )
    if config.dp_sgd_clip:
        epochs, noise = max(rounds * config.local_epochs, 1), config.dp_sgd_noise
        lines.append(_stated("dp-sgd", noise, lambda: sgd_budget(noise=noise, epochs=epochs, delta=DELTA)))
    if lines and uncovered:
        lines.append(_UNCOVERED)
    return lines


def _stated(kind: str, noise: float, budget: Callable[[], UpdateBudget | SgdBudget]) -> str:
    if not noise:
        return f"{kind}-clip without {kind}-noise protects nobody"
    try:
        return budget().sentence()
    except ImportError as error:
        return f"{kind}-noise={noise:g}: {error}"
