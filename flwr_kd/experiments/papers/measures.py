"""What can be read off a run, by the names that experiments' files have for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from flwr_kd.results.measures import ACCURACIES
from flwr_kd.results.schema import RunResult

__all__ = ["MEASURES", "Measured", "value_of"]


class Measured(NamedTuple):
    """A measure.

    Attributes
    ----------
    meaning : str
        What it is.
    accuracy : bool
        Whether it is a share in [0, 1], which papers print as it is or in percent.
    unit : str
        Of our numbers; empty where they are counts.
    """

    meaning: str
    accuracy: bool = True
    unit: str = "%"


_ACCURACIES = (
    "local_accuracy",
    "local_top5",
    "trained_accuracy",
    "common_accuracy",
    "common_top5",
    "global_accuracy",
    "global_top5",
    "global_auroc",
    "global_on_clients",
)
MEASURES: Mapping[str, Measured] = MappingProxyType(
    {
        **{name: Measured(ACCURACIES[name].meaning) for name in _ACCURACIES},
        "rounds_to_global": Measured(
            "rounds to a share of the first row's last global accuracy; one more than there were where it is not "
            "reached",
            False,
            "",
        ),
        "round_trips": Measured("round trips by the paper's formula", False, ""),
        "megabytes": Measured("10^6 bytes of all rounds and clients by the paper's formula", False, "MB"),
        "tsne": Measured("map of features", False, ""),
        "landscape": Measured("loss around the global model", False, ""),
        "distance_to_last": Measured("distance of the global model to the last round's", False, ""),
    }
)
"""By name, what it is."""


def value_of(run: RunResult, measure: str, client: int | None = None) -> float | None:
    """Return an accuracy of a run's last round; of one client, counted from 1, or the mean.

    None if it was not measured.
    """
    if not run.rounds:
        return None
    last = run.rounds[-1]
    if client is not None:
        return last.clients.get(str(client - 1), {}).get(measure)
    value: float | None = getattr(last, measure)
    return value
