"""Statistics of results: differences per seed with an interval, and intervals of an accuracy.

Two methods with the same seed share the partition, the initial weights and the test samples, so their difference
per seed varies less than either of them. Methods are therefore compared by the mean of these differences and its
interval, not by whether two standard deviations overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_kd.checks import number, share, whole_number
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import Comparison

__all__ = ["Difference", "accuracy_interval", "differences", "mean_interval", "paired_difference"]

_LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean difference over seeds, and its interval.

    Attributes
    ----------
    mean : float
        Mean of the differences.
    interval : tuple of float, or None
        Lower and upper limit; None with one seed. With equal differences for all seeds both are the mean: the
        seeds then say nothing about the spread, and the interval is narrower than what is known.
    seeds : tuple of int
        The seeds that both sides have.
    """

    mean: float
    interval: tuple[float, float] | None
    seeds: tuple[int, ...]

    @property
    def decided(self) -> bool:
        """Whether there is an interval and 0 is outside it."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def paired_difference(
    values: Mapping[int, float | None], reference: Mapping[int, float | None], *, level: float = _LEVEL
) -> Difference | None:
    """Return the mean difference of ``values`` to ``reference`` over the seeds that both have, with a t-interval.

    The interval is mean ± t · s / √n, with s the standard deviation of the n differences (ddof = 1) and t the
    quantile of Student's distribution with n − 1 degrees of freedom. It assumes that the differences are about
    normally distributed. With two or three seeds t is 12.7 and 4.3 at 95 %.

    Parameters
    ----------
    values, reference : mapping of int to float or None
        One value per seed; None where none was measured.
    level : float
        Confidence of the interval, in (0, 1).

    Returns
    -------
    Difference or None
        None if no seed has a value on both sides.

    Raises
    ------
    ResultError
        If ``level`` is outside its range, or a value is not finite.
    ImportError
        If ``scipy`` is not installed, and there are several seeds.

    Examples
    --------
    >>> found = paired_difference({0: 0.5, 1: 0.75, 2: 1.0}, {0: 0.25, 1: 0.25, 2: 0.25})
    >>> found.mean, [round(limit, 3) for limit in found.interval], found.decided
    (0.5, [-0.121, 1.121], False)
    """
    _check_level(level)
    pairs: dict[int, float] = {}
    for seed, value in values.items():
        other = reference.get(seed)
        if value is not None and other is not None:
            pairs[seed] = number("values", value, error=ResultError) - number(
                "reference", other, error=ResultError
            )
    if not pairs:
        return None
    found = np.array(list(pairs.values()))
    mean, interval = float(found.mean()), None
    if len(found) > 1:
        stats = _scipy_stats()
        half = float(stats.t.ppf((1 + level) / 2, len(found) - 1) * stats.sem(found))
        interval = (mean - half, mean + half)
    return Difference(mean, interval, tuple(pairs))


def differences(
    comparison: Comparison, metric: str, reference: str | None = None, *, level: float = _LEVEL
) -> dict[str, Difference | None]:
    """Return each method's :func:`paired_difference` to a reference in a metric of the last round.

    Parameters
    ----------
    comparison : Comparison
        With the reference and at least one other method.
    metric : str
        A key of :attr:`RunResult.last <flwr_kd.results.schema.RunResult.last>`, such as ``"local_accuracy"``.
    reference : str, optional
        A method of the comparison; the first one if None.
    level : float
        Confidence of the intervals, in (0, 1).

    Returns
    -------
    dict of str to Difference or None
        By method, without the reference, in the comparison's order.

    Raises
    ------
    ResultError
        If the comparison does not have the reference or the metric.
    """
    by_seed = {
        method: {run.seed: run.last for run in runs} for method, runs in comparison.by_method().items()
    }
    if not by_seed:
        return {}
    if reference is None:
        reference = next(iter(by_seed))
    if reference not in by_seed:
        raise ResultError(f"reference must be one of {', '.join(by_seed)}, got {reference!r}")
    known = next(iter(by_seed[reference].values()))
    if metric not in known:
        raise ResultError(f"metric must be one of {', '.join(known)}, got {metric!r}")
    columns = {
        method: {seed: last[metric] for seed, last in runs.items()} for method, runs in by_seed.items()
    }
    return {
        method: paired_difference(column, columns[reference], level=level)
        for method, column in columns.items()
        if method != reference
    }


def accuracy_interval(accuracy: float, samples: int, *, level: float = _LEVEL) -> tuple[float, float]:
    """Return the bootstrap interval of an accuracy that was measured on test samples.

    The samples are drawn anew with replacement, and the interval has the quantiles of their accuracies (percentile
    bootstrap). The number of correct ones among n draws is binomial, so these quantiles are known without a draw.

    Parameters
    ----------
    accuracy : float
        Share of correct predictions, in [0, 1].
    samples : int
        Number of test samples, at least 1.
    level : float
        Confidence of the interval, in (0, 1).

    Returns
    -------
    tuple of float
        Lower and upper limit, in [0, 1]. At accuracies 0 and 1 both limits are that accuracy: the bootstrap does
        not know of errors that the samples do not contain.

    Raises
    ------
    ResultError
        If a value is outside its range.
    ImportError
        If ``scipy`` is not installed.

    Examples
    --------
    >>> accuracy_interval(0.75, 400)
    (0.7075, 0.7925)
    """
    _check_level(level)
    share("accuracy", accuracy, error=ResultError)
    whole_number("samples", samples, 1, error=ResultError)
    stats = _scipy_stats()
    low, high = stats.binom.ppf([(1 - level) / 2, (1 + level) / 2], samples, accuracy)
    return float(low) / samples, float(high) / samples


def mean_interval(
    values: Sequence[float], generator: np.random.Generator, *, level: float = _LEVEL, resamples: int = 9999
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of a mean, for example of clients' accuracies.

    Parameters
    ----------
    values : sequence of float
        One per client (or sample), ``[N]``.
    generator : np.random.Generator
        What draws the values anew, with replacement.
    level : float
        Confidence of the interval, in (0, 1).
    resamples : int
        Number of draws of ``N`` values, at least 1.

    Returns
    -------
    tuple of float, or None
        Lower and upper limit; None with fewer than two values, which say nothing about their spread. Equal values
        give an interval without width.

    Raises
    ------
    ResultError
        If a value is not finite, or a number is outside its range.
    ImportError
        If ``scipy`` is not installed.
    """
    _check_level(level)
    whole_number("resamples", resamples, 1, error=ResultError)
    checked = np.array([number("values", value, error=ResultError) for value in values])
    if len(checked) < 2:
        return None
    stats = _scipy_stats()
    limits = stats.bootstrap(
        (checked,),
        np.mean,
        confidence_level=level,
        n_resamples=resamples,
        method="percentile",
        random_state=generator,
    ).confidence_interval
    return float(limits.low), float(limits.high)


def _check_level(level: float) -> None:
    number("level", level, 0, 1, open_low=True, open_high=True, error=ResultError)


def _scipy_stats() -> Any:
    """Import ``scipy.stats``, which the core does not need."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError(f"intervals need scipy ({error}): pip install 'flwr-kd[simulation]'") from error
    return stats
