"""Whether a claim holds: by the order of means, and by paired differences over seeds with 95 % intervals.

A claim is a number of checks, one for each cell and pair of rows that it speaks of. A check has one or several
margins, each a number per seed that the claim says lies in a range: for "A is above B" it is the difference A − B,
above 0. Levels do not count: they depend on data, models and settings that papers do not all print.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from flwr_kd.experiments.papers.schema import Expectation
from flwr_kd.results.statistics import Difference, paired_difference

__all__ = ["Check", "GridCell", "Margin", "Verdict", "Verdicts", "checks", "verdict", "without"]

Seeds = Mapping[int, float]
_CLOSE = 1e-9
_TOLERANCE = 0.5
"""Points: a gain of "11 to 24 points" is one of 10.5 to 24.5."""


class Verdict(Enum):
    """What is known of a claim or of one of its checks."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"
    READING = "to be judged by reading"


@dataclass(frozen=True)
class GridCell:
    """Numbers of one cell, of a paper or ours.

    Attributes
    ----------
    id : str
        The cell's.
    keys : mapping
        Its own settings and hyper-parameters.
    values : mapping
        By measure, row and seed, in points of percent for accuracies. A paper's numbers have the seed 0.
    """

    id: str
    keys: Mapping[str, Any]
    values: Mapping[str, Mapping[str, Seeds]] = field(default_factory=dict)

    def of(self, measure: str, row: str) -> Seeds:
        """Return a row's values by seed; nothing if there are none."""
        return self.values.get(measure, {}).get(row, {})


@dataclass(frozen=True)
class Margin:
    """A number per seed, and the range in which a claim says that it lies.

    Attributes
    ----------
    by_seed : mapping of int to float
        Only seeds that have all the values that it needs.
    low, high : float
        The range. An end counts as inside unless ``open_`` says otherwise.
    open_low, open_high : bool
        Whether the end itself is outside.
    """

    by_seed: Seeds
    low: float
    high: float = math.inf
    open_low: bool = True
    open_high: bool = True

    def contains(self, value: float) -> bool:
        """Return whether a value is in the range."""
        above = value > self.low + _CLOSE if self.open_low else value >= self.low - _CLOSE
        return above and (value < self.high - _CLOSE if self.open_high else value <= self.high + _CLOSE)

    @property
    def difference(self) -> Difference | None:
        """Mean over seeds with its 95 % interval; None without a seed."""
        return paired_difference(self.by_seed, dict.fromkeys(self.by_seed, 0.0))

    @property
    def verdict(self) -> Verdict:
        """Holds if the interval is inside the range, does not hold if it is outside."""
        found = self.difference
        if found is None:
            return Verdict.NOT_RUN
        if found.interval is None:
            return Verdict.UNDECIDED
        low, high = found.interval
        if self.contains(low) and self.contains(high):
            return Verdict.HOLDS
        if high < self.low or low > self.high or (self.open_low and high <= self.low):
            return Verdict.FAILS
        return Verdict.UNDECIDED


@dataclass(frozen=True)
class Check:
    """One comparison of a claim.

    Attributes
    ----------
    place : str
        The cell and the rows.
    cell : str
        The cell's id; empty where several cells are compared.
    margins : tuple of Margin
        All of them must lie in their ranges.
    """

    place: str
    cell: str
    margins: tuple[Margin, ...]

    @property
    def known(self) -> bool:
        """Whether each margin has a seed."""
        return bool(self.margins) and all(margin.by_seed for margin in self.margins)

    @property
    def in_order(self) -> bool:
        """Whether the means are as the claim says."""
        return self.known and all(margin.contains(fmean(margin.by_seed.values())) for margin in self.margins)

    @property
    def verdict(self) -> Verdict:
        """Holds if all margins do; does not hold if one does not."""
        found = {margin.verdict for margin in self.margins}
        if not self.known:
            return Verdict.NOT_RUN
        if Verdict.FAILS in found:
            return Verdict.FAILS
        return Verdict.HOLDS if found == {Verdict.HOLDS} else Verdict.UNDECIDED


@dataclass(frozen=True)
class Verdicts:
    """The verdict on a claim, and what it rests on.

    Attributes
    ----------
    verdict : Verdict
        See :func:`verdict`.
    checks : tuple of Check
        Those that have numbers.
    missing : int
        Number of checks without.
    pooled : Difference or None
        Mean margin over the checks, by seed, with its interval; None where margins cannot be averaged.
    """

    verdict: Verdict
    checks: tuple[Check, ...] = ()
    missing: int = 0
    pooled: Difference | None = None

    def count(self, verdict: Verdict) -> int:
        """Return how many checks have a verdict."""
        return sum(check.verdict is verdict for check in self.checks)

    @property
    def in_order(self) -> int:
        """How many checks have means as the claim says."""
        return sum(check.in_order for check in self.checks)


def without(cells: Sequence[GridCell], rows: Collection[str]) -> list[GridCell]:
    """Return cells without some rows, such as controls, of which no claim of a paper speaks."""
    return [
        replace(
            cell,
            values={
                measure: {row: seeds for row, seeds in of_rows.items() if row not in rows}
                for measure, of_rows in cell.values.items()
            },
        )
        for cell in cells
    ]


def verdict(
    expectation: Expectation, cells: Sequence[GridCell], measure: str, *, share: float = 1.0
) -> Verdicts:
    """Return the verdict on a claim.

    A claim holds if at least a share of its checks hold by their intervals. It also holds if that share of the
    checks have means in order, and the mean margin over all checks is above 0 by its own interval. It does not hold
    if more than the other share of the checks contradict it by their intervals, or if the mean margin is below 0.
    Otherwise it is undecided. With one seed there are no intervals.

    Parameters
    ----------
    expectation : Expectation
        The claim.
    cells : sequence of GridCell
        Ours.
    measure : str
        A measure of the cells' values.
    share : float
        The share of checks that the paper's own numbers satisfy, in (0, 1]: a claim that the paper's table keeps in
        7 of 9 cells is not asked of all 9.
    """
    if expectation.kind == "text":
        return Verdicts(Verdict.READING)
    found = list(checks(expectation, cells, measure))
    known = tuple(check for check in found if check.known)
    if not known:
        return Verdicts(Verdict.NOT_RUN, missing=len(found))
    pooled = _pooled(expectation, known)
    result = Verdicts(Verdict.UNDECIDED, known, len(found) - len(known), pooled)
    needed, allowed = share * len(known) - _CLOSE, (1 - share) * len(known) + _CLOSE
    failed = result.count(Verdict.FAILS)
    sign = 0.0 if pooled is None or pooled.interval is None or not pooled.decided else pooled.mean
    if failed > allowed or sign < 0:
        decided = Verdict.FAILS
    elif result.count(Verdict.HOLDS) >= needed or (result.in_order >= needed and sign > 0):
        decided = Verdict.HOLDS
    else:
        decided = Verdict.UNDECIDED
    return Verdicts(decided, known, result.missing, pooled)


def _pooled(expectation: Expectation, known: Sequence[Check]) -> Difference | None:
    """Return the mean margin over the checks by seed, for claims about a sign."""
    if expectation.kind not in ("above", "best", "pairs"):
        return None
    margins = [margin.by_seed for check in known for margin in check.margins]
    seeds = set.intersection(*(set(by_seed) for by_seed in margins))
    means = {seed: fmean(by_seed[seed] for by_seed in margins) for seed in sorted(seeds)}
    return paired_difference(means, dict.fromkeys(means, 0.0))


def checks(expectation: Expectation, cells: Sequence[GridCell], measure: str) -> Iterator[Check]:
    """Yield the comparisons that a claim is made of.

    Parameters
    ----------
    expectation : Expectation
        Of a kind other than ``text``.
    cells : sequence of GridCell
        Of the paper or ours.
    measure : str
        A measure of the cells' values.
    """
    cells = [cell for cell in cells if _matches(cell, expectation.where)]
    if expectation.kind in ("rises", "falls"):
        yield from _along(expectation, cells, measure)
    elif expectation.kind == "pairs":
        yield from _pairs(expectation, cells, measure)
    elif expectation.kind == "spread-at-most":
        for row in expectation.methods:
            by_cell = [cell.of(measure, row) for cell in cells]
            widths = {
                seed: max(values[seed] for values in by_cell) - min(values[seed] for values in by_cell)
                for seed in _shared(by_cell)
            }
            margin = Margin(widths, 0, expectation.within or 0, open_low=False, open_high=False)
            yield Check(f"{row}, {len(cells)} cells", "", (margin,))
    else:
        for cell in cells:
            yield from _in_cell(expectation, cell, measure)


def _in_cell(expectation: Expectation, cell: GridCell, measure: str) -> Iterator[Check]:
    sign = -1 if expectation.lower_is_better else 1
    if expectation.kind == "best":
        rows = expectation.among or tuple(cell.values.get(measure, {}))
        ours = [cell.of(measure, row) for row in expectation.methods]
        others = [cell.of(measure, row) for row in rows if row not in expectation.methods]
        best = {
            seed: max(sign * each[seed] for each in ours) - max(sign * each[seed] for each in others)
            for seed in (_shared([*ours, *others]) if others else ())
        }
        names = " or ".join(expectation.methods)
        yield Check(f"{cell.id}: {names} against {len(others)} others", cell.id, (Margin(best, 0),))
        return
    for left in expectation.left:
        for right in expectation.right:
            by_seed = _difference(cell.of(measure, left), cell.of(measure, right), sign)
            yield Check(f"{cell.id}: {left} − {right}", cell.id, (_ranged(expectation, by_seed),))


def _ranged(expectation: Expectation, by_seed: Seeds) -> Margin:
    if expectation.kind == "gain":
        low, high = (expectation.low or 0) - _TOLERANCE, (expectation.high or 0) + _TOLERANCE
        return Margin(by_seed, low, high, open_low=False)
    if expectation.kind == "near":
        within = expectation.within or 0
        return Margin(by_seed, -within, within, open_low=False, open_high=False)
    return Margin(by_seed, 0)


def _along(expectation: Expectation, cells: Sequence[GridCell], measure: str) -> Iterator[Check]:
    """Yield a check for each row and each group of cells that differ in one setting alone."""
    sign = 1 if expectation.kind == "rises" else -1
    key = expectation.along
    apart = {key, *expectation.ignore}

    def others(cell: GridCell) -> str:
        return repr(sorted((name, str(value)) for name, value in cell.keys.items() if name not in apart))

    having = sorted((cell for cell in cells if key in cell.keys), key=others)
    for _, group in groupby(having, key=others):
        ordered = sorted(group, key=lambda cell: _position(cell.keys[key]))
        if len(ordered) < 2:
            continue
        for row in expectation.methods:
            steps = tuple(
                Margin(_difference(after.of(measure, row), before.of(measure, row), sign), 0)
                for before, after in pairwise(ordered)
            )
            yield Check(f"{row}: {', '.join(cell.id for cell in ordered)}", "", steps)


def _pairs(expectation: Expectation, cells: Sequence[GridCell], measure: str) -> Iterator[Check]:
    key = expectation.key
    for better in cells:
        if better.keys.get(key) != expectation.better:
            continue
        for worse in cells:
            alike = {**better.keys, key: None} == {**worse.keys, key: None}
            if worse.keys.get(key) == expectation.worse and alike:
                for row in expectation.methods:
                    by_seed = _difference(better.of(measure, row), worse.of(measure, row), 1)
                    yield Check(f"{row}: {better.id} − {worse.id}", better.id, (Margin(by_seed, 0),))


def _position(value: object) -> tuple[int, float | str]:
    """Return where a value stands: by its number, also that after a colon as in ``dirichlet:0.1``."""
    text = str(value).rpartition(":")[2]
    try:
        return 0, float(text)
    except ValueError:
        return 1, str(value)


def _matches(cell: GridCell, where: Mapping[str, Any]) -> bool:
    return all(
        cell.keys.get(key) in (values if isinstance(values, list) else [values])
        for key, values in where.items()
    )


def _shared(values: Sequence[Seeds]) -> list[int]:
    """Return the seeds that all have; none if one has none."""
    return sorted(set.intersection(*(set(by_seed) for by_seed in values))) if values else []


def _difference(left: Seeds, right: Seeds, sign: int) -> Seeds:
    return {seed: sign * (left[seed] - right[seed]) for seed in _shared([left, right])}
