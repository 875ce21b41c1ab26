"""Completion of commands, options and names in bash, zsh and fish, with Click's own means."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Annotated

import click
import typer
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from flwr_kd import catalogue, registry
from flwr_kd.experiments.options import BACKENDS
from flwr_kd.results.clients import ALONE
from flwr_kd.text import unknown_name

__all__ = ["complete", "completion", "values_of"]

PROGRAM, VARIABLE = "flwr-kd", "_FLWR_KD_COMPLETE"
_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    **dict.fromkeys(("method", "shown", "listed"), registry.methods),
    "methods": lambda: (*registry.methods(), ALONE),
    "dataset": lambda: catalogue.DATASETS,
    "public": lambda: catalogue.DATASETS,
    "model": lambda: catalogue.MODELS,
    "partition": lambda: catalogue.PARTITIONS,
    "backend": lambda: BACKENDS,
    "device": lambda: ("auto", "cpu", "cuda"),
    "precision": lambda: ("float32", "bfloat16"),
    "augment": lambda: ("none", "crop", "crop-flip"),
    "feature_layer": lambda: catalogue.FEATURE_LAYERS,
    "format": lambda: ("text", "csv", "markdown", "latex"),
    "log": lambda: ("tensorboard", "mlflow", "wandb"),
    "shell": lambda: _SHELLS,
}
"""By parameter, the names that it takes. Only these are offered; other values may be allowed as well."""
_SEPARATED = ("model", "listed")
_OPEN = re.compile(r"\[.*|(?<=:)[A-Z].*|^package\.module:function$")
"""What a user has to say of a form such as ``dirichlet:ALPHA`` or ``ktpfl-1[:MANY]``."""


def values_of(parameter: str) -> Callable[[str], list[str]] | None:
    """Return a function that completes a parameter's value; None if there is nothing to offer.

    >>> values_of("backend")("in"), values_of("model")("mlp,lene"), values_of("rounds")
    (['inline'], ['mlp,lenet'], None)
    """
    if parameter not in _VALUES:
        return None

    def fitting(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if parameter in _SEPARATED else ("", "", incomplete)
        names = (_OPEN.sub("", name) for name in _VALUES[parameter]())
        return [f"{before}{comma}{name}" for name in dict.fromkeys(names) if name and name.startswith(last)]

    return fitting


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish", autocompletion=values_of("shell"))],
) -> None:
    """Print the script that completes `flwr-kd` in a shell: eval "$(flwr-kd completion bash)"."""
    if shell not in _SHELLS:
        raise click.UsageError(unknown_name("shell", shell, _SHELLS))
    # Its text does not depend on the command.
    print(_SHELLS[shell](click.Command(PROGRAM), {}, PROGRAM, VARIABLE).source())


def complete(command: Callable[[], click.Command]) -> bool:
    """Print what the shell's script asks for; return whether it did: the command is then done.

    Parameters
    ----------
    command : callable
        Returns the command, which is built only if it is needed.
    """
    shell, _, instruction = os.environ.get(VARIABLE, "").partition("_")
    if shell not in _SHELLS or instruction != "complete":
        return False
    print(_SHELLS[shell](command(), {}, PROGRAM, VARIABLE).complete())
    return True
