"""The accuracies that a round may have: their names, and what each is, for tables, pictures and texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from flwr_kd.checks import read_number
from flwr_kd.results.errors import ResultError
from flwr_kd.text import unknown_name

__all__ = ["ACCURACIES", "Accuracy", "Target", "chosen"]


class Accuracy(NamedTuple):
    """An accuracy of a :class:`~flwr_kd.results.schema.RoundResult`.

    Attributes
    ----------
    name : str
        Its field.
    title : str
        In a picture; a table's header is its words one below the other.
    meaning : str
        Whose model on which samples, in a few words.
    of_client : bool
        Whether there is a value for each client, of which the round has the mean.
    """

    name: str
    title: str
    meaning: str
    of_client: bool = True

    @property
    def scheduled(self) -> bool:
        """Whether it is measured after the rounds of ``--measure`` only, by default the last."""
        return self.name.startswith(("common_", "global_on_clients"))

    @property
    def on_own_splits(self) -> bool:
        """Whether it is measured on the clients' own test splits."""
        return self.name.startswith(("local_", "trained_", "server_", "global_on_clients"))

    @property
    def header(self) -> str:
        """The title of a column in percent."""
        first, _, rest = self.title.rpartition(" ")
        return f"{first}\n{rest} %"


_OWN, _COMMON = "own test splits", "common test set"
ACCURACIES = {
    each.name: each
    for each in (
        Accuracy("local_accuracy", "local accuracy", f"clients' own models, {_OWN}"),
        Accuracy("local_top5", "local top-5", f"clients' own models, {_OWN}, five likeliest classes"),
        Accuracy("local_auroc", "local AUROC", f"clients' own models, {_OWN}, mean over labels"),
        Accuracy("trained_accuracy", "trained accuracy", f"clients' own models before they distil, {_OWN}"),
        Accuracy(
            "trained_top5",
            "trained top-5",
            f"clients' own models before they distil, {_OWN}, five likeliest classes",
        ),
        Accuracy(
            "trained_auroc",
            "trained AUROC",
            f"clients' own models before they distil, {_OWN}, mean over labels",
        ),
        Accuracy("global_accuracy", "global accuracy", f"aggregated model, {_COMMON}", of_client=False),
        Accuracy(
            "global_top5", "global top-5", f"aggregated model, {_COMMON}, five likeliest classes", False
        ),
        Accuracy("global_auroc", "global AUROC", f"aggregated model, {_COMMON}, mean over labels", False),
        Accuracy("server_accuracy", "server accuracy", "server's own model, clients' test splits", False),
        Accuracy("common_accuracy", "common accuracy", f"clients' own models, {_COMMON}"),
        Accuracy("common_top5", "common top-5", f"clients' own models, {_COMMON}, five likeliest classes"),
        Accuracy("common_auroc", "common AUROC", f"clients' own models, {_COMMON}, mean over labels"),
        Accuracy("global_on_clients", "global on clients", "aggregated model, clients' test splits"),
        Accuracy(
            "global_on_clients_top5",
            "global on clients top-5",
            "aggregated model, clients' test splits, five likeliest classes",
        ),
        Accuracy(
            "global_on_clients_auroc",
            "global on clients AUROC",
            "aggregated model, clients' test splits, mean over labels",
        ),
    )
}
"""By name, in the order of columns and panels. AUROC is measured where samples have several labels."""


def chosen(names: Iterable[str]) -> list[Accuracy]:
    """Return accuracies by their names, in kebab-case or with underscores, each once.

    Raises
    ------
    ResultError
        If there is no such accuracy.

    Examples
    --------
    >>> [each.name for each in chosen(["common-accuracy", "local_accuracy"])]
    ['common_accuracy', 'local_accuracy']
    """
    found = []
    for name in dict.fromkeys(name.strip().replace("-", "_") for name in names):
        if name not in ACCURACIES:
            known = [other.replace("_", "-") for other in ACCURACIES]
            raise ResultError(unknown_name("accuracy", name.replace("_", "-"), known))
        found.append(ACCURACIES[name])
    return found


class Target(NamedTuple):
    """An accuracy to which rounds, bytes and seconds are counted.

    Attributes
    ----------
    percent : float
        In (1, 100].
    metric : str
        A name of :data:`ACCURACIES`.
    """

    percent: float
    metric: str = "local_accuracy"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``PERCENT``, of the local accuracy, or ``NAME:PERCENT``, such as ``global-accuracy:85``.

        Raises
        ------
        ResultError
            If it is anything else.

        Examples
        --------
        >>> Target.parse("85"), Target.parse("global:62.5").metric
        (Target(percent=85.0, metric='local_accuracy'), 'global_accuracy')
        """
        name, colon, number = str(text).rpartition(":")
        if colon and not name.strip():
            raise ResultError(f"target: there is no accuracy before the colon, got {text!r}")
        name = name.strip().replace("-", "_") or "local"
        metric = f"{name}_accuracy" if f"{name}_accuracy" in ACCURACIES else name
        try:
            (accuracy,) = chosen([metric])
        except ResultError as error:
            raise ResultError(f"target: {error}") from None
        percent = read_number("target (in percent)", number, 1, 100, error=ResultError)
        return cls(percent, accuracy.name)

    @property
    def described(self) -> str:
        """The target in words, as in a caption.

        >>> Target(85.0).described
        'local accuracy 85 %'
        """
        return f"{ACCURACIES[self.metric].title} {self.percent:g} %"
