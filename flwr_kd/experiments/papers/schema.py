"""The form of an experiment's file.

One file is one table, figure or section of a paper. It is a run form (:mod:`flwr_kd.experiments.run_form`), with
what the paper printed beside each cell, what it claims, what it leaves open, and a cheaper version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Self

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.run_form import Cell, Named, RunForm, Values
from flwr_kd.text import shown

__all__ = [
    "EXPECTATIONS",
    "KINDS",
    "TRAINED",
    "UNITS",
    "Expectation",
    "Inferred",
    "Measure",
    "Open",
    "PaperCell",
    "PaperExperiment",
    "PaperSays",
    "Printed",
    "Small",
    "TextClaim",
]

KINDS = {
    "accuracy": "a table of accuracies",
    "rounds": "rounds to a target",
    "curve": "curves over rounds, whose numbers are not printed",
    "sweep": "accuracies over a setting, whose numbers are not printed",
    "picture": "a picture of what runs end with",
    "cost": "bytes, round trips, parameters or seconds",
    "properties": "sizes of models",
    "privacy": "noise and privacy budget",
    "partition": "samples per class and client",
    "derived": "follows from other tables",
}
"""What an experiment may be."""
TRAINED = ("accuracy", "rounds", "curve", "sweep", "picture")
"""Kinds whose cells are comparisons that run."""
UNITS = ("fraction", "percent", "rounds", "round trips", "megabytes", "none")
"""Units in which a paper may print a number."""
EXPECTATIONS = {
    "above": ("left", "right"),
    "best": ("methods",),
    "gain": ("left", "right", "low", "high"),
    "near": ("left", "right", "within"),
    "rises": ("methods", "along"),
    "falls": ("methods", "along"),
    "pairs": ("methods", "key", "better", "worse"),
    "spread-at-most": ("methods", "within"),
    "text": (),
}
"""Kinds of claims, each with the keys that it needs."""


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it.

    Attributes
    ----------
    value : Decimal
        With the digits as printed.
    spread : Decimal or None
        What stands after "±".
    """

    value: Decimal
    spread: Decimal | None = None

    @classmethod
    def from_toml(cls, value: object, where: str) -> Self:
        """Read a number, or a number and its spread."""
        parts = value if isinstance(value, list) else [value]
        numbers = [
            Decimal(each)
            for each in parts
            if isinstance(each, int | Decimal) and not isinstance(each, bool) and Decimal(each).is_finite()
        ]
        if not 1 <= len(parts) == len(numbers) <= 2:
            raise ConfigError(f"{where} must be a number, or a number and its spread, got {shown(value)}")
        return cls(*numbers)

    def __str__(self) -> str:
        return str(self.value) if self.spread is None else f"{self.value} ± {self.spread}"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a column of the paper is here.

    Attributes
    ----------
    name : str
        A measure of a run: see :data:`flwr_kd.experiments.papers.measures.MEASURES`.
    of : dict of str to str
        Another measure for some rows.
    """

    name: str
    of: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_toml(cls, value: object, where: str) -> Self:
        """Read a name, or a table with ``all`` and the rows that differ."""
        if isinstance(value, str):
            return cls(name=value)
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value.values()):
            raise ConfigError(f"{where} must be a measure, or a table of measures by row, got {shown(value)}")
        of = dict(value)
        if "all" not in of:
            raise ConfigError(f"{where}: all is missing")
        return cls(name=of.pop("all"), of=of)

    def for_row(self, row: str) -> str:
        """Return the measure of a row."""
        return self.of.get(row, self.name)


@dataclass(frozen=True, kw_only=True)
class Open:
    """What a paper leaves open, and what is taken here."""

    question: str
    taken: str = ""


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """Values that the paper does not print.

    Attributes
    ----------
    source : str
        Where they are from.
    taken : bool
        Whether runs have them where the paper prints none. Otherwise they are noted only.
    hyperparameters, settings : dict
        As an experiment has them. What is noted only may have names that do not exist here.
    note : str
        What to know of them.
    """

    source: str
    taken: bool
    hyperparameters: dict[str, Values] = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PaperCell(Cell):
    """One cell of the paper's grid.

    Attributes
    ----------
    printed : dict of dict
        By measure and row, what the paper prints. Rows are methods, or in tables without methods what the cell has
        a number for.
    clients : dict of dict
        By measure and row, the numbers of the clients one by one.
    target : float, optional
        Share of the reference's last accuracy, for ``rounds``.
    values : dict
        What a kind without options needs, such as σ and δ of a privacy budget.
    stands_for : str
        In a cheaper version: the cell of the paper in whose place this is.
    formula : dict
        By row, a formula as the paper gives it.
    note : str
        What to know of it.
    """

    printed: dict[str, dict[str, Printed]] = field(default_factory=dict)
    clients: dict[str, dict[str, tuple[Decimal, ...]]] = field(default_factory=dict)
    target: float | None = None
    values: Values = field(default_factory=dict)
    stands_for: str = ""
    formula: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def own(self) -> dict[str, Any]:
        """Its own options, hyper-parameters and other values."""
        return {**self.settings, **self.set, **self.values}


@dataclass(frozen=True, kw_only=True)
class PaperSays:
    """How the paper's own numbers keep a claim; the same is computed from them, and a test compares.

    Attributes
    ----------
    agrees : str
        Comparisons that do, such as ``"8 of 9"``.
    not_in : tuple of str
        Cells in which they do not.
    mean_gain : Decimal, optional
        Mean of left − right over the cells.
    clients : str
        The same as ``agrees`` over the clients one by one.
    ties : int
        Number of clients with equal numbers.
    """

    agrees: str = ""
    not_in: tuple[str, ...] = ()
    mean_gain: Decimal | None = None
    clients: str = ""
    ties: int = 0


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A claim that can be checked.

    Attributes
    ----------
    claim : str
        One sentence.
    kind : str
        Of :data:`EXPECTATIONS`. ``above``: each of ``left`` is above each of ``right`` in each cell. ``best``: one
        of ``methods`` is the best of all, or of ``among``. ``gain``: left − right lies within ``low`` − 0.5 and
        ``high`` + 0.5 points. ``near``: left and right differ by at most ``within`` points. ``rises``, ``falls``:
        along the values of a setting. ``pairs``: cells that differ in ``key`` alone, one better than the other.
        ``spread-at-most``: cells differ by at most ``within`` points. ``text``: nothing that a number decides.
    source : str
        ``stated``: the text says it; ``read-off``: seen in the numbers.
    measure : str
        Of the experiment's measures; the only one if empty.
    where : dict
        Cells that count: values of their settings and hyper-parameters, or lists of such values.
    lower_is_better : bool
        For ``best`` and ``above``.
    ignore : tuple of str
        Settings that may differ together with ``along``.
    order : tuple of str
        For a text: the order of rows that it means.
    paper : PaperSays
        What the paper's own numbers say of it.
    note : str
        What to know of it.
    """

    claim: str
    kind: str
    source: str
    measure: str = ""
    methods: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    within: float | None = None
    along: str = ""
    key: str = ""
    better: Any = None
    worse: Any = None
    where: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    lower_is_better: bool = False
    order: tuple[str, ...] = ()
    paper: PaperSays = field(default_factory=PaperSays)
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in EXPECTATIONS:
            raise ConfigError(f"kind must be one of {', '.join(EXPECTATIONS)}, got {self.kind!r}")
        if self.source not in ("stated", "read-off"):
            raise ConfigError(f"source must be stated or read-off, got {self.source!r}")
        missing = [name for name in EXPECTATIONS[self.kind] if getattr(self, name) in (None, "", ())]
        if missing:
            raise ConfigError(f"kind {self.kind} needs {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True)
class TextClaim:
    """A number or a sentence of the paper's text, held against its own table.

    Attributes
    ----------
    says : str
        The quantity, or the sentence.
    agrees : bool
        Whether the table says the same.
    printed, recomputed : tuple of Decimal
        The text's numbers, and those that follow from the table.
    note : str
        What the difference is.
    count : dict
        For a number of groups in which one row is above another: ``left``, ``right`` and ``measure``. It is
        recomputed.
    by_data_set : dict
        The numbers for each data set.
    """

    says: str
    agrees: bool
    printed: tuple[Decimal, ...] = ()
    recomputed: tuple[Decimal, ...] = ()
    note: str = ""
    ties: int | None = None
    count: dict[str, str] = field(default_factory=dict)
    by_data_set: dict[str, Decimal] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Small:
    """A cheaper version: the same methods and measures, on data that is to be had without a network.

    Attributes
    ----------
    note : str
        What it is, and what it costs.
    settings, hyperparameters, named : dict
        On top of the experiment's.
    run : tuple of PaperCell
        In place of the experiment's cells.
    """

    note: str
    settings: Values = field(default_factory=dict)
    hyperparameters: dict[str, Values] = field(default_factory=dict)
    named: dict[str, Named] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    run: tuple[PaperCell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaperExperiment(RunForm):
    """One table, figure or section of a paper.

    Attributes
    ----------
    id : str
        The file's name without its suffix.
    kind : str
        Of :data:`KINDS`.
    title, claim : str
        What it is, and what the paper concludes from it, in one line each.
    source : str
        Where in the paper: sections, tables, equations.
    unit : str
        Of the printed numbers: one of :data:`UNITS`.
    metric, metric_note : str
        What the numbers are, and what of that is a reading.
    spread : str
        What stands after "±".
    measures : dict of Measure
        By the paper's columns.
    runs_of : str
        Another experiment whose cells these are, such as the curves of a table's runs.
    only : tuple of str
        Which of these cells, as ``--only`` has it.
    clients : tuple of int
        The clients, counted from 1, whose own values it has; the means over clients if empty.
    mean_over : tuple of str
        Settings over which the values are averaged.
    controls : tuple of str
        Rows that run beside the methods: named ones, or the paper's of
        :class:`flwr_kd.experiments.papers.paper.Control`.
    tables : tuple of str
        For ``derived``: where its numbers are from.
    open : tuple of Open
        What the paper leaves open.
    doubts : tuple of str
        Numbers to be read with care.
    inferred : tuple of Inferred
        Values that the paper does not print.
    notes : tuple of str
        What else to know.
    run, cost : tuple of PaperCell
        The cells, and those of columns of cost beside them.
    expect : tuple of Expectation
        The claims.
    text : tuple of TextClaim
        What the text says of the numbers.
    small : Small, optional
        The cheaper version.
    """

    id: str
    kind: str
    title: str
    claim: str
    source: str
    unit: str
    metric: str
    metric_note: str = ""
    spread: str = "none printed"
    measures: dict[str, Measure] = field(default_factory=dict)
    runs_of: str = ""
    only: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()
    mean_over: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    open: tuple[Open, ...] = ()
    doubts: tuple[str, ...] = ()
    inferred: tuple[Inferred, ...] = ()
    notes: tuple[str, ...] = ()
    run: tuple[PaperCell, ...] = ()
    cost: tuple[PaperCell, ...] = ()
    expect: tuple[Expectation, ...] = ()
    text: tuple[TextClaim, ...] = ()
    small: Small | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.unit not in UNITS:
            raise ConfigError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")

    @property
    def trained(self) -> bool:
        """Whether its cells are comparisons that run."""
        return self.kind in TRAINED

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows that run: the paper's methods, and the controls beside them."""
        return (*self.methods, *self.controls)
