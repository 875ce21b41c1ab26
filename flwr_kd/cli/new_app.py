"""``flwr-kd app``: a method as a complete Flower App."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flwr_kd import registry
from flwr_kd.cli.completion import values_of
from flwr_kd.cli.options import ARGUMENTS

__all__ = ["write_app"]


def write_app(
    listed: Annotated[
        str,
        typer.Argument(
            metavar="METHOD[,METHOD...]", help=ARGUMENTS["listed"], autocompletion=values_of("listed")
        ),
    ],
    app_dir: Annotated[Path, typer.Argument(metavar="DIR", help=ARGUMENTS["app_dir"])],
    publisher: Annotated[
        str | None, typer.Option(help="the account on Flower Hub; may be set in pyproject.toml later")
    ] = None,
) -> None:
    """Write a complete Flower App of a method, for `flwr run`, `flwr build` and `flwr app publish`."""
    names = list(dict.fromkeys(name.strip() for name in listed.split(",")))
    methods = tuple(registry.get(name) for name in names)
    # PyTorch is imported here.
    from flwr_kd.app_files.project import PUBLISHER, AppProject

    folder = app_dir.resolve()
    project = AppProject(name=folder.name, methods=methods, publisher=publisher or PUBLISHER)
    project.write(folder)
    print(f"app: {folder}\nrun it: flwr run {app_dir} --stream; README.md says more")
