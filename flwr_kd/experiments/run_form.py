"""The run form: which methods a comparison has, with which settings, as a TOML file or a result says it.

The keys are those of the papers' experiments (:mod:`flwr_kd.experiments.papers`), which are such files too::

    methods = ["fedavg", "fedhkd", "strong"]
    seeds = [0, 1, 2]

    [settings]                      # options of `flwr-kd compare`
    dataset = "digits"
    rounds = 20

    [hyperparameters]               # `all` holds for each method that has the hyper-parameter
    all = { local-epochs = 5 }
    fedhkd = { gamma = 0.05, noise = "none" }

    [named.strong]                  # one method under another name and with other settings
    method = "fedhkd"
    set = { gamma = 0.5 }

    [grid]                          # a run for each combination
    partition = ["inner-dirichlet:0.1", "inner-dirichlet:1"]
    learning-rate = [0.001, 0.01]

A grid over hyper-parameters gives labelled runs in one comparison, a grid over options one comparison for each
combination. ``[[run]]`` lists comparisons one by one instead, each with an ``id``, ``settings`` and ``set``.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from flwr_kd import registry
from flwr_kd.checks import ConfigError, checked
from flwr_kd.config import MethodConfig, meant
from flwr_kd.data.loading import public_name
from flwr_kd.experiments.comparison import (
    ALONE_BY,
    ALONE_SETTINGS,
    Entry,
    check_alone,
    configs_of,
    method_of_row,
    settings_of,
)
from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.experiments.strict_toml import Value, build, read_toml
from flwr_kd.results import files
from flwr_kd.results.clients import ALONE, is_alone
from flwr_kd.results.schema import Comparison
from flwr_kd.text import shown, unknown_name

__all__ = ["Cell", "Named", "Planned", "RunForm", "entries_of", "option_values", "planned", "read_run_form"]

T = TypeVar("T")
Values = dict[str, Value]
_MAY_BE_NUMBERS = ("classes", "target")
"""Options whose text may be a number."""
_OF_RESULT_ONLY = ("model", "seeds", "attacker_ids")
_OF_COMMAND_LINE = ("out", "force", "resume", "columns", "format", "log", "no-arrays", "verbose", "config")
"""Options of `flwr-kd compare` that say where and how it runs, not what."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A row that is a method with settings, under another name.

    Attributes
    ----------
    method : str
        A name of the registry.
    set : dict
        Hyper-parameters, on top of the method's in the file.
    model : str, optional
        The clients' models, in place of the settings'.
    seeds : tuple of int
        Those of the seeds with which the row runs; all of them if empty.
    note : str
        Why; needed by a row that is named like another method.
    """

    method: str
    set: Values = field(default_factory=dict)
    model: str | None = None
    seeds: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison of several in a file.

    Attributes
    ----------
    id : str
        Names its folder.
    settings : dict
        Options, on top of the file's, checked by :func:`option_values`.
    set : dict
        Hyper-parameters, on top of the file's, for the methods that have them.
    """

    id: str
    settings: dict[str, Any] = field(default_factory=dict)
    set: Values = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunForm:
    """Methods and settings of one or several comparisons; see the module.

    Attributes
    ----------
    methods : tuple of str
        Methods of the registry, or names of ``named``, in their order.
    seeds : tuple of int
        Of each comparison; the command's if empty.
    settings : dict
        Options by their names on the command line, without dashes at the front, checked by :func:`option_values`.
    hyperparameters : dict of dict
        By ``all``, method, or name.
    named : dict of Named
        Rows that are a method with settings.
    grid : dict
        Values of options and hyper-parameters, or of hyper-parameters by row.
    run : tuple of Cell
        Comparisons one by one; a single one if empty.
    """

    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    hyperparameters: dict[str, Values] = field(default_factory=dict)
    named: dict[str, Named] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    run: tuple[Cell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One comparison that a run form asks for.

    Attributes
    ----------
    id : str
        Its cell and its values of the grid; empty where there is one comparison only.
    settings : dict
        Options with their values, by field of :class:`ExperimentOptions`.
    entries : tuple of Entry
        The rows.
    """

    id: str
    settings: Values
    entries: tuple[Entry, ...]


def read_run_form(path: Path) -> RunForm:
    """Read a TOML file, or the ``result.json`` of a comparison, which then runs again as it was.

    A paper's experiment is a TOML file of this form as well; what it says besides is left out.

    Raises
    ------
    ConfigError
        If it cannot be read, or has a key or a type that is not allowed.
    ResultError
        If a JSON file is no result.
    """
    if path.is_dir():
        path = path / files.FILE_NAME
    if path.suffix != ".json":
        values = read_toml(path)
        if "kind" in values:
            from flwr_kd.experiments.papers import library, rules

            experiment = library.read_file(path)
            if not experiment.trained:
                raise ConfigError(f"{path} trains nothing: `flwr-kd reproduce` computes what it is about")
            return rules.taken(experiment)
        _check_places(values, path)
        form = build(RunForm, values, str(path))
        if values.get("seeds") == []:
            raise ConfigError(f"{path}: seeds must have at least one number: leave it out for 0, 1 and 2")
        _check_settings(form, path)
        return form
    try:
        return _of_result(files.load(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} cannot be read: there is no such file") from None


def _check_places(values: Mapping[str, Any], path: Path) -> None:
    """Refuse a key that belongs elsewhere, and say where; one that belongs nowhere is left to :func:`build`."""
    for where, table, known in _tables(values):
        for key in table:
            if _field(key) not in known and (place := _belongs(key)) is not None:
                raise ConfigError(f"{path}: {where}{place}")


def _tables(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
    """Yield a file's tables whose keys are known: where each is, the table, and the fields that its keys may be."""
    yield "", values, get_type_hints(RunForm)
    hyperparameters = _fields(registry.methods().values())
    runs = values.get("run")
    cells = [cell for cell in runs if isinstance(cell, Mapping)] if isinstance(runs, list) else []
    rows: list[tuple[str, Mapping[str, Any], type]] = [
        (_of_run(cell.get("id")), cell, Cell) for cell in cells
    ]
    rows += [(f"named.{name}: ", row, Named) for name, row in _inner(values, "named").items()]
    for where, row, kind in rows:
        yield where, row, get_type_hints(kind)
        if isinstance(row.get("set"), Mapping):
            yield f"{where}set: ", row["set"], hyperparameters
    for place in ("hyperparameters", "grid"):
        for name, row in _inner(values, place).items():
            yield f"{place}.{name}: ", row, hyperparameters


def _inner(values: Mapping[str, Any], place: str) -> dict[str, Mapping[str, Any]]:
    """Return the tables in a table; other values, of a wrong type or of a grid's options, are left out."""
    table = values.get(place)
    inside = table.items() if isinstance(table, Mapping) else ()
    return {name: row for name, row in inside if isinstance(row, Mapping)}


def _of_run(cell: object) -> str:
    return f"run {cell!r}: "


def _check_settings(form: RunForm, path: Path) -> None:
    """Check names and types of options, and say where they are."""
    of_cells = {_of_run(cell.id): cell.settings for cell in form.run}
    for where, settings in {"": form.settings, **of_cells}.items():
        try:
            option_values(settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {where}settings: {error}") from None


def _of_result(result: Comparison) -> RunForm:
    """Return what gives a result again, with each value that its runs had."""
    known = {each.name for each in fields(ExperimentOptions)} - set(_OF_RESULT_ONLY)
    settings = {
        name.replace("_", "-"): value
        for name, value in result.config.items()
        if name in known and value is not None
    }
    if result.config.get("dataset") == "own":
        raise ConfigError(
            "the result is of clients' own data, which it does not have: run what made it again, its command"
        )
    # What follows from other options must be free to follow from others.
    if result.config.get("client_samples") is not None:
        settings.pop("limit", None)
    if settings.get("public") == public_name(None, dataset=settings.get("dataset", ""), data_dir=None):
        settings.pop("public")
    models = result.config.get("model")
    runs = result.by_method()
    seeds = tuple(sorted({run.seed for run in result.runs}))
    of_rows = {name: tuple(sorted(run.seed for run in of_name)) for name, of_name in runs.items()}
    return RunForm(
        methods=tuple(runs),
        seeds=seeds,
        settings=settings,
        named={
            name: Named(
                method=of_name[0].method,
                set=of_name[0].hyperparameters,
                model=models.get(name) if isinstance(models, Mapping) else models,
                seeds=() if of_rows[name] == seeds else of_rows[name],
                note="as in the result",
            )
            for name, of_name in runs.items()
        },
    )


def option_values(settings: Mapping[str, Value]) -> Values:
    """Return options by field of :class:`ExperimentOptions`, after checking names and types.

    Raises
    ------
    ConfigError
        If an option is unknown, or its value of another type.

    Examples
    --------
    >>> option_values({"fraction-train": 1, "partition": "iid", "target": 85})
    {'fraction_train': 1.0, 'partition': 'iid', 'target': '85'}
    """
    hints = get_type_hints(ExperimentOptions)
    known = {each.name.replace("_", "-"): each.name for each in fields(ExperimentOptions)}
    values: Values = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(_belongs(name) or unknown_name("option", name, known))
        if isinstance(value, list):
            raise ConfigError(
                f"{name} must have one value, got a list: write several under [grid], which makes a comparison "
                "for each"
            )
        hint = hints[known[name]]
        kind = next(each for each in (*get_args(hint), hint) if isinstance(each, type))
        if name in _MAY_BE_NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        values[known[name]] = checked(name, value, kind, {})
    return values


def _belongs(name: str) -> str | None:
    """Say where a key of a file or of the command belongs that is not where it should be; None if nowhere."""
    if name in _options():
        return f"{name} is an option of a run: write it under [settings], or in `settings` of a [[run]]"
    hints = get_type_hints(RunForm)
    if name in hints:
        table = get_origin(hints[name]) is dict or name == "run"
        place = "in a table of its own" if table else "at the top of the file, above its first table"
        return f"{name} is no option of a run: write it {place}"
    if name == "set" or _field(name) in _fields(registry.methods().values()):
        what = "hyper-parameters are" if name == "set" else f"{name} is a hyper-parameter:"
        return f"{what} written under [hyperparameters], or in `set` of a [[run]] or a [named] row"
    if name in _OF_COMMAND_LINE:
        return (
            f"{name} is an option of the command line only: leave it out of the file, and give --{name} there"
        )
    return None


def planned(
    form: RunForm,
    *,
    settings: Mapping[str, Value] | None = None,
    assignments: Sequence[str] = (),
    methods: Sequence[str] = (),
) -> list[Planned]:
    """Return the comparisons that a form asks for.

    Parameters
    ----------
    form : RunForm
        With at least one method, unless ``methods`` has some.
    settings : mapping, optional
        Options by field that win over the form's, such as the command line's. One of the grid has no other values.
        Where they replace all in which the comparisons differ, there is one.
    assignments : sequence of str
        Hyper-parameters as ``name=value`` that win over the form's, for the methods that have them. One of the grid
        has no other values.
    methods : sequence of str
        In place of the form's.

    Raises
    ------
    ConfigError
        If a name or a value is not allowed, or ``settings`` or ``assignments`` replace all in which two rows
        or some of the comparisons differ.
    """
    names = tuple(methods) or form.methods
    if not names:
        raise ConfigError("there is no method to run: name one, or give the file `methods`")
    for name, named in form.named.items():
        _check_named(name, named)
    of_options, of_methods = _divided(form.grid)
    of_options = {name: values for name, values in of_options.items() if _field(name) not in (settings or {})}
    for name in of_methods:
        # Methods of the caller may leave out rows of the form.
        if name and name not in (*names, *(form.methods if methods else ())):
            raise ConfigError(f"grid.{name}: {unknown_name('row', name, names)}")
    cells = form.run or (Cell(id=""),)
    if repeated := [name for name, count in Counter(cell.id for cell in cells).items() if count > 1]:
        raise ConfigError(f"run: two comparisons have the id {repeated[0]!r}: give one of them another")
    found: list[Planned] = []
    before: list[object] = []
    for cell, values in itertools.product(cells, _combinations(of_options)):
        own = option_values({**form.settings, **cell.settings, **values})
        entries = entries_of(form, names, cell.set, assignments=assignments, grid=of_methods)
        rows = _rows_before(form, names, cell, of_methods)
        if "model" in (settings or {}):
            entries = tuple(replace(entry, model=None) for entry in entries)
        _check_differ(
            [(each.name, (each.method.name, each.config, each.model)) for each in entries],
            # A row of the grid is its method's or its name's with further values.
            [rows.get(each.name, rows.get(each.name.partition(", ")[0])) for each in entries],
            "rows",
        )
        place = " ".join(
            [*([cell.id] if cell.id else []), *(f"{key}={value}" for key, value in values.items())]
        )
        found.append(
            Planned(
                id=re.sub(r"[^\w .,=+-]", "-", place), settings={**own, **(settings or {})}, entries=entries
            )
        )
        before.append((own, rows))
    if shared := [folder for folder, count in Counter(plan.id for plan in found).items() if count > 1]:
        raise ConfigError(
            f"run: two comparisons have the folder {shared[0]!r}, in which other characters than letters, digits "
            "and spaces .,=+- become -: give one of them another id"
        )
    now = [(each.id, (each.settings, each.entries)) for each in found]
    if all(each == now[0][1] for _, each in now) and any(each != before[0] for each in before):
        return [replace(found[0], id="")]
    _check_differ(now, before, "comparisons")
    return found


def _rows_before(
    form: RunForm, names: Sequence[str], cell: Cell, grid: Mapping[str, Mapping[str, Sequence[Value]]]
) -> dict[str, object]:
    """Return what each row is without the command line's values, with and without the grid's, where allowed."""
    with suppress(ConfigError):
        rows = [*entries_of(form, names, cell.set), *entries_of(form, names, cell.set, grid=grid)]
        return {row.name: (row.method.name, row.config, row.model) for row in rows}
    return {}


def entries_of(
    form: RunForm,
    names: Sequence[str],
    more: Mapping[str, Value] | None = None,
    *,
    assignments: Sequence[str] = (),
    grid: Mapping[str, Mapping[str, Sequence[Value]]] | None = None,
) -> tuple[Entry, ...]:
    """Return the rows of a comparison.

    Parameters
    ----------
    form : RunForm
        Its hyper-parameters and named rows.
    names : sequence of str
        Methods of the registry, or named rows.
    more : mapping, optional
        Hyper-parameters on top of the form's, for the methods that have them.
    assignments : sequence of str
        The same as ``name=value``, which win over all others.
    grid : mapping, optional
        Values of hyper-parameters, by row or for all rows under an empty name: a labelled row for each combination.

    Raises
    ------
    ConfigError
        If a name or a value is not allowed.
    """
    rows = {name: _row_of(form, name) for name in dict.fromkeys(names)}
    methods = [row.method for row in rows.values()]
    for key in form.hyperparameters:
        if key != "all" and key not in form.named:
            method_of_row(key)
    general = (grid or {}).get("", {})
    _check_known([*form.hyperparameters.get("all", {})], methods, "hyperparameters.all")
    _check_known([*(more or {})], methods, "set")
    _check_known([*general], methods, "grid", "option or hyper-parameter", _options())
    if assignments:
        configs_of(methods, assignments)
        check_alone({name: row.method for name, row in rows.items()}, assignments)
    entries = []
    for name, row in rows.items():
        own = (grid or {}).get(name, {})
        _check_own(name, row.method, own)
        assigned = row.method.config_class.read_texts(settings_of(row.method, assignments))
        # What a row is named for is not spread, nor what is assigned.
        spread = {**{key: each for key, each in general.items() if key not in row.set}, **own}
        kept = {key: each for key, each in spread.items() if _field(key) not in map(_field, assigned)}
        for values in _combinations(_having(row.method, kept)):
            layers = (
                _having(row.method, form.hyperparameters.get("all", {})),
                form.hyperparameters.get(row.method.name, {}),
                form.hyperparameters.get(name, {}),
                _having(row.method, more or {}),
                row.set,
                values,
                assigned,
                ALONE_SETTINGS if (name, row.method.name) == (ALONE, ALONE_BY) else {},
            )
            label = ", ".join([name, *(f"{key}={value}" for key, value in values.items())])
            entries.append(Entry(row.method, _config(row.method, layers, name), label, row.model, row.seeds))
    return tuple(entries)


class _Row(NamedTuple):
    method: registry.Method
    set: Mapping[str, Value]
    model: str | None
    seeds: tuple[int, ...] = ()


def _row_of(form: RunForm, name: str) -> _Row:
    if name in form.named:
        named = form.named[name]
        return _Row(registry.get(named.method), named.set, named.model, named.seeds)
    known = registry.methods()
    if name == ALONE:
        return _Row(known[ALONE_BY], ALONE_SETTINGS, None)
    if name not in known:
        raise ConfigError(unknown_name("method", name, [*form.named, *known]))
    return _Row(known[name], {}, None)


def _check_named(name: str, named: Named) -> None:
    """Refuse a method that there is not, and another method's name without a reason."""
    try:
        method = registry.get(named.method)
    except ConfigError as error:
        raise ConfigError(f"named.{name}.method: {error}") from None
    if not name.strip():
        raise ConfigError(f"named: a row must have a name, got {name!r}")
    if is_alone(name) and method.name != ALONE_BY and not named.note:
        raise ConfigError(
            f"named.{name}: {ALONE} is the row of clients that train by themselves, with which others are "
            f"compared, and this row is {method.name}: give it another name, or a note that says why it is that row"
        )
    if name in registry.methods() and name != method.name and not named.note:
        raise ConfigError(
            f"named.{name}: {name} is a method, and this row is {method.name}: give the row another name, or a "
            "note that says why"
        )


def _check_differ(now: Sequence[tuple[str, object]], before: Sequence[object], what: str) -> None:
    """Refuse runs that differ in nothing but their names, where the command line replaced what they differed in."""
    for (first, one), (second, other) in itertools.combinations(enumerate(now), 2):
        if one[1] == other[1] and before[first] != before[second]:
            raise ConfigError(
                f"the {what} {one[0]!r} and {other[0]!r} are the same with the options of the command line, which "
                "replace what they differ in: leave out the option, or one of them"
            )


def _field(key: str) -> str:
    return key.replace("-", "_")


def _fields(methods: Iterable[registry.Method]) -> set[str]:
    """Return the hyper-parameters of some methods, as fields."""
    return {name for method in methods for name in method.config_class.field_types()}


def _having(method: registry.Method, values: Mapping[str, T]) -> dict[str, T]:
    """Return the hyper-parameters that a method has and does not fix."""
    known = method.config_class.field_types()
    return {
        key: value
        for key, value in values.items()
        if _field(key) in known and _field(key) not in method.fixed
    }


def _check_known(
    keys: Sequence[str],
    methods: Sequence[registry.Method],
    place: str,
    what: str = "hyper-parameter",
    others: Sequence[str] = (),
) -> None:
    known = _fields(methods)
    for key in keys:
        if _field(key) not in known:
            names = [*others, *sorted(name.replace("_", "-") for name in known)]
            raise ConfigError(f"{place}: {unknown_name(what, key, names, meant=meant(key, names))}")


def _options() -> list[str]:
    return [each.name.replace("_", "-") for each in fields(ExperimentOptions)]


def _check_own(name: str, method: registry.Method, grid: Mapping[str, Sequence[Value]]) -> None:
    """Refuse hyper-parameters of a row's grid that its method does not have, or fixes."""
    _check_known([*grid], [method], f"grid.{name}")
    for key in grid:
        if (fixed := method.fixed.get(_field(key))) is not None:
            raise ConfigError(f"grid.{name}: {key} is fixed at {fixed} by {method.name}")


def _config(method: registry.Method, layers: Sequence[Mapping[str, Value]], name: str) -> MethodConfig:
    """Return a method's hyper-parameters; later layers win. What a method fixes may only be repeated."""
    values = dict(method.config().to_wire())
    for layer in layers:
        for key, value in layer.items():
            fixed = method.fixed.get(_field(key))
            if fixed is not None and fixed != value:
                raise ConfigError(f"{name}: {key} is fixed at {fixed} by {method.name}, got {shown(value)}")
            values[key.replace("_", "-")] = value
    try:
        return method.config_class.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _divided(
    grid: Mapping[str, Any],
) -> tuple[dict[str, list[Value]], dict[str, dict[str, list[Value]]]]:
    """Return the values of options, and those of hyper-parameters by row."""
    options = _options()
    of_options: dict[str, list[Value]] = {}
    of_rows: dict[str, dict[str, list[Value]]] = {"": {}}
    for key, values in grid.items():
        if isinstance(values, Mapping):
            of_rows[key] = {name: _listed(f"grid.{key}.{name}", each) for name, each in values.items()}
        elif key in options:
            of_options[key] = _listed(f"grid.{key}", values)
        else:
            of_rows[""][key] = _listed(f"grid.{key}", values)
    return of_options, of_rows


def _listed(where: str, values: object) -> list[Value]:
    if values == []:
        raise ConfigError(f"{where} must have at least one value, got an empty list")
    if not isinstance(values, list) or not all(isinstance(each, Value) for each in values):
        raise ConfigError(f"{where} must be a list of values, got {shown(values)}")
    for position, value in enumerate(values):
        if value in values[:position]:
            raise ConfigError(f"{where} has the value {shown(value)} twice: leave one of them out")
    return values


def _combinations(values: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))
