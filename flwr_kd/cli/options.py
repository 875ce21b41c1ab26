"""Options and arguments that several commands share, and how they become command lines.

The options of an experiment stand in :mod:`flwr_kd.experiments.options`. :func:`with_options` makes a command's
signature from such a class, so that no command lists them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from flwr_kd.checks import read_whole_number
from flwr_kd.cli.completion import values_of
from flwr_kd.experiments.options import option

__all__ = [
    "ARGUMENTS",
    "LOG",
    "Device",
    "ResultDir",
    "RunOptions",
    "UsageError",
    "read_seeds",
    "with_options",
]

ARGUMENTS = {
    "shown": "show this method's paper and hyper-parameters",
    "method": "a name from `flwr-kd methods`",
    "methods": "names from `flwr-kd methods`, and alone (each client trains by itself), or of the file of "
    "--config; the file's own if not set",
    "listed": "a name from `flwr-kd methods`, or several, between which the app's setting `method` then chooses",
    "app_dir": "folder of the app, new or empty; its name is the app's: letters, digits and hyphens",
    "experiment": "a table or figure of this list, such as fedhkd/table-1; all are listed if not set",
    "shell": "bash, zsh or fish",
    "result_dir": "folder of a result of `simulate` or `compare`",
    "result_dirs": "folders of results of `simulate` or `compare`, or folders that have such inside",
}
"""By name, the help texts of arguments, which Typer does not show itself."""
LOG = "also write the runs to tensorboard[:DIR], mlflow[:URI] or wandb[:PROJECT]; repeatable"
"""Help of the option ``--log``, which :func:`flwr_kd.cli.compare.run_plan` takes."""
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
"""The option ``--device``."""
ResultDir = Annotated[Path, typer.Argument(help=ARGUMENTS["result_dir"])]
"""The argument for the folder of one result."""


class UsageError(Exception):
    """A mistake of the user's, reported in one line."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `simulate` and `compare` that are not the experiment's."""

    settings: list[str] | None = option(
        None, "a hyper-parameter of `flwr-kd methods METHOD`, as NAME=VALUE; repeatable", flag="--set"
    )
    out: Path | None = option(None, "folder of the result; runs/ and the methods' names if not set")
    force: bool = option(False, "overwrite a result that is there")
    resume: bool = option(
        False,
        "go on with an interrupted comparison in this folder, or add methods and seeds to a whole one: finished "
        "runs are not run again",
    )
    columns: str | None = option(
        None,
        "columns of the table, separated by commas: local-accuracy, common-accuracy, global-on-clients, seconds, "
        "... or all",
    )
    format: str = option(
        "text",
        "how the table is printed: text, csv, markdown or latex; all but text leave the rest to stderr",
    )
    log: list[str] | None = option(None, LOG)
    no_arrays: bool = option(False, "do not keep the last arrays, which `flwr-kd plot` needs")
    verbose: bool = option(False, "show Flower's log")


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose parameters that are dataclasses of options are one command-line option per field.

    Parameters
    ----------
    function : callable
        Its parameters are as Typer takes them, or are annotated with a dataclass whose fields are made by
        :func:`flwr_kd.experiments.options.option`.
    """
    signature = inspect.signature(function, eval_str=True)
    groups = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = groups.get(parameter.name)
        parameters += [parameter] if group is None else _parameters_of(group)

    @wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        function(**values)

    # Typer reads these two.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    hints, parameters = get_type_hints(group), []
    for each in fields(group):
        flag, is_flag = each.metadata["flag"], hints[each.name] is bool
        # Without its name, Typer gives a flag a second form, --no-....
        names = [flag or f"--{each.name.replace('_', '-')}"] if flag or is_flag else []
        default = typer.Option(
            each.default, *names, help=each.metadata["help"], autocompletion=values_of(each.name)
        )
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=hints[each.name]))
    return parameters


def read_seeds(text: str) -> list[int]:
    """Return seeds that are separated by commas, each once."""
    try:
        seeds = [read_whole_number("seed", part, error=UsageError) for part in text.split(",")]
    except UsageError:
        raise UsageError(f"seeds must be whole numbers from 0, separated by commas, got {text!r}") from None
    return list(dict.fromkeys(seeds))
