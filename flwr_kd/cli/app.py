"""The command itself: its top level, its exit codes, and how errors are printed.

Nothing heavy is imported here or by the commands' modules: help, version and the list of methods need no PyTorch.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import click
import typer

from flwr_kd import __version__
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.cli import compare, methods, plot, privacy
from flwr_kd.cli.options import Command, UsageError
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.results.errors import ResultError, ResultExistsError

__all__ = ["app", "main", "top"]

app = typer.Typer(
    name="flwr-kd",
    help="Federated knowledge distillation for Flower.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("methods", cls=Command)(methods.list_methods)
app.command(cls=Command)(compare.simulate)
app.command(cls=Command)(compare.compare)
app.command("privacy", cls=Command)(privacy.show_privacy)
app.add_typer(plot.plots, name="plot")
_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Federated knowledge distillation for Flower."""
    if version:
        print(f"flwr-kd {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command: exit 2 with one line for a user's mistake, 1 where a run fails."""
    try:
        # In this mode an Exit's code, and 130 after an interrupt, are returned.
        code = app(standalone_mode=False) or 0
    except (ConfigError, DataError, ResultError, ResultExistsError, UsageError, ImportError) as error:
        _fail(str(error), 2)
    except click.UsageError as error:
        _fail(error.format_message(), 2)
    except click.Abort:
        code = _INTERRUPTED
    except SimulationError as error:
        _fail(str(error), 1)
    if code == _INTERRUPTED:
        _fail("interrupted", code)
    sys.exit(code)


def _fail(text: str, code: int) -> NoReturn:
    print("flwr-kd: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)
