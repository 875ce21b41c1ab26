"""The result of a run: what was measured, with which configuration, on which versions.

A :class:`Comparison` holds one :class:`RunResult` per method and seed, and each run one :class:`RoundResult` per
round. On disk it is ``result.json`` (schema version 1): plain JSON, without NaN. What was not measured is
``null``, never 0. Reported are the last round and the mean of the last five, never the best round, which would be
a choice made on test data.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from flwr_kd.checks import check_label, number, whole_number
from flwr_kd.results.clients import alone_beside, client_gains
from flwr_kd.results.errors import ResultError
from flwr_kd.results.json_values import check_keys, check_list, json_mapping, json_value, refuse_constant
from flwr_kd.results.measures import ACCURACIES, Target
from flwr_kd.results.rounds import LATER, NEEDED_KEYS, ROUND_KEYS, RoundResult, mean

__all__ = ["SCHEMA_VERSION", "Comparison", "RoundResult", "RunResult"]

_T = TypeVar("_T")
SCHEMA_VERSION = 1
"""Version of the JSON; a reader refuses any other."""
_LAST = 5
_PARAMETERS = ("trained", "held", "server")
_TO_TARGET = ("rounds_to_target", "bytes_to_target", "seconds_to_target")
_METRICS = (
    *ACCURACIES,
    *(f"{name}_last5" for name in ACCURACIES),
    "bytes_up",
    "bytes_down",
    "seconds",
    "round_trips",
    "bytes_knowledge",
    *(f"parameters_{name}" for name in _PARAMETERS),
    *_TO_TARGET,
    "better_off",
)
_LATER_METRICS = {
    *LATER,
    *(f"{name}_last5" for name in LATER),
    *_METRICS[_METRICS.index("round_trips") :],
}
"""Left out of the file where no seed has a value."""


@dataclass(frozen=True)
class RunResult:
    """One method with one seed.

    Attributes
    ----------
    method : str
        The method's name in the registry.
    seed : int
        At least 0.
    rounds : tuple of RoundResult
        In order; a round that was skipped may be missing.
    hyperparameters : dict
        The method's own, with the values that were used. JSON values; tuples, paths and numpy values are
        converted.
    histogram : list of list of int
        Training samples per client and class, ``[clients][classes]``; empty if not known.
    parameters : dict
        Numbers of parameters: ``trained`` and ``held`` in memory by a client while it trains, both means over
        clients, and ``server``, what the server keeps between rounds. Empty if not known.
    label : str
        Name of the run where the same method runs with several settings; the method's name if empty. Of letters,
        digits, spaces and ``.,_=+*()-``, since folders are named by it.
    class_names : list of str
        Names of the classes, in their order, where the data has them; empty if not.

    Raises
    ------
    ResultError
        If the rounds are not in order, the label has another character, there are not as many names as classes, or
        a value cannot be written as JSON.
    """

    method: str
    seed: int
    rounds: tuple[RoundResult, ...]
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    histogram: list[list[int]] = field(default_factory=list)
    label: str = ""
    parameters: dict[str, float] = field(default_factory=dict)
    class_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ResultError(f"method must be a text that is not empty, got {self.method!r}")
        check_label(self.label, error=ResultError)
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, error=ResultError))
        object.__setattr__(self, "rounds", tuple(self.rounds))
        numbers = [result.round for result in self.rounds]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise ResultError(f"rounds of {self.method} must be in increasing order, got {numbers}")
        object.__setattr__(self, "hyperparameters", json_mapping("hyperparameters", self.hyperparameters))
        rows = json_value("histogram", self.histogram)
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ResultError("histogram must be a list of lists, [clients][classes]")
        if len({len(row) for row in rows}) > 1:
            raise ResultError(f"histogram must have one width, got {sorted({len(row) for row in rows})}")
        checked = [[whole_number("histogram", value, 0, error=ResultError) for value in row] for row in rows]
        object.__setattr__(self, "histogram", checked)
        names = json_value("class_names", self.class_names)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ResultError("class_names must be a list of texts")
        if names and checked and len(names) != len(checked[0]):
            raise ResultError(f"class_names must name {len(checked[0])} classes, got {len(names)} names")
        object.__setattr__(self, "class_names", names)
        if unknown := sorted(set(self.parameters) - set(_PARAMETERS)):
            raise ResultError(f"parameters may have {', '.join(_PARAMETERS)}, got {unknown[0]!r}")
        counts = {
            name: number(f"parameters[{name!r}]", value, 0, error=ResultError)
            for name, value in self.parameters.items()
        }
        object.__setattr__(self, "parameters", counts)

    @property
    def name(self) -> str:
        """The label, or the method's name where there is none: what a table and a picture call the run."""
        return self.label or self.method

    @property
    def last(self) -> dict[str, float | None]:
        """The run in a few numbers, each None if no round has a value.

        The accuracies (:data:`flwr_kd.results.measures.ACCURACIES`) are those of the last round. With ``_last5``
        they are the mean over the last five rounds, or over those of them that have a value, of the clients that
        took part in each.
        ``bytes_up``, ``bytes_down``, ``bytes_knowledge`` and ``round_trips`` are the mean per round, ``seconds``
        the median per round (the first rounds warm up). ``parameters_trained``, ``parameters_held`` and
        ``parameters_server`` are those
        of :attr:`parameters`.

        Examples
        --------
        >>> rounds = [RoundResult(r, r / 10, None, None, 100, 300, 1.5, 2, 0) for r in range(1, 7)]
        >>> last = RunResult("fedavg", 0, tuple(rounds)).last
        >>> last["local_accuracy"], round(last["local_accuracy_last5"], 3), last["global_accuracy"]
        (0.6, 0.4, None)
        """
        final = self.rounds[-1] if self.rounds else None
        tail = self.rounds[-_LAST:]
        return {
            **{name: getattr(final, name) if final else None for name in ACCURACIES},
            **{f"{name}_last5": mean(stats.of_participants(name) for stats in tail) for name in ACCURACIES},
            "bytes_up": mean(result.bytes_up for result in self.rounds),
            "bytes_down": mean(result.bytes_down for result in self.rounds),
            "seconds": statistics.median(result.seconds for result in self.rounds) if final else None,
            "round_trips": mean(result.round_trips for result in self.rounds),
            "bytes_knowledge": mean(result.bytes_knowledge for result in self.rounds),
            **{f"parameters_{name}": self.parameters.get(name) for name in _PARAMETERS},
        }

    def rounds_to(self, accuracy: float, metric: str = "global_accuracy") -> int | None:
        """Return the first round that reaches an accuracy; None if none does, or if it is not known.

        A number of rounds as in FedHyb's Table 2. It chooses no result on test data. What counts means the same in
        each round; see :meth:`RoundResult.of_participants`. Of an accuracy that is not
        measured after each round the first round is not known, unless the one before was measured as well.

        Parameters
        ----------
        accuracy : float
            In [0, 1].
        metric : str
            One of :data:`flwr_kd.results.measures.ACCURACIES`.

        Raises
        ------
        ResultError
            If the metric is another one.

        Examples
        --------
        >>> rounds = [RoundResult(r, None, r / 10, None, 0, 0, 1.0, 2, 0) for r in range(1, 4)]
        >>> RunResult("fedavg", 0, tuple(rounds)).rounds_to(0.2)
        2
        """
        if metric not in ACCURACIES:
            raise ResultError(f"metric must be one of {', '.join(ACCURACIES)}, got {metric!r}")
        known = True
        for result in self.rounds:
            value = result.of_participants(metric)
            if value is not None and value >= accuracy:
                return result.round if known or not ACCURACIES[metric].scheduled else None
            # A void round changes nothing that could have reached it.
            known = value is not None or (known and result.participants == 0)
        return None

    def to_target(self, target: Target) -> dict[str, float | None]:
        """Return what it takes to reach an accuracy for the first time.

        Parameters
        ----------
        target : Target
            The accuracy.

        Returns
        -------
        dict
            ``rounds_to_target``, ``bytes_to_target`` (up and down, all clients) and ``seconds_to_target``, of the
            rounds up to that one; each None if it is not reached, or if it is not known when.

        Examples
        --------
        >>> rounds = [RoundResult(r, r / 10, None, None, 10, 30, 1.5, 2, 0) for r in range(1, 7)]
        >>> RunResult("fedavg", 0, tuple(rounds)).to_target(Target(30))
        {'rounds_to_target': 3, 'bytes_to_target': 120, 'seconds_to_target': 4.5}
        """
        last = self.rounds_to(target.percent / 100, target.metric)
        if last is None:
            return dict.fromkeys(_TO_TARGET)
        until = [result for result in self.rounds if result.round <= last]
        sent = sum(result.bytes_up + result.bytes_down for result in until)
        return dict(zip(_TO_TARGET, (last, sent, sum(result.seconds for result in until)), strict=True))


@dataclass(frozen=True)
class Comparison:
    """Methods, or one method with several settings, on the same data, with one or more seeds each.

    Attributes
    ----------
    config : dict
        What the runs share: dataset, partition, clients, rounds, model, backend, and so on. JSON values.
    versions : dict
        As from :func:`flwr_kd.results.provenance.versions`.
    command : str
        The command line that gives this result again.
    runs : tuple of RunResult
        One per name and seed.

    Raises
    ------
    ResultError
        If two runs have the same name and seed, or a value cannot be written as JSON.

    Examples
    --------
    >>> def run(seed: int, accuracy: float) -> RunResult:
    ...     return RunResult("fedavg", seed, (RoundResult(1, accuracy, None, 0.3, 100, 300, 1.5, 2, 0),))
    >>> runs = (run(0, 0.5), run(1, 0.75))
    >>> comparison = Comparison({"dataset": "digits"}, {}, "flwr-kd compare fedavg", runs)
    >>> comparison.summary()[0]["local_accuracy"]
    {'mean': 0.625, 'std': 0.1767..., 'n': 2}
    >>> Comparison.from_json(comparison.to_json()) == comparison
    True
    """

    schema_version: ClassVar[int] = SCHEMA_VERSION

    config: dict[str, Any]
    versions: dict[str, str]
    command: str
    runs: tuple[RunResult, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", json_mapping("config", self.config))
        object.__setattr__(self, "versions", json_mapping("versions", self.versions))
        for name, version in self.versions.items():
            if not isinstance(version, str):
                raise ResultError(f"versions[{name!r}] must be a text, got {version!r}")
        if not isinstance(self.command, str):
            raise ResultError(f"command must be a text, got {self.command!r}")
        object.__setattr__(self, "runs", tuple(self.runs))
        seen: set[tuple[str, int]] = set()
        for run in self.runs:
            key = (run.name, run.seed)
            if key in seen:
                raise ResultError(f"runs has {run.name} with seed {run.seed} twice; one of each is allowed")
            seen.add(key)
        # A target that cannot be read is an error of the result, not of its table.
        _ = self.target

    @property
    def target(self) -> Target | None:
        """The accuracy to which rounds, bytes and seconds are counted: ``target`` of the config, if it has one."""
        text = self.config.get("target")
        return None if text is None else Target.parse(text)

    @property
    def target_line(self) -> str:
        """What a table says of the target; empty without one."""
        target = self.target
        if target is None:
            return ""
        reached = any(run.rounds_to(target.percent / 100, target.metric) for run in self.runs)
        return f"target: {target.described}; " + (
            "a mean over the seeds that reach it" if reached else "no run reaches it"
        )

    def by_method(self) -> dict[str, list[RunResult]]:
        """Return the runs by name, a label's or the method's, in the order in which the names first appear."""
        groups: dict[str, list[RunResult]] = {}
        for run in self.runs:
            groups.setdefault(run.name, []).append(run)
        return groups

    def one_each(self, seed: int | None = None) -> dict[str, RunResult]:
        """Return one run of each method, in the order in which the methods first appear.

        Parameters
        ----------
        seed : int, optional
            The runs with this seed, so without the methods that have none with it; each method's first run if
            None.

        Raises
        ------
        ResultError
            If there is no such run.
        """
        groups = self.by_method()
        if seed is None:
            chosen = {method: runs[0] for method, runs in groups.items()}
        else:
            chosen = {method: run for method, runs in groups.items() for run in runs if run.seed == seed}
        if not self.runs:
            raise ResultError("runs is empty: there is nothing to choose from")
        if not chosen:
            seeds = sorted({run.seed for run in self.runs})
            raise ResultError(f"seed must be one of {', '.join(map(str, seeds))}, got {seed}")
        return chosen

    def summary(self) -> list[dict[str, Any]]:
        """Mean and standard deviation over seeds, one dict per method.

        Returns
        -------
        list of dict
            ``method`` (a label where the runs have one), ``seeds`` (list of int), and for each key of
            :attr:`RunResult.last` a dict of ``mean``, ``std`` (with ddof = 1; None with fewer than two values) and
            ``n``, the number of seeds that have a value. Without any value ``mean`` is None and ``n`` 0. With a
            ``target`` in the config likewise the keys of :meth:`RunResult.to_target`. With a row named "alone" also
            ``better_off``, the share of clients whose own model is better than theirs in that row: by local
            accuracy, or by common accuracy where that was not measured.
        """
        rows: list[dict[str, Any]] = []
        target, groups = self.target, self.by_method()
        for method, runs in groups.items():
            reference = alone_beside(method, groups)
            alone = {run.seed: run for run in groups[reference]} if reference else {}
            last = [
                {
                    **run.last,
                    **(dict.fromkeys(_TO_TARGET) if target is None else run.to_target(target)),
                    "better_off": _better_off(run, alone.get(run.seed)),
                }
                for run in runs
            ]
            row: dict[str, Any] = {"method": method, "seeds": [run.seed for run in runs]}
            row |= {name: _spread(values[name] for values in last) for name in _METRICS}
            rows.append(row)
        return rows

    def to_json(self) -> str:
        """Return the result as JSON, with :meth:`summary` added for people who read the file."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "config": self.config,
            "versions": self.versions,
            "summary": [
                {name: value for name, value in row.items() if name not in _LATER_METRICS or value["n"]}
                for row in self.summary()
            ],
            "runs": [
                {
                    "method": run.method,
                    **({"label": run.label} if run.label else {}),
                    "seed": run.seed,
                    "hyperparameters": run.hyperparameters,
                    "rounds": [result.to_json() for result in run.rounds],
                    **({"parameters": run.parameters} if run.parameters else {}),
                    "histogram": run.histogram,
                    **({"class_names": run.class_names} if run.class_names else {}),
                }
                for run in self.runs
            ],
        }
        text = json.dumps(document, indent=2, allow_nan=False)
        # A histogram is a line per client. A raw newline is never inside a JSON string, so no text changes.
        return re.sub(r"\[\n\s+([-\d.,\s]+?)\n\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what :meth:`to_json` wrote; the summary is computed from the runs, not read.

        Raises
        ------
        ResultError
            If the text is not JSON, has another schema version, or a field is missing, unknown, or not allowed.
        """
        try:
            document = json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ResultError(f"the result is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ResultError(f"the result must be an object, got {type(document).__name__}")
        version = document.get("schema_version")
        if isinstance(version, bool) or version != SCHEMA_VERSION:
            raise ResultError(
                f"schema_version must be {SCHEMA_VERSION}, got {version!r}: not a result of flwr-kd, or of "
                "another version of it"
            )
        check_keys(
            "result", document, ("schema_version", "command", "config", "versions", "runs"), {"summary"}
        )
        runs = []
        for index, entry in enumerate(check_list("runs", document["runs"])):
            where = f"runs[{index}]"
            check_keys(
                where,
                entry,
                ("method", "seed", "hyperparameters", "rounds", "histogram"),
                ("label", "parameters", "class_names"),
            )
            rounds = []
            for position, values in enumerate(check_list(f"{where}.rounds", entry["rounds"])):
                place = f"{where}.rounds[{position}]"
                check_keys(place, values, NEEDED_KEYS, ROUND_KEYS)
                rounds.append(_build(place, RoundResult, values))
            runs.append(_build(where, RunResult, {**entry, "rounds": tuple(rounds)}))
        shared = {name: document[name] for name in ("config", "versions", "command")}
        return cls(**shared, runs=tuple(runs))


def _better_off(run: RunResult, alone: RunResult | None) -> float | None:
    if alone is None:
        return None
    shares = (client_gains([run], [alone], name).share for name in ("local_accuracy", "common_accuracy"))
    return next((share for share in shares if share is not None), None)


def _spread(values: Iterable[float | None]) -> dict[str, float | int | None]:
    present = [float(value) for value in values if value is not None]
    return {
        "mean": statistics.fmean(present) if present else None,
        "std": statistics.stdev(present) if len(present) > 1 else None,
        "n": len(present),
    }


def _build(where: str, kind: type[_T], values: dict[str, Any]) -> _T:
    try:
        return kind(**values)
    except ResultError as error:
        raise ResultError(f"{where}: {error}") from None
