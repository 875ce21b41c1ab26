"""What is computed and not trained: class counts, privacy, bytes, round trips, sizes of models, counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_kd.checks import ConfigError, DataError
from flwr_kd.experiments.papers.expectations import GridCell
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment, Printed, TextClaim
from flwr_kd.experiments.run_form import Values, entries_of, option_values
from flwr_kd.text import first_line

__all__ = ["Quantity", "class_counts", "counted", "evaluated", "quantities"]

_MEGABYTE = 10**6
_FLOAT = 4


@dataclass(frozen=True)
class Quantity:
    """A number that is computed.

    Attributes
    ----------
    cell, row, name : str
        What it is of.
    ours : float or None
        None if it cannot be computed; ``note`` says why.
    printed : Printed or None
        The paper's.
    note : str
        What to know of it.
    part : bool
        Whether it is a part of another one, on which no claim is.
    """

    cell: str
    row: str
    name: str
    ours: float | None
    printed: Printed | None = None
    note: str = ""
    part: bool = False


def quantities(experiment: PaperExperiment, settings: Values | None = None) -> list[Quantity]:
    """Return the numbers of an experiment whose kind is not trained, and of an accuracy table's columns of cost.

    Parameters
    ----------
    experiment : PaperExperiment
        Of the kinds ``cost``, ``properties`` or ``privacy``, or with cells of cost.
    settings : dict, optional
        Options by field that win over the file's, such as the folder of data files.
    """
    makers = {"cost": _cost, "properties": _properties, "privacy": _privacy}
    maker = makers.get(experiment.kind)
    found = [] if maker is None else [each for cell in experiment.run for each in maker(experiment, cell)]
    for cell in experiment.cost:
        found += _parameters(experiment, cell)
    return found


def _privacy(experiment: PaperExperiment, cell: PaperCell) -> Iterator[Quantity]:
    from flwr_kd import privacy

    value = {name: float(each) for name, each in cell.values.items()}
    ours = {
        "smallest-sigma": privacy.gaussian_sigma(value["epsilon"], value["delta"]),
        "noise-variance-below": privacy.noise_std(value["count"], value["clip"], value["sigma"]) ** 2,
        "noise-variance": privacy.noise_std(value["count"], value["clip"], value["sigma"]) ** 2,
        "epsilon-at-sigma-7": privacy.gaussian_epsilon(value["sigma"], value["delta"]),
        # A normal variable's share within three standard deviations.
        "within-3-percent": 100 * math.erf(3 / math.sqrt(2)),
    }
    # A number that the paper has in two places, with other digits, is one number.
    numbers = [(name, printed) for table in cell.printed.values() for name, printed in table.items()]
    for name, printed in dict.fromkeys(numbers):
        yield Quantity(cell.id, "", name, ours.get(name), printed)


def _properties(experiment: PaperExperiment, cell: PaperCell) -> Iterator[Quantity]:
    import torch

    from flwr_kd.models import build_model, count_flops, count_parameters
    from flwr_kd.models.zoo import build_predictor

    shape = (3, 32, 32)
    if cell.values.get("part") == "server":
        client = build_model(str(cell.values["client"]), input_shape=shape, num_classes=10, seed=0)
        with torch.no_grad():
            features = client.features(torch.zeros(1, *shape))
        model: torch.nn.Module = build_predictor(tuple(features.shape[1:]), num_classes=10, seed=0)
        x = features
    else:
        model = build_model(str(cell.values["model"]), input_shape=shape, num_classes=10, seed=0)
        x = torch.zeros(1, *shape)
    ours = {
        "params-thousand": (count_parameters(model) / 1000, ""),
        "flops-million": (
            count_flops(model, x) / 2 / _MEGABYTE,
            "multiply-adds of convolutions and products",
        ),
    }
    for table in cell.printed.values():
        for name, printed in table.items():
            value, note = ours.get(name, (None, "the paper does not say what it counts"))
            yield Quantity(cell.id, "", name, value, printed, note)


def _cost(experiment: PaperExperiment, cell: PaperCell) -> Iterator[Quantity]:
    settings = {**experiment.settings, **cell.settings}
    for measure, named in experiment.measures.items():
        printed = cell.printed.get(measure, {})
        if named.name == "round_trips":
            letters = {
                "M": int(cell.set.get("sectors", 1)),
                "N": int(settings.get("clients", 10)),
                "T": int(settings.get("rounds", 10)),
            }
            for row, formula in cell.formula.items():
                yield Quantity(
                    cell.id, row, "round trips", evaluated(formula, letters), printed.get(row), formula
                )
        elif named.name == "megabytes":
            for entry in entries_of(experiment, experiment.methods, cell.set):
                name, number = entry.name, printed.get(entry.name)
                try:
                    found = _bytes(entry, settings)
                except (ConfigError, DataError) as error:
                    yield Quantity(cell.id, name, "MB", None, number, first_line(error))
                else:
                    note = "by the formulas, all clients and rounds"
                    yield Quantity(cell.id, name, "MB", sum(found.values()) / _MEGABYTE, number, note)
                    for kind, value in found.items():
                        yield Quantity(
                            cell.id, name, f"MB of {kind}", value / _MEGABYTE, note="of these", part=True
                        )


def evaluated(formula: str, letters: Mapping[str, int]) -> float:
    """Return the value of a product of whole numbers and letters.

    >>> evaluated("2*M*T", {"M": 2, "T": 50})
    200.0

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    value = 1.0
    for factor in formula.split("*"):
        if factor.strip().isdecimal():
            value *= int(factor)
        elif factor.strip() in letters:
            value *= letters[factor.strip()]
        else:
            raise ConfigError(
                f"formula must be a product of numbers and {', '.join(letters)}, got {formula!r}"
            )
    return value


def _bytes(entry: Any, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return by kind the bytes of all rounds and clients by the method's formula, from sizes alone."""
    from flwr_kd.experiments.message_sizes import sizes_of
    from flwr_kd.experiments.papers.estimate import SIZES
    from flwr_kd.formulas import Situation
    from flwr_kd.models import build_model

    size = SIZES.get(str(settings["dataset"]))
    if size is None:
        raise DataError(f"the size of {settings['dataset']} is not known")
    classes = 10 if "classes" in settings else size.classes
    clients, rounds = int(settings.get("clients", 10)), int(settings.get("rounds", 10))
    wire = entry.config.to_wire()
    public = int(wire.get("public-samples", 0)) if entry.method.public_at == "clients" else 0
    names = [
        name.strip() for name in str(entry.model or settings.get("model") or entry.method.model).split(",")
    ]
    counts = [[1] * classes for _ in range(clients)]
    found: dict[str, float] = {}
    for name in dict.fromkeys(names):
        network = build_model(name, input_shape=size.shape, num_classes=classes, seed=0)
        share = clients * names.count(name) / len(names)
        for sent in entry.method.sent:
            situation = Situation(entry.config, counts, 0, sent.direction, public, size.shape)
            letters = sizes_of(entry.method, network, situation)
            times = sum(sent.in_round(number, rounds) for number in range(1, rounds + 1))
            once = sent.paper(letters) + sum(sent.others(letters).values())
            found[sent.part] = found.get(sent.part, 0.0) + share * times * once
    if wire.get("public-at") == "server":
        # The samples of a round travel to each client.
        found["public samples"] = clients * rounds * public * math.prod(size.shape) * _FLOAT
    return found


def _parameters(experiment: PaperExperiment, cell: PaperCell) -> Iterator[Quantity]:
    """Yield the parameters of the clients' model, beside what the paper counts for each method."""
    from flwr_kd.experiments.papers.estimate import SIZES
    from flwr_kd.models import build_model, count_parameters

    settings = {**experiment.settings, **cell.settings}
    size = SIZES[str(settings["dataset"])]
    feature_dim = {
        str(each.settings.get("dataset")): each.settings.get("feature-dim") for each in experiment.run
    }
    model = build_model(
        str(settings["model"]),
        input_shape=size.shape,
        num_classes=size.classes,
        seed=0,
        feature_dim=feature_dim.get(str(settings["dataset"])),
    )
    for measure, rows in cell.printed.items():
        for row, printed in rows.items():
            if measure == "parameters-million":
                yield Quantity(
                    cell.id,
                    row,
                    "parameters in millions",
                    count_parameters(model) / _MEGABYTE,
                    printed,
                    "one model",
                )
            else:
                yield Quantity(cell.id, row, measure, None, printed, "of the paper's machine")


def class_counts(
    experiment: PaperExperiment, cell: PaperCell, seed: int, settings: Values | None = None
) -> list[list[int]]:
    """Return a cell's samples per client and class, ``[clients][classes]``, local test splits included.

    Raises
    ------
    DataError
        If the data is not there or cannot be divided.
    """
    import numpy as np

    from flwr_kd.data import histogram
    from flwr_kd.experiments.data import bundle_of, client_splits
    from flwr_kd.experiments.experiment import Experiment
    from flwr_kd.experiments.options import ExperimentOptions

    values = {**option_values({**experiment.settings, **cell.settings}), **(settings or {})}
    made = Experiment.from_options(ExperimentOptions(**values), seed)  # type: ignore[arg-type]
    bundle = bundle_of(made)
    parts = [np.concatenate(both) for both in client_splits(made)]
    return histogram(bundle.train.y.numpy(), parts, bundle.num_classes)


def counted(claim: TextClaim, cells: Sequence[GridCell]) -> tuple[int, int, int] | None:
    """Return in how many cells one row is above another, with how many ties, of how many; None without numbers.

    Cells are those of clients one by one. Means over seeds are compared.
    """
    if not claim.count:
        return None
    left, right, measure = claim.count["left"], claim.count["right"], claim.count["measure"]
    pairs = [
        (sum(a.values()) / len(a), sum(b.values()) / len(b))
        for cell in cells
        if (a := cell.of(measure, left)) and (b := cell.of(measure, right))
    ]
    above = sum(a > b + 1e-9 for a, b in pairs)
    ties = sum(abs(a - b) <= 1e-9 for a, b in pairs)
    return (above, ties, len(pairs)) if pairs else None
