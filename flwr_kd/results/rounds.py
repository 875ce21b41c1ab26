"""What was measured in one round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import numpy as np

from flwr_kd.checks import number, share, whole_number
from flwr_kd.results.errors import ResultError
from flwr_kd.results.json_values import json_mapping
from flwr_kd.results.measures import ACCURACIES

__all__ = ["LATER", "NEEDED_KEYS", "ROUND_KEYS", "RoundResult", "mean"]

_ALWAYS = ("local_accuracy", "local_top5", "global_accuracy", "server_accuracy")
"""What files of the first version have also where nothing was measured."""
LATER = tuple(name for name in ACCURACIES if name not in _ALWAYS)
"""Accuracies that are left out of the file where they were not measured."""
_OPTIONAL = (
    "available",
    "stored",
    "received",
    "accuracy_before",
    "distance_to_last",
    "round_trips",
    "bytes_knowledge",
    *LATER,
)
_OF_CLIENT = ("local_accuracy", "local_top5")
"""What each client has, if only None."""
_BEFORE = "local_accuracy_before"
_ALSO_OF_CLIENT = (_BEFORE, *(name for name in LATER if ACCURACIES[name].of_client))
_OF_OWN_MODEL = (*_OF_CLIENT, "local_auroc", "common_accuracy", "common_top5", "common_auroc")


@dataclass(frozen=True)
class RoundResult:
    """What was measured in one round.

    Attributes
    ----------
    round : int
        From 1.
    local_accuracy : float or None
        Mean over clients of their own model's accuracy on their own test split, in [0, 1]; None if not
        measured. The clients are those that took part in the round; after the last round also those in ``stored``
        and ``received``.
    global_accuracy : float or None
        The aggregated model's accuracy on the common test set, in [0, 1]; None without a global model.
    train_loss : float or None
        Mean over clients.
    bytes_up, bytes_down : int
        Clients to server and server to clients, all clients together.
    seconds : float
        Wall clock.
    participants, failures : int
        Number of clients whose contribution counted, and of those that were asked and gave none.
    local_top5 : float or None
        As ``local_accuracy``, of the five likeliest classes; None with five classes or fewer.
    server_accuracy : float or None
        Accuracy of a server's model that the clients do not have (FedGKT's predictor), on their test splits; None
        without one.
    clients : dict
        Per client, by its partition id as text, its own ``local_accuracy`` and ``local_top5``, and what else was
        measured of it, by the names here. Where clients adapted the last global model, these are the adapted one's,
        and ``local_accuracy_before`` the global one's.
    available : int or None
        Number of clients that were connected, of which ``participants`` took part; None if not known.
    stored, received : tuple of str
        Keys of ``clients`` that did not take part in the last round, and were measured after it: with the personal
        model that they keep, or with the model that they would receive.
    accuracy_before : float or None
        Mean over clients of the last global model's accuracy on their own test splits, where they then adapted it;
        else None.
    distance_to_last : float or None
        Squared Euclidean distance of the global model's parameters to those after the run's last round; None if not
        measured.
    common_accuracy, common_top5 : float or None
        As ``local_accuracy``, of the same models on the common test set, which all clients share; None in rounds in
        which it was not measured.
    global_top5 : float or None
        As ``global_accuracy``, of the five likeliest classes.
    global_on_clients, global_on_clients_top5 : float or None
        Mean over clients of the aggregated model's accuracy on their own test splits; None without a global model,
        and in rounds in which it was not measured.
    trained_accuracy, trained_top5 : float or None
        As ``local_accuracy``, after the training on the client's own data and before it distils what the server
        sent; of the clients that took part in the round. None in methods whose clients do not distil after it.
    local_auroc, trained_auroc, common_auroc, global_auroc, global_on_clients_auroc : float or None
        As the accuracies, the mean over labels of the area under the ROC curve
        (:func:`flwr_kd.learning.scores.mean_auroc`); None where samples have one class each.
    round_trips : int or None
        Messages to single clients that had a usable reply, over all phases. FedHEAD and FedHEAD+ count those
        between sectors and server, as FedHEAD's Table 1 does. None if not known.
    bytes_knowledge : int or None
        Of ``bytes_up`` and ``bytes_down`` together, those of knowledge and public samples; the rest are models.
        None if not known.

    Raises
    ------
    ResultError
        If a value is of another type or outside its range.

    Notes
    -----
    An accuracy or a loss that is NaN or infinite becomes None.
    """

    round: int
    local_accuracy: float | None
    global_accuracy: float | None
    train_loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    participants: int
    failures: int
    local_top5: float | None = None
    server_accuracy: float | None = None
    clients: dict[str, dict[str, float | None]] = field(default_factory=dict)
    available: int | None = None
    stored: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    accuracy_before: float | None = None
    distance_to_last: float | None = None
    common_accuracy: float | None = None
    common_top5: float | None = None
    global_top5: float | None = None
    global_on_clients: float | None = None
    global_on_clients_top5: float | None = None
    trained_accuracy: float | None = None
    trained_top5: float | None = None
    local_auroc: float | None = None
    trained_auroc: float | None = None
    common_auroc: float | None = None
    global_auroc: float | None = None
    global_on_clients_auroc: float | None = None
    round_trips: int | None = None
    bytes_knowledge: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("round", 1),
            ("bytes_up", 0),
            ("bytes_down", 0),
            ("participants", 0),
            ("failures", 0),
        ):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, error=ResultError))
        for name in ACCURACIES:
            object.__setattr__(self, name, _accuracy(name, getattr(self, name)))
        object.__setattr__(self, "train_loss", _measured("train_loss", self.train_loss))
        clients = json_mapping("clients", self.clients)
        for client, values in clients.items():
            if not isinstance(values, dict) or not set(values) <= {*_OF_CLIENT, *_ALSO_OF_CLIENT}:
                raise ResultError(f"clients[{client!r}] must have {' and '.join(_OF_CLIENT)}, got {values!r}")
            names = (*_OF_CLIENT, *(name for name in _ALSO_OF_CLIENT if name in values))
            clients[client] = {name: _accuracy(name, values.get(name)) for name in names}
        object.__setattr__(self, "clients", clients)
        object.__setattr__(self, "accuracy_before", _accuracy("accuracy_before", self.accuracy_before))
        distance = _measured("distance_to_last", self.distance_to_last)
        if distance is not None:
            number("distance_to_last", distance, 0, error=ResultError)
        object.__setattr__(self, "distance_to_last", distance)
        for name in ("available", "round_trips", "bytes_knowledge"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 0, error=ResultError)
        for name in ("stored", "received"):
            keys = tuple(getattr(self, name))
            if not set(keys) <= set(clients):
                raise ResultError(f"{name} must be keys of clients, got {keys!r}")
            object.__setattr__(self, name, keys)
        seconds = number("seconds", self.seconds, 0, error=ResultError)
        object.__setattr__(self, "seconds", seconds)

    @property
    def megabytes(self) -> float:
        """Bytes of all clients, up and down, in 10^6."""
        return (self.bytes_up + self.bytes_down) / 10**6

    def of_participants(self, metric: str) -> float | None:
        """Return an accuracy, without the clients that were measured after the last round.

        A curve over rounds has the same meaning in each of its points with this. None where clients adapted the
        last global model: then their models are those, and no longer the ones that they trained.

        Examples
        --------
        >>> clients = {"0": {"local_accuracy": 1.0}, "1": {"local_accuracy": 0.5}}
        >>> last = RoundResult(2, 0.75, None, None, 0, 0, 1.0, 1, 0, clients=clients, available=2, received=("1",))
        >>> last.of_participants("local_accuracy")
        1.0
        """
        if metric in _OF_OWN_MODEL and self.accuracy_before is not None:
            return None
        if metric not in _OF_OWN_MODEL or not (self.stored or self.received):
            value: float | None = getattr(self, metric)
            return value
        others = {*self.stored, *self.received}
        return mean(values.get(metric) for key, values in self.clients.items() if key not in others)

    def without_traffic(self) -> RoundResult:
        """Return the round as if nothing had been sent."""
        return replace(
            self,
            bytes_up=0,
            bytes_down=0,
            round_trips=None if self.round_trips is None else 0,
            bytes_knowledge=None if self.bytes_knowledge is None else 0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the values as a file has them."""
        return {
            name: getattr(self, name)
            for name in ROUND_KEYS
            if name not in _OPTIONAL or getattr(self, name) not in (None, ())
        }


ROUND_KEYS = tuple(each.name for each in fields(RoundResult))
"""All fields of a round, as a file may have them."""
NEEDED_KEYS = tuple(
    each.name for each in fields(RoundResult) if each.default is MISSING and each.default_factory is MISSING
)
"""Fields that results have had from the first version on; the others get their defaults if they are missing."""


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of those values that are there; None without any."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _measured(name: str, value: object) -> float | None:
    """Return a finite float, or None for None, NaN and the infinities."""
    if value is None or (isinstance(value, float | np.floating) and not np.isfinite(value)):
        return None
    return number(name, value, error=ResultError)


def _accuracy(name: str, value: object) -> float | None:
    accuracy = _measured(name, value)
    return None if accuracy is None else share(name, accuracy, error=ResultError)
