"""The command itself: its top level, its exit codes, and how errors are printed.

Nothing heavy is imported here or by the commands' modules: help, version and the list of methods need no PyTorch.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, NoReturn

import click
import typer

from flwr_kd import __version__
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.cli import compare, methods, names, plot, privacy
from flwr_kd.cli.help import Command, Group, usage_error
from flwr_kd.cli.options import UsageError
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.results.errors import ResultError, ResultExistsError
from flwr_kd.wording import Interface, speaking

__all__ = ["app", "main", "top"]

app = typer.Typer(
    name="flwr-kd",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated knowledge distillation for Flower.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("methods", cls=Command)(methods.list_methods)
app.command("datasets", cls=Command)(names.list_datasets)
app.command("models", cls=Command)(names.list_models)
app.command("partitions", cls=Command)(names.list_partitions)
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
    for stream in (sys.stdout, sys.stderr):
        # A code page may lack a letter, such as a Greek one.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with speaking(Interface.COMMAND):
        code = _run()
    sys.exit(code)


def _run() -> int:
    try:
        # In this mode an Exit's code, and 130 after an interrupt, are returned.
        code = int(app(prog_name="flwr-kd", standalone_mode=False) or 0)
    except (ConfigError, DataError, ResultError, ResultExistsError, UsageError, ImportError) as error:
        _fail(str(error), 2)
    except click.UsageError as error:
        _fail(usage_error(error), 2)
    except click.Abort:
        code = _INTERRUPTED
    except SimulationError as error:
        _fail(str(error), 1)
    if code == _INTERRUPTED:
        _fail("interrupted", code)
    return code


def _fail(text: str, code: int) -> NoReturn:
    print("flwr-kd: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)
