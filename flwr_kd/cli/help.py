"""How help and lists are laid out: readable from 50 columns, one line per item in a pipe."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import click
from typer.core import TyperCommand, TyperGroup

from flwr_kd import registry
from flwr_kd.cli.options import ARGUMENTS
from flwr_kd.text import clipped, similar, unknown_name
from flwr_kd.wording import assignment

__all__ = ["Command", "Group", "columns", "definitions", "rows_of_width", "usage_error"]

_TERM = 30
_NARROWEST = 50
_WHOLE_LINE = 10_000


def columns() -> int:
    """Return the terminal's width, or that of the variable ``COLUMNS``; in a pipe without it, no line is cut."""
    return shutil.get_terminal_size((_WHOLE_LINE, 0)).columns


def definitions(rows: Iterable[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    r"""Yield the lines of terms and their explanations, which are wrapped beside them.

    Unlike Click's own, it does not break words at hyphens: options and values would be cut.

    >>> print(*definitions([("--out", "folder of the result"), ("--resume", "go on")], 24, indent=0), sep="\n")
    --out     folder of the
              result
    --resume  go on
    """
    rows = list(rows)
    first = max((len(term) for term, _ in rows if len(term) <= _TERM), default=0)
    margin = " " * (indent + first + 2)
    for term, text in rows:
        wrapped = textwrap.wrap(
            text, max(width - len(margin), 20), break_on_hyphens=False, break_long_words=False
        )
        head = f"{'':{indent}}{term}"
        if len(term) > first or not wrapped:
            yield head
        else:
            yield f"{head:{len(margin)}}{wrapped.pop(0)}"
        yield from (margin + line for line in wrapped)


def rows_of_width(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    r"""Yield one line per row, of aligned cells; only a line's last cell is cut to the width.

    >>> print(*rows_of_width([("fedavg", "weights"), ("fedprox", "weights")], 13), sep="\n")
    fedavg   wei…
    fedprox  wei…
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:{size}}" for cell, size in zip(row, widths, strict=True)).rstrip()
        yield clipped(line, width)


class Command(TyperCommand):
    """A command whose help also shows arguments' texts, which Typer 0.20 leaves out with newer Click."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options, each with its help."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record[0], record[1].replace("\\[", "[")
                is_argument = isinstance(parameter, click.Argument)
                help_text = ARGUMENTS[parameter.name or ""] if is_argument else ""
                text = text if help_text in text else f"{help_text}  {text}".rstrip()
                sections["Arguments" if is_argument else "Options"].append((name, text))
        for title, rows in sections.items():
            if rows:
                _write(formatter, title, rows)


class Group(TyperGroup):
    """A command with commands: their help is not cut, and a mistyped one is answered with one suggestion."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options and commands, each with its help."""
        records = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        _write(formatter, "Options", [record for record in records if record is not None])
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(_WHOLE_LINE)) for name, command in commands if command]
        _write(formatter, "Commands", rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named, and its arguments."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            raise click.UsageError(unknown_name("command", args[0], names), ctx)
        return super().resolve_command(ctx, args)


def _write(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    with formatter.section(title):
        for line in definitions(rows, max(formatter.width, _NARROWEST), formatter.current_indent):
            formatter.write(f"{line}\n")


def usage_error(error: click.UsageError) -> str:
    """Return the text of a mistake that Click found, with the most similar option and where help is."""
    text, context = error.format_message(), error.ctx
    if context is None:
        return text
    if isinstance(error, click.NoSuchOption):
        text = _unknown_option(error.option_name, context.command.params)
    elif "unexpected extra argument" in text and any(
        parameter.name == "method" for parameter in context.command.params
    ):
        text += " for one method; `flwr-kd compare` takes several"
    return f"{text.rstrip('.')}; see `{context.command_path} --help`"


def _unknown_option(given: str, parameters: Sequence[click.Parameter]) -> str:
    options = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    name = given.lstrip("-").replace("_", "-")
    fields = {field for method in registry.methods().values() for field in method.config_class.field_types()}
    if "--set" in options and name.replace("-", "_") in fields:
        return f"{given} is not an option but a hyper-parameter, given as {assignment(name, 'VALUE')}"
    meant = similar(given, options)
    return f"unknown option {given!r}" + (f" (did you mean {meant!r}?)" if meant else "")
