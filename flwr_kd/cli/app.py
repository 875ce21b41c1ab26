"""The command itself: its top level, its exit codes, and how errors are printed.

Nothing heavy is imported here or by the commands' modules: help, version and the list of methods need no PyTorch.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import click
import typer

from flwr_kd import __version__
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.cli import compare, methods, names, new_app, plot_results, privacy, report, reproduce, table
from flwr_kd.cli.completion import complete, completion
from flwr_kd.cli.help import Command, Group, usage_error
from flwr_kd.cli.interrupts import Interrupted, Interrupts
from flwr_kd.cli.log import one_line_warnings
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
"""The command ``flwr-kd``."""
app.command("methods", cls=Command)(methods.list_methods)
app.command("datasets", cls=Command)(names.list_datasets)
app.command("models", cls=Command)(names.list_models)
app.command("partitions", cls=Command)(names.list_partitions)
app.command(cls=Command)(compare.simulate)
app.command(cls=Command)(compare.compare)
app.command(cls=Command)(reproduce.reproduce)
app.command("privacy", cls=Command)(privacy.show_privacy)
app.add_typer(plot_results.plots, name="plot")
app.command("table", cls=Command)(table.table)
app.command("report", cls=Command)(report.report)
app.command("app", cls=Command)(new_app.write_app)
app.command("completion", cls=Command)(completion)
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
    """Run the command.

    It exits with 2 and one line for a user's mistake, with 1 where a run fails, and with 130 (SIGINT) or 143
    (SIGTERM) where a signal ends it.
    """
    for stream in (sys.stdout, sys.stderr):
        # A code page may lack a letter, such as a Greek one.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if complete(lambda: typer.main.get_command(app)):
        return
    with Interrupts() as interrupts:
        try:
            with speaking(Interface.COMMAND), one_line_warnings():
                code, text = _run()
        except BaseException as error:
            # An interrupt may come out as any error, for example of an import that it has broken off.
            if interrupts.number is None:
                raise
            code, text = _INTERRUPTED, str(error) if isinstance(error, Interrupted) else "interrupted"
        if code == _INTERRUPTED:
            code = interrupts.code
        if text:
            print("flwr-kd: " + " ".join(text.split()), file=sys.stderr)
        if interrupts.number is not None:
            interrupts.leave()
    sys.exit(code)


def _run() -> tuple[int, str]:
    """Run the command; return its exit status and what is to be said about it."""
    try:
        # In this mode an Exit's code, and 130 after an interrupt, are returned.
        code = int(app(prog_name="flwr-kd", standalone_mode=False) or 0)
    except (ConfigError, DataError, ResultError, ResultExistsError, UsageError, ImportError) as error:
        return 2, str(error)
    except click.UsageError as error:
        return 2, usage_error(error)
    except SimulationError as error:
        return 1, str(error)
    except Interrupted as error:
        return _INTERRUPTED, str(error)
    except (click.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    return code, "interrupted" if code == _INTERRUPTED else ""
