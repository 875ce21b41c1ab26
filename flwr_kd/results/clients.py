"""Which clients are better off with a method than with another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from flwr_kd.results.errors import ResultError
from flwr_kd.results.measures import ACCURACIES

if TYPE_CHECKING:
    from flwr_kd.results.schema import RunResult

__all__ = ["ALONE", "ClientGains", "alone_beside", "client_gains", "is_alone"]

ALONE = "alone"
"""Name of a comparison's row whose clients train alone: others' clients are held against it."""


def is_alone(name: str) -> bool:
    """Return whether a row's clients train alone: ``alone``, or ``alone, KEY=VALUE`` of a grid.

    >>> is_alone("alone, learning-rate=0.1"), is_alone("alone-with-others")
    (True, False)
    """
    return name.partition(", ")[0] == ALONE


def alone_beside(name: str, rows: Iterable[str]) -> str | None:
    """Return the row of clients that train alone with which a row is compared; None without one, or for such a row.

    Of a grid it is the one with the row's own values.

    >>> alone_beside("fedavg, mu=1, rate=0.1", ["alone, rate=0.1", "alone, rate=1"])
    'alone, rate=0.1'
    """
    if is_alone(name):
        return None
    values = set(name.split(", ")[1:])
    fitting = [row for row in rows if is_alone(row) and set(row.split(", ")[1:]) <= values]
    return max(fitting, key=len, default=None)


class ClientGains(NamedTuple):
    """How many clients are better and worse off, of those that have a value on both sides.

    Clients of several seeds count once for each seed: another seed divides the data in another way.
    """

    better: int
    worse: int
    of: int

    @property
    def share(self) -> float | None:
        """The share that is better off; None without a client."""
        return self.better / self.of if self.of else None


def client_gains(
    runs: Iterable[RunResult], reference: Iterable[RunResult], metric: str = "local_accuracy"
) -> ClientGains:
    """Hold each client against itself in other runs with the same seed, after the last round.

    Parameters
    ----------
    runs, reference : iterable of RunResult
        One run per seed on each side.
    metric : str
        An accuracy that is measured of each client.

    Returns
    -------
    ClientGains
        Of no client where the two share no seed, or have no value of a client.

    Raises
    ------
    ResultError
        If the metric is none of clients.

    Examples
    --------
    >>> from flwr_kd.results.schema import RoundResult, RunResult
    >>> def run(method, *shares):
    ...     clients = {str(i): {"local_accuracy": share} for i, share in enumerate(shares)}
    ...     return RunResult(method, 0, (RoundResult(1, 0.5, None, None, 0, 0, 1.0, 3, 0, clients=clients),))
    >>> client_gains([run("fedavg", 0.5, 0.75, 1.0)], [run("fedproto", 0.25, 0.75, 0.5)])
    ClientGains(better=2, worse=0, of=3)
    """
    if metric not in ACCURACIES or not ACCURACIES[metric].of_client:
        known = ", ".join(name for name, each in ACCURACIES.items() if each.of_client)
        raise ResultError(f"metric must be one of {known}, got {metric!r}")
    other = {run.seed: _of_clients(run, metric) for run in reference}
    gains = [
        value - other[run.seed][client]
        for run in runs
        for client, value in _of_clients(run, metric).items()
        if client in other.get(run.seed, {})
    ]
    return ClientGains(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), len(gains))


def _of_clients(run: RunResult, metric: str) -> dict[str, float]:
    last = run.rounds[-1].clients if run.rounds else {}
    values = {client: measured.get(metric) for client, measured in last.items()}
    return {client: value for client, value in values.items() if value is not None}
