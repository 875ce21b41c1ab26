"""``flwr-kd privacy``."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from flwr_kd.cli.help import columns

__all__ = ["show_privacy"]


def show_privacy(
    sigma: Annotated[float, typer.Option(help="σ, the noise multiplier")] = 7.0,
    rounds: Annotated[int, typer.Option(help="rounds in which a client sends")] = 50,
    delta: Annotated[float, typer.Option(help="δ")] = 0.01,
    dimensions: Annotated[int, typer.Option(help="D, size of a representation")] = 64,
    classes: Annotated[int, typer.Option(help="classes that a change of one sample touches")] = 1,
    count: Annotated[int | None, typer.Option(help="N, samples of the class, for the noise's size")] = None,
    clip: Annotated[float, typer.Option(help="ζ, bound of each element")] = 3.0,
) -> None:
    """Print the privacy budget of FedHKD's noise, in one round and over a run."""
    from rich.console import Console
    from rich.table import Table

    from flwr_kd import privacy

    budget = privacy.budget(
        sigma=sigma,
        rounds=rounds,
        delta=delta,
        dimensions=dimensions,
        classes=classes,
        count=count,
        bound=clip,
    )
    console = Console()
    table = Table("quantity", "value", title="Privacy budget", title_justify="left")
    for label, value in budget.rows():
        table.add_row(label, value)
    console.print(table)
    for heading, lines in (("It holds if", budget.assumptions), ("Not covered", budget.not_covered)):
        print(f"{heading}:")
        for line in lines:
            print(textwrap.fill(line, min(columns(), 100), initial_indent="  - ", subsequent_indent="    "))
