"""``flwr-kd methods``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flwr_kd import registry
from flwr_kd.cli.options import ARGUMENTS

__all__ = ["PUBLIC_DATA", "list_methods"]

PUBLIC_DATA = {
    "": "no",
    "server": "at the server",
    "synthetic": "synthetic, at the server",
    "clients": "at the clients",
}
"""What a method's ``public_at`` means to a reader."""


def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    shown: Annotated[str | None, typer.Argument(metavar="METHOD", help=ARGUMENTS["shown"])] = None,
) -> None:
    """List the methods, or one method's hyper-parameters."""
    if shown is not None:
        _describe(registry.get(shown), as_json)
        return
    rows = [
        {
            "name": m.name,
            "paper": m.paper,
            "exchanged": m.exchanged,
            "public_at": m.public_at,
            "different_models": m.heterogeneous,
            "global_model": m.global_model,
        }
        for m in registry.methods().values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "exchanged", "public data", "different models", "global model", "paper")
    for row in rows:
        flags = ["yes" if row[key] else "no" for key in ("different_models", "global_model")]
        public = PUBLIC_DATA[str(row["public_at"])]
        table.add_row(str(row["name"]), str(row["exchanged"]), public, *flags, str(row["paper"]))
    Console().print(table)


def _describe(method: registry.Method, as_json: bool) -> None:
    # The defaults of the other commands, which may differ from the class's.
    used = method.config().to_wire()
    rows = [
        (name, kind, used[name], text)
        for name, kind, _, text in method.config_class.help()
        if name.replace("-", "_") not in method.fixed
    ]
    if as_json:
        keys = ("name", "type", "default", "help")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("hyper-parameter", "type", "default", "meaning", title=f"{method.name}: {method.paper}")
    for name, kind, default, text in rows:
        table.add_row(name, kind, str(default), text)
    Console().print(table)
