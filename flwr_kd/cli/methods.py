"""``flwr-kd methods``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flwr_kd import registry
from flwr_kd.cli.completion import values_of
from flwr_kd.cli.help import columns, definitions, rows_of_width
from flwr_kd.cli.options import ARGUMENTS
from flwr_kd.wording import assignment

__all__ = ["PUBLIC_DATA", "list_methods"]

PUBLIC_DATA = {
    "": "no",
    "server": "at the server",
    "synthetic": "synthetic, at the server",
    "clients": "at the clients",
}
"""What a method's ``public_at`` means to a reader."""
_HEADER = ("method", "models", "public data", "global", "sent")
_WIDEST = 100


def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    shown: Annotated[
        str | None,
        typer.Argument(metavar="[METHOD]", help=ARGUMENTS["shown"], autocompletion=values_of("shown")),
    ] = None,
) -> None:
    """List the methods, or one method's hyper-parameters.

    The columns say whether clients may have different models or have the same, where public data is needed,
    whether there is a global model, and what is sent. A list in a pipe is not cut.
    """
    if shown is not None:
        _describe(registry.get(shown), as_json)
    elif as_json:
        rows = [
            {
                "name": m.name,
                "paper": m.paper,
                "exchanged": m.exchanged,
                "public_at": m.public_at,
                "different_models": m.heterogeneous,
                "global_model": m.global_model,
                "takes_multi_label": m.takes_multi_label,
            }
            for m in registry.methods().values()
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        lines = [_HEADER, *map(_row, registry.methods().values())]
        print("\n".join(rows_of_width(lines, columns())))


def _row(method: registry.Method) -> tuple[str, ...]:
    models = "any" if method.heterogeneous else "same"
    return method.name, models, method.public_at or "no", _yes(method.global_model), method.exchanged


def _yes(value: bool) -> str:
    return "yes" if value else "no"


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
    width = min(columns(), _WIDEST)
    facts = [
        ("paper", method.paper),
        ("sent", method.exchanged),
        ("models", "may differ between clients" if method.heterogeneous else "the same at all clients"),
        ("inputs", f"one tensor: it {method.one_tensor}" if method.one_tensor else "one tensor or several"),
        ("labels", "one class per sample" + (" or several labels" if method.takes_multi_label else "")),
        ("public data", PUBLIC_DATA[method.public_at]),
        ("global model", _yes(method.global_model)),
    ]
    print(method.name)
    print("\n".join(definitions(facts, width)))
    print(f"\nHyper-parameters ({assignment('NAME', 'VALUE')}), with their defaults:")
    print("\n".join(definitions([(f"{name}={default}", text) for name, _, default, text in rows], width)))
