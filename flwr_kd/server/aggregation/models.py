"""Means of models that come one after another, by any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flwr_kd.server.aggregation import robust
from flwr_kd.server.aggregation.means import RunningMean, cast, shares
from flwr_kd.server.aggregation.rules import Rule
from flwr_kd.server.model_store import ModelStore
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.wording import warn_once

__all__ = ["MEMORY", "Average", "Mean", "RobustMean", "average_by", "new_mean"]

NDArray = npt.NDArray[Any]
MEMORY = 128 * 1024**2
"""Bytes of models that a robust rule keeps in memory. The others are in a file until the rule is computed."""


class Mean(Protocol):
    """What averages models: :class:`RunningMean`, or :class:`RobustMean`."""

    @property
    def count(self) -> int:
        """Number of models."""

    def add(self, model: Sequence[NDArray], weight: float) -> None:
        """Add a model, whose arrays are not kept."""

    def result(self) -> list[NDArray]:
        """Return the mean, with the models' dtypes and shapes."""


Average = Callable[[Sequence[Sequence[NDArray]], Sequence[float]], list[NDArray]]
"""A function of models and their weights that averages them, as :func:`weighted_mean` does."""


def average_by(new: Callable[[], Mean]) -> Average:
    """Return a function that averages models by what ``new`` returns for each call.

    Examples
    --------
    >>> average_by(RunningMean)([[np.float32([1, 2])], [np.float32([4, 8])]], [2, 1])
    [array([2., 4.], dtype=float32)]
    """

    def average(models: Sequence[Sequence[NDArray]], weights: Sequence[float]) -> list[NDArray]:
        mean = new()
        for model, weight in zip(models, weights, strict=True):
            mean.add(model, weight)
        return mean.result()

    return average


def new_mean(
    rule: Rule,
    *,
    reference: Sequence[NDArray] | None = None,
    folder: Path | None = None,
    memory: int = MEMORY,
) -> Mean:
    """Return what averages models by a rule: the plain running mean, or a :class:`RobustMean`."""
    return (
        RunningMean() if rule.is_mean else RobustMean(rule, reference=reference, folder=folder, memory=memory)
    )


class RobustMean:
    """A robust mean of models that come one after another.

    Models beyond some memory are in a file. They are read in blocks of coordinates: to sort each coordinate, or for
    the inner products that the other rules choose and weigh models by. Distances and norms are over all float
    arrays, also BatchNorm's running statistics, which can harm as weights can. Whole numbers (BatchNorm's counter)
    are rounded to the nearest. Where the first model is not finite, as in a causal mask, the result has its value.

    With fewer models than :attr:`Rule.least`, as in a small group of clients, the coordinate-wise median takes the
    rule's place, with a warning.

    Parameters
    ----------
    rule : Rule
        Any, also ``mean``.
    reference : sequence of ndarray, optional
        The model from which the clients trained, of the same arrays. Updates are differences from it. The median
        of each coordinate takes its place where there is none.
    folder : Path, optional
        Where the file is; the system's folder for temporary files if None.
    memory : int
        Bytes of models that are kept in memory.

    Examples
    --------
    >>> mean = RobustMean(Rule.parse("median"))
    >>> for value in (1, 2, 1e30):
    ...     mean.add([np.float32([value, 0])], 5)
    >>> mean.result()
    [array([2., 0.], dtype=float32)]
    """

    def __init__(
        self,
        rule: Rule,
        *,
        reference: Sequence[NDArray] | None = None,
        folder: Path | None = None,
        memory: int = MEMORY,
    ) -> None:
        self.rule, self._reference = rule, reference
        self._folder, self._memory = folder, memory
        self._weights: list[float] = []
        self._store = ModelStore()

    @property
    def count(self) -> int:
        """Number of models."""
        return len(self._weights)

    def add(self, model: Sequence[NDArray], weight: float) -> None:
        """Add a model, of which a copy is kept; see :meth:`RunningMean.add`."""
        if not (weight >= 0 and np.isfinite(sum(self._weights) + weight)):
            raise ValueError(f"weights must be finite, at least 0, with a finite sum, got {weight}")
        like = [(array.dtype, array.shape) for array in model]
        if not self.count:
            named = {str(i): np.asarray(array) for i, array in enumerate(model)}
            self._like = like
            template = ArrayTemplate.of_ndarrays(named)
            self._store = ModelStore(template, memory=self._memory, folder=self._folder)
        elif like != self._like:
            raise ValueError(f"models must have the same arrays, got {like[:3]} after {self._like[:3]}")
        self._store.put(self.count, model)
        self._weights.append(float(weight))

    def result(self) -> list[NDArray]:
        """Return the mean by the rule, with the models' dtypes and shapes.

        Raises
        ------
        ValueError
            If there was no model.
        """
        if not self.count:
            raise ValueError("no models to average")
        rule = self.rule
        if self.count < rule.least:
            warn_once(
                "%s needs %d models, and a group has %d: the coordinate-wise median takes its place there",
                str(rule),
                rule.least,
                self.count,
            )
            rule = Rule("median")
        arrays = (
            self._by_coordinates(rule) if rule.name in ("median", "trimmed-mean") else self._weighted(rule)
        )
        return self._store.template.restored(arrays)

    def _by_coordinates(self, rule: Rule) -> list[NDArray]:
        """Return the median or the trimmed mean of each coordinate."""
        results = [np.empty(shape, np.float64) for _, shape in self._like]
        for index, start, block in self._store.blocks(range(self.count)):
            values = robust.median(block) if rule.name == "median" else robust.trimmed_mean(block, rule.share)
            results[index].reshape(-1)[start : start + len(values)] = values
        return [cast(result, dtype) for result, (dtype, _) in zip(results, self._like, strict=True)]

    def _weighted(self, rule: Rule) -> list[NDArray]:
        """Return a weighted mean of some models, and for clipped updates of the reference."""
        mean = RunningMean()
        for key, weight in enumerate(self._coefficients(rule)):
            if weight > 0:
                model = self._store.get(key) if key < self.count else self._finite_reference()
                mean.add(model, float(weight))
                # Drop the reference, so that only one model is in memory.
                del model
        return mean.result()

    def _coefficients(self, rule: Rule) -> npt.NDArray[np.float64]:
        """Return each model's weight, and the reference's after them."""
        if rule.is_mean:
            return np.asarray(self._weights) if sum(self._weights) else np.ones(self.count)
        products = self._products()
        if rule.name == "geometric-median":
            return robust.geometric_median_weights(products)
        if rule.name == "norm-bound":
            norms = np.sqrt(np.where(np.isnan(products.diagonal()), np.inf, products.diagonal()))
            clipped = shares(self._weights) * robust.clip_factors(norms, rule.factor)
            return np.append(clipped, max(1 - clipped.sum(), 0.0))
        scores = robust.krum_scores(robust.squared_distances(products), rule.attackers)
        # Of equal scores the first partition's.
        chosen = np.argsort(scores, kind="stable")[: rule.chosen_of(self.count)]
        weights = np.zeros(self.count)
        weights[chosen] = 1.0
        return weights

    def _products(self) -> npt.NDArray[np.float64]:
        """Return the inner products of the models' updates, ``[N, N]``, over all float arrays."""
        total = np.zeros((self.count, self.count))
        reference = self._finite_reference()
        with np.errstate(over="ignore", invalid="ignore"):
            for index, start, block in self._store.blocks(range(self.count)):
                if self._like[index][0].kind != "f":
                    continue
                block -= reference[index].reshape(-1)[start : start + block.shape[1]]
                total += block @ block.T
        return total

    def _finite_reference(self) -> list[NDArray]:
        if self._reference is None:
            self._reference = self._by_coordinates(Rule("median"))
        return self._store.template.finite([np.asarray(array) for array in self._reference])
