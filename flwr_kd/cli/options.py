"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperCommand

__all__ = [
    "ARGUMENTS",
    "Attack",
    "Attackers",
    "Augment",
    "Backend",
    "Clients",
    "Command",
    "DataDir",
    "Dataset",
    "Device",
    "FeatureDim",
    "Force",
    "Fraction",
    "ImageSize",
    "Imbalance",
    "Limit",
    "Model",
    "NoArrays",
    "Out",
    "Partition",
    "Public",
    "PublicLimit",
    "ResultDir",
    "Resume",
    "Rounds",
    "Seeds",
    "Settings",
    "UsageError",
    "Validation",
    "Verbose",
    "Workers",
]

ARGUMENTS = {
    "shown": "show the hyper-parameters of this one",
    "method": "a name from `flwr-kd methods`",
    "methods": "names from `flwr-kd methods`",
    "result_dir": "folder of a result of `simulate` or `compare`",
}
Dataset = Annotated[str, typer.Option(help="digits, fashion-mnist, mnist-5k, ..., or csv:PATH")]
Partition = Annotated[
    str,
    typer.Option(
        help="iid, dirichlet:ALPHA, inner-dirichlet:ALPHA, pathological:K, ktpfl-1[:MANY], ktpfl-2[:EACH]"
    ),
]
Clients = Annotated[int, typer.Option(help="number of clients")]
Rounds = Annotated[int, typer.Option(help="number of rounds")]
Model = Annotated[
    str | None,
    typer.Option(
        help="mlp, lenet, cnn, resnet8, ...; a list gives them out in turn; the method's own if not set"
    ),
]
FeatureDim = Annotated[
    int | None, typer.Option(help="size of the representation; the model's own if not set")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="a hyper-parameter, NAME=VALUE; repeatable")
]
Fraction = Annotated[float, typer.Option(help="share of the clients drawn per round")]
Backend = Annotated[str, typer.Option(help="ray or inline")]
Workers = Annotated[int, typer.Option(help="clients at the same time")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
DataDir = Annotated[str | None, typer.Option(help="folder of data files")]
Limit = Annotated[int | None, typer.Option(help="use so many training samples only")]
Validation = Annotated[
    bool,
    typer.Option("--validation", help="measure on a fifth of the training samples, not on the test set"),
]
Imbalance = Annotated[
    float | None,
    typer.Option(
        help="cut the training samples to a long tail: largest class over smallest; FedHyb's are 10, 20, 50, 100"
    ),
]
ImageSize = Annotated[int | None, typer.Option(help="pad images to this side")]
Public = Annotated[
    str | None,
    typer.Option(
        help="public data of methods that need some; the data set's default if not set; its own name holds a "
        "fifth of its training part back"
    ),
]
PublicLimit = Annotated[int, typer.Option(help="use so many public samples at most")]
Augment = Annotated[str, typer.Option(help="none, crop or crop-flip, on training batches")]
Attack = Annotated[
    str | None,
    typer.Option(
        help="what malicious clients do: label-flip[:TARGET], label-flip:permute, gaussian:SIGMA, "
        "sign-flip[:SCALE], nan, payload[:KIND]"
    ),
]
Attackers = Annotated[int, typer.Option(help="number of malicious clients, drawn by the seed")]
Out = Annotated[Path | None, typer.Option(help="folder of the result; runs/NAME if not set")]
Force = Annotated[bool, typer.Option("--force", help="overwrite a result that is there")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="go on with an interrupted comparison in this folder, or add methods and seeds to a whole one: "
        "finished runs are not run again",
    ),
]
NoArrays = Annotated[
    bool, typer.Option("--no-arrays", help="do not keep the last arrays, which `flwr-kd plot` needs")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="show Flower's log")]
Seeds = Annotated[str, typer.Option(help="seeds separated by commas")]
ResultDir = Annotated[Path, typer.Argument(help=ARGUMENTS["result_dir"])]


class UsageError(Exception):
    """A mistake of the user's, told in one line."""


class Command(TyperCommand):
    """Shows what Typer 0.20 does not with newer versions of Click: an argument's help, and brackets as brackets."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options, each with its help."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name, text = record[0], record[1].replace("\\[", "[")
                is_argument = isinstance(parameter, click.Argument)
                told = ARGUMENTS[parameter.name or ""] if is_argument else ""
                text = text if told in text else f"{told}  {text}".rstrip()
                sections["Arguments" if is_argument else "Options"].append((name, text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
