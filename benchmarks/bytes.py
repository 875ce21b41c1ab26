"""How many bytes each method sends per client and round, beside what its paper's formula gives.

The formula is the number of values that the paper says are sent, times the bytes of their dtype. What else is sent
(sample numbers, counts, BatchNorm's statistics) has a column of its own; what is left after that are headers.
Positions of public samples and classes travel as bits, one for each place up to the last that is meant: the column
has a bit for each public sample and class that there is, which is the most.
"Counted" are arrays and payloads, as in a result's ``bytes_up`` and ``bytes_down``. "On the wire" is the whole
message as Flower serialises it, in one piece: with its configuration, and the names of records and arrays. A
SuperLink moves the same as objects, equal ones once; the table of models has their size.

Each client builds its first model itself, from a seed: KT-pFL's algorithms distribute it once. FedGKT and FedDKC
run without the test features that a simulation asks for, to measure the server's model.

Usage: python benchmarks/bytes.py [--quick] [--out FILE]     (ten minutes on one core; quick: half a minute)
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from rich import box
from rich.console import Console
from rich.table import Table

from flwr_kd import registry
from flwr_kd.config import MethodConfig
from flwr_kd.experiments import data, runner
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.formulas import LETTERS, Sent, Situation, Sizes
from flwr_kd.models import build_model
from flwr_kd.registry import Method
from flwr_kd.results.provenance import versions
from flwr_kd.server.records import RoundStats
from flwr_kd.testing.measured_messages import MeasuringGrid, Note, sizes_of
from flwr_kd.transport import flower_records

ROUNDS, SHOWN = 3, 2
"""Round 2 is shown: not the first, in which some send less, nor the last, after which pFedDF fine-tunes."""
LARGE, ALLOWED = 10_000, 0.02
"""A payload or model of more bytes than the first may be larger than the paper's formula by the second, a share."""
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """What an experiment has, and hyper-parameters of those methods that have them."""

    experiment: Values
    hyperparameters: Values = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    """Which are measured; all where there are none."""


def with_letter(letter: str) -> tuple[str, ...]:
    """Return the methods whose formula has a letter."""
    return tuple(
        name
        for name, method in registry.methods().items()
        if any(letter in term.letters.split("·") for each in method.sent for term in each.terms)
    )


BRIEF = {
    "digits": Setting(
        {"dataset": "digits", "clients": 2, "partition": "inner-dirichlet:0.5", "feature_dim": 512},
        {"sectors": 1, "threshold": 0.1},
    )
}
FULL = {
    "digits": Setting({"dataset": "digits", "clients": 4}),
    # ν = 0: all classes are shared, which makes FedHKD's largest message.
    "fashion-mnist": Setting(
        {
            "dataset": "fashion-mnist",
            "clients": 4,
            "model": "cnn",
            "partition": "iid",
            # As few as leave messages beside which headers are small.
            "limit": 400,
            "test_limit": 100,
            "public_limit": 1000,
        },
        {"threshold": 0.0, "public_samples": 700},
    ),
    # Class knowledge beside which its header is small: as many features as a ResNet50 has.
    "digits-wide": Setting(
        {"dataset": "digits", "clients": 4, "partition": "iid", "feature_dim": 2048},
        {"threshold": 0.0},
        with_letter("K"),
    ),
}
PAGE = "fashion-mnist"
"""The setting that the page shows."""
SHORT = ("local-epochs=1",)
"""What makes runs short, beside each method's ``quick``; the size of no message depends on it."""
MODELS = ("mlp", "lenet", "cnn", "resnet2", "resnet12", "resnet8", "resnet32", "shufflenet", "resnet18")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="digits only, in one setting")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    document = measure(quick=options.quick)
    # As wide as the tables need where nobody watches.
    console = Console(width=None if sys.stdout.isatty() else 150)
    show(document, console)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Run every method in every setting; return what the JSON holds."""
    settings = BRIEF if quick else FULL
    runs = []
    for name, setting in settings.items():
        for method in registry.methods().values():
            if not setting.methods or method.name in setting.methods:
                print(f"{name}: {method.name}", file=sys.stderr, flush=True)
                runs.append({"setting": name, **run(method, *of_setting(method, setting))})
    return {
        "versions": versions(),
        "config": {
            "quick": quick,
            "rounds": ROUNDS,
            "shown": SHOWN,
            "settings": {name: asdict(setting) for name, setting in settings.items()},
            "short": [*SHORT, *sorted({text for each in registry.methods().values() for text in each.quick})],
        },
        "letters": LETTERS,
        "runs": runs,
        "models": [model_row(name) for name in MODELS],
    }


# ---------------------------------------------------------------------- runs


@contextmanager
def measuring() -> Iterator[list[Note]]:
    """Let simulations note the size of each message on its way."""
    notes: list[Note] = []

    class SharedNotes(MeasuringGrid):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.notes = notes

    with mock.patch.object(runner, "InlineGrid", SharedNotes):
        yield notes


def of_setting(method: Method, setting: Setting) -> tuple[Experiment, MethodConfig]:
    """Return a method's experiment and hyper-parameters in a setting."""
    values = dict(setting.experiment)
    if method.model != "mlp":
        # Models that are split elsewhere, and whose features are maps: the method's own.
        values |= {"model": None, "feature_dim": None}
    experiment = Experiment(rounds=ROUNDS, backend="inline", workers=1, device="cpu", **values)
    known = method.config_class.field_types()
    given = {name: value for name, value in setting.hyperparameters.items() if name in known}
    texts = [f"{name.replace('_', '-')}={str(value).lower()}" for name, value in given.items()]
    # Without what a simulation sets besides, which is for its own measurements.
    config = method.config_class.from_texts([*SHORT, *method.quick, *texts], **method.fixed)
    return experiment.of(method), config


def run(method: Method, experiment: Experiment, config: MethodConfig) -> dict[str, Any]:
    """Run one method; return the sizes per client and round, and of each kind of message.

    Raises
    ------
    LookupError
        If the method has no formula, or sends something that the formula does not know, or the other way round.
    ValueError
        If less is sent than the formula says.
    RuntimeError
        If a client fails, or the strategy counts other bytes than were sent.
    """
    sent = method.sent
    if not sent:
        raise LookupError(f"{method.name} has no formula")
    rounds: list[RoundStats] = []
    with measuring() as notes:
        runner.run(method, experiment, config, on_round=rounds.append)
    sizes = {
        (client, way): letters_of(method, experiment, config, client, way)
        for client in range(experiment.clients)
        for way in ("down", "up")
    }
    last = experiment.rounds
    for stats in rounds:
        here = [note for note in notes if note.round == stats.server_round]
        ways = {way: sum(n.counted for n in here if n.direction == way) for way in ("down", "up")}
        if ways != {"down": stats.bytes_down, "up": stats.bytes_up} or stats.failures:
            raise RuntimeError(f"{method.name}: sent {ways}, counted {stats}")
        arrived = {(n.phase, n.direction, part) for n in here for part in n.parts}
        expected = {(s.phase, s.direction, s.part) for s in sent if s.in_round(stats.server_round, last)}
        if arrived != expected:
            raise LookupError(
                f"{method.name}, round {stats.server_round}: the formula has {expected}, sent {arrived}"
            )
    handshakes = {
        way: mean([n.wire for n in notes if (n.phase, n.direction) == ("handshake", way)])
        for way in ("down", "up")
    }
    return {
        "method": method.name,
        "model": experiment.model,
        "hyperparameters": dict(config.to_wire()),
        "sizes": {
            way: [dict(sizes[client, way]) for client in range(experiment.clients)] for way in ("down", "up")
        },
        "handshake": handshakes,
        "rounds": [round_row(stats.server_round, sent, notes, sizes, experiment) for stats in rounds],
        "messages": [message_row(each, notes, sizes, experiment) for each in sent],
    }


def letters_of(
    method: Method, experiment: Experiment, config: MethodConfig, client: int, direction: str
) -> dict[str, int]:
    """Return what the letters stand for, for what a client is sent or sends; from data and model alone."""
    bundle, splits = data.bundle_of(experiment), data.client_splits(experiment)
    labels = bundle.train.y.numpy()
    counts = [np.bincount(labels[train], minlength=bundle.num_classes).tolist() for train, _ in splits]
    public = len(data.public_of(experiment)) if method.public_at == "clients" else 0
    model, inputs = experiment.build_model(client), bundle.input_shape
    return sizes_of(method, model, Situation(config, counts, client, direction, public, inputs))


def round_row(
    number: int,
    sent: Sequence[Sent],
    notes: Sequence[Note],
    sizes: Mapping[tuple[int, str], Sizes],
    experiment: Experiment,
) -> dict[str, Any]:
    """Return a round's bytes in means over the clients."""
    row: dict[str, Any] = {"round": number}
    for way in ("down", "up"):
        here = [note for note in notes if note.round == number and note.direction == way]
        parts = [
            (each, sizes[note.client, way])
            for each in sent
            for note in here
            if (each.phase, each.direction) == (note.phase, way) and each.part in note.parts
        ]
        row[way] = {
            "paper": sum(each.paper(mine) for each, mine in parts) / experiment.clients,
            "beside": sum(sum(each.others(mine).values()) for each, mine in parts) / experiment.clients,
            "counted": sum(note.counted for note in here) / experiment.clients,
            "wire": sum(note.wire for note in here) / experiment.clients,
        }
    return row


def message_row(
    sent: Sent, notes: Sequence[Note], sizes: Mapping[tuple[int, str], Sizes], experiment: Experiment
) -> dict[str, Any]:
    """Return one kind of message part: in means over its messages in one round; over all rounds the worst.

    ``above`` is the share by which what was counted is above the formula, None where that is nothing. ``excess`` is
    by how many bytes the worst of those above :data:`LARGE` is over what is allowed: 0 or less where all are within
    it, None where there are none. ``over`` says whether one is over, None likewise. ``headers`` is the most that is
    in neither formula nor ``beside``; for weights those of each array.
    """
    every = [
        (note, sizes[note.client, sent.direction])
        for note in notes
        if (note.phase, note.direction) == (sent.phase, sent.direction) and sent.part in note.parts
    ]
    number = experiment.rounds if sent.when == "last" else SHOWN
    shown = [(note, mine) for note, mine in every if note.round == number]
    beside = [sent.others(mine) for _, mine in shown]
    names = dict.fromkeys(name for each in beside for name in each)
    excess, headers = [], [0]
    for note, mine in every:
        counted, paper, others = note.parts[sent.part], sent.paper(mine), sum(sent.others(mine).values())
        if counted < paper + others:
            raise ValueError(f"{sent} has {paper} + {others} bytes by its formula, sent were {counted}")
        headers.append(counted - paper - others)
        if counted > LARGE:
            excess.append(counted - (1 + ALLOWED) * paper)
    paper_mean = mean([sent.paper(mine) for _, mine in shown])
    counted_mean = mean([note.parts[sent.part] for note, _ in shown])
    return {
        "phase": sent.phase,
        "direction": sent.direction,
        "part": sent.part,
        "when": sent.when,
        "round": number,
        "messages": len(shown),
        "formula": sent.text,
        "source": sent.source,
        "paper": paper_mean,
        "beside": {name: mean([each.get(name, 0) for each in beside]) for name in names},
        "counted": counted_mean,
        "above": counted_mean / paper_mean - 1 if paper_mean else None,
        "excess": max(excess, default=None),
        "over": max(excess) > 0 if excess else None,
        "headers": max(headers),
    }


def model_row(name: str) -> dict[str, Any]:
    """Return what a model's arrays weigh beside its parameters, and as a message; for 32×32 images in colour."""
    network = build_model(name, input_shape=(3, 32, 32), num_classes=10, seed=0)
    # All unlike, as trained ones are: Flower moves equal objects once.
    state = {key: torch.full_like(value, i) for i, (key, value) in enumerate(network.state_dict().items())}
    content = RecordDict({"fitins.parameters": ArrayRecord(state), "fitins.config": ConfigRecord()})
    parameters = sum(p.numel() * p.element_size() for p in network.parameters())
    batchnorm = sum(b.numel() * b.element_size() for b in network.buffers())
    counted = flower_records.nbytes(content)
    return {
        "model": name,
        "arrays": len(state),
        "parameters": parameters,
        "batchnorm": batchnorm,
        "headers": counted - parameters - batchnorm,
        "counted": counted,
        "message": recorddict_to_proto(content).ByteSize(),
        "objects": sum(objects_of(content).values()),
    }


def objects_of(whole: Any) -> dict[str, int]:
    """Return the sizes of the objects that Flower moves for a message's content, by id; equal ones are one."""
    found = {whole.object_id: len(whole.deflate())}
    for part in (whole.children or {}).values():
        found |= objects_of(part)
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# ---------------------------------------------------------------------- tables


def show(document: Values, console: Console) -> None:
    """Print the tables."""
    for setting in document["config"]["settings"]:
        runs = [each for each in document["runs"] if each["setting"] == setting]
        console.print(per_round(setting, runs, document["config"]))
        console.print(per_message(setting, runs))
        for row, methods in over(runs):
            console.print(
                f"{row['phase']} {row['direction']}, {row['part']}, more than {ALLOWED:.0%} above: {methods}",
                style="bold",
                highlight=False,
            )
    hands = [[each["handshake"][way] for each in document["runs"]] for way in ("down", "up")]
    ranges = [f"{size(min(each))} to {size(max(each))}" for each in hands]
    console.print(
        f"\nOnce per client and run, the handshake: {ranges[0]} bytes down, {ranges[1]} up.", highlight=False
    )
    console.print("; ".join(f"{k}: {v}" for k, v in document["letters"].items()), end="\n\n", highlight=False)
    console.print(of_models(document["models"]))


def alike(runs: Iterable[Values]) -> list[tuple[Values, str]]:
    """Return the kinds of messages, each with the methods that have the same numbers there."""
    groups: dict[str, tuple[Values, list[str]]] = {}
    for each in runs:
        for row in each["messages"]:
            key = json.dumps({name: value for name, value in row.items() if name != "source"})
            groups.setdefault(key, (row, []))[1].append(each["method"])
    return [(row, ", ".join(methods)) for row, methods in groups.values()]


def over(runs: Iterable[Values]) -> list[tuple[Values, str]]:
    """Return the kinds of messages of which one above :data:`LARGE` is larger than is allowed, with methods."""
    return [(row, methods) for row, methods in alike(runs) if row["over"]]


def per_round(setting: str, runs: Sequence[Values], config: Values) -> Table:
    """Return bytes per client and round; round 2, and others where they differ from it."""
    table = plain(f"{setting}: bytes per client and round, in means over clients")
    table.add_column("method")
    table.add_column("round", justify="right")
    for way in ("down", "up"):
        for header in (f"{way}:\nformula", "beside\nit", "counted", "above the\nformula", "on the\nwire"):
            table.add_column(header, justify="right", no_wrap=True)
    for each in runs:
        rows = {row["round"]: row for row in each["rounds"]}
        usual = counted_in(rows[config["shown"]])
        for number, row in rows.items():
            if number == config["shown"] or counted_in(row) != usual:
                cells = [
                    text
                    for way in (row["down"], row["up"])
                    for text in (
                        *(size(way[kind]) for kind in ("paper", "beside", "counted")),
                        above(way),
                        size(way["wire"]),
                    )
                ]
                table.add_row(each["method"], str(number), *cells)
    return table


def counted_in(row: Values) -> list[float]:
    return [row[way]["counted"] for way in ("down", "up")]


def per_message(setting: str, runs: Sequence[Values]) -> Table:
    """Return bytes per message, methods with the same numbers together."""
    table = plain(f"{setting}: bytes per message, in means over a round's messages")
    for header, how in (
        ("methods", "left"),
        ("phase", "left"),
        ("formula", "left"),
        ("formula:\nbytes", "right"),
        ("beside it", "right"),
        ("counted", "right"),
        ("above the\nformula", "right"),
        (f"within\n{ALLOWED:.0%}", "left"),
        ("times in\na round", "right"),
    ):
        table.add_column(header, justify=how, overflow="fold")  # type: ignore[arg-type]
    for row, methods in alike(runs):
        beside = ", ".join(f"{name} {size(value)}" for name, value in row["beside"].items())
        table.add_row(
            methods,
            f"{row['phase']} {row['direction']}{WHEN[row['when']]}",
            f"{row['formula']} ({row['part']})",
            size(row["paper"]),
            beside,
            size(row["counted"]),
            above(row),
            {None: "small", False: "yes", True: "no"}[row["over"]],
            str(row["messages"]),
        )
    return table


def of_models(rows: Iterable[Values]) -> Table:
    """Return what models weigh beside their parameters."""
    table = plain("a model as it travels: 3×32×32, 10 classes, in bytes")
    table.add_column("model")
    for header in (
        "arrays",
        "parameters",
        "BatchNorm",
        "headers of\narrays",
        "counted",
        "above",
        "message",
        "as objects",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["model"],
            str(row["arrays"]),
            *(size(row[name]) for name in ("parameters", "batchnorm", "headers", "counted")),
            f"{row['counted'] / row['parameters'] - 1:.2%}",
            *(size(row[name]) for name in ("message", "objects")),
        )
    return table


WHEN = {"all": "", "later": ", from round 2", "last": ", after the last round"}
HEADER = [
    "method",
    "phase",
    "direction",
    "content",
    "formula",
    "formula, bytes",
    "measured, bytes",
    "above, %",
]
"""Titles of the columns of :func:`rows_for_page`."""


def rows_for_page(document: Values, setting: str = PAGE) -> list[list[str]]:
    """Return cells for a table of a setting's messages, methods with the same cells together.

    Parameters
    ----------
    found : mapping
        What :func:`measure` returned.
    setting : str
        One of ``found["config"]["settings"]``.

    Returns
    -------
    list of list of str
        As many as :data:`HEADER` has; bytes are means over a round's messages. Nothing is above a formula of 0.

    Raises
    ------
    LookupError
        If the setting was not measured.
    """
    runs = [each for each in document["runs"] if each["setting"] == setting]
    if not runs:
        names = ", ".join(document["config"]["settings"])
        raise LookupError(f"setting must be one of {names}, got {setting!r}")
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in runs:
        for row in each["messages"]:
            cells = (
                f"{row['phase']}{WHEN[row['when']]}",
                row["direction"],
                row["part"],
                row["formula"],
                f"{row['paper']:,.0f}",
                f"{row['counted']:,.0f}",
                "–" if row["above"] is None else f"{100 * row['above']:,.1f}",
            )
            groups.setdefault(cells, []).append(f"`{each['method']}`")
    return [[", ".join(methods), *cells] for cells, methods in groups.items()]


def plain(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")


def above(row: Values) -> str:
    """Write how much more was counted than the formula gives; nothing where that is nothing."""
    return f"{row['counted'] / row['paper'] - 1:.2%}" if row["paper"] else "–"


def size(value: float) -> str:
    """Write whole bytes, nothing for none.

    >>> size(1234.5), size(0)
    ('1,234', '–')
    """
    return f"{value:,.0f}" if value else "–"


if __name__ == "__main__":
    main()
