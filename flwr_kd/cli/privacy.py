"""``flwr-kd privacy``."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_kd.cli.help import columns

if TYPE_CHECKING:
    from flwr_kd.privacy import PrivacyBudget

__all__ = ["show_privacy"]


def show_privacy(
    sigma: Annotated[
        float | None,
        typer.Option(help="σ, FedHKD's noise multiplier; 7 without --dp-noise", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds in which a client sends")] = 50,
    delta: Annotated[float, typer.Option(help="δ")] = 0.01,
    dimensions: Annotated[int, typer.Option(help="D, size of a representation")] = 64,
    classes: Annotated[int, typer.Option(help="classes that a change of one sample touches")] = 1,
    count: Annotated[int | None, typer.Option(help="N, samples of the class, for the noise's size")] = None,
    clip: Annotated[float, typer.Option(help="ζ, bound of each element")] = 3.0,
    dp_noise: Annotated[
        float | None,
        typer.Option(help="dp-noise: noise on updates of weights, over dp-clip", show_default=False),
    ] = None,
    dp_clip: Annotated[
        float | None, typer.Option(help="dp-clip, for the noise's size", show_default=False)
    ] = None,
    updates: Annotated[int, typer.Option(help="updates per round; 2 in FedHEAD")] = 1,
    dp_sgd_noise: Annotated[
        float | None,
        typer.Option(help="dp-sgd-noise: noise of DP-SGD, over dp-sgd-clip", show_default=False),
    ] = None,
    local_epochs: Annotated[int, typer.Option(help="epochs of DP-SGD per round")] = 5,
    rate: Annotated[
        float | None,
        typer.Option(help="batch size over samples, to compare with Poisson sampling", show_default=False),
    ] = None,
) -> None:
    """Print the privacy budget of FedHKD's noise, of the noise on updates of weights, and of DP-SGD."""
    from flwr_kd import privacy
    from flwr_kd.update_privacy import sgd_budget, update_budget

    if sigma is not None or (dp_noise is None and dp_sgd_noise is None):
        budget = privacy.budget(
            sigma=7.0 if sigma is None else sigma,
            rounds=rounds,
            delta=delta,
            dimensions=dimensions,
            classes=classes,
            count=count,
            bound=clip,
        )
        _show("Privacy budget", budget)
    if dp_noise is not None:
        releases = rounds * updates
        _show(
            "Privacy budget of the updates of one client's weights",
            update_budget(noise=dp_noise, releases=releases, delta=delta, clip=dp_clip),
        )
    if dp_sgd_noise is not None:
        _show(
            "Privacy budget of one sample in DP-SGD",
            sgd_budget(noise=dp_sgd_noise, epochs=rounds * local_epochs, delta=delta, rate=rate),
        )


def _show(title: str, budget: PrivacyBudget) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("quantity", "value", title=title, title_justify="left")
    for label, value in budget.rows():
        table.add_row(label, value)
    Console().print(table)
    for heading, lines in (("It holds if", budget.assumptions), ("Not covered", budget.not_covered)):
        print(f"{heading}:")
        for line in lines:
            print(textwrap.fill(line, min(columns(), 100), initial_indent="  - ", subsequent_indent="    "))
