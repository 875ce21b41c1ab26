"""What an experiment costs before it runs: data, steps of SGD, and time on this machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from flwr_kd import catalogue
from flwr_kd.config import LocalStepsConfig, MethodConfig
from flwr_kd.data.selection import chosen_classes
from flwr_kd.experiments.comparison import Entry
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment
from flwr_kd.experiments.run_form import Values, entries_of

__all__ = ["SIZES", "Cost", "DataSize", "cost_of", "data_of", "seconds_per_sample"]


class DataSize(NamedTuple):
    """Size of a data set, for an estimate.

    Attributes
    ----------
    train : int
        Training samples that clients can have.
    shape : tuple of int
        Of an input.
    classes : int
        Number of classes.
    vocabulary : int
        Number of token ids; 0 if inputs are no tokens.
    """

    train: int
    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0


SIZES: Mapping[str, DataSize] = MappingProxyType(
    {
        "digits": DataSize(1_079, (1, 8, 8), 10),
        "fashion-mnist": DataSize(60_000, (1, 28, 28), 10),
        "mnist": DataSize(60_000, (1, 28, 28), 10),
        "mnist-5k": DataSize(3_000, (1, 28, 28), 10),
        "cifar10": DataSize(50_000, (3, 32, 32), 10),
        "cifar100": DataSize(50_000, (3, 32, 32), 100),
        "svhn": DataSize(73_257, (3, 32, 32), 10),
        "emnist-letters": DataSize(124_800, (1, 28, 28), 26),
        "emnist-digits": DataSize(240_000, (1, 28, 28), 10),
        "cinic10": DataSize(90_000, (3, 32, 32), 10),
        "letters": DataSize(12_000, (16,), 26),
        "20newsgroups": DataSize(9_052, (5000,), 20),
        "20newsgroups-tokens": DataSize(9_052, (200,), 20, 10_000),
        "ag-news": DataSize(96_000, (1024,), 4),
        "ag-news-tokens": DataSize(96_000, (64,), 4, 10_000),
        "sst2-tokens": DataSize(53_880, (64,), 2, 10_000),
        "chexpert": DataSize(223_414, (1, 64, 64), 14),
        "tiny-imagenet": DataSize(100_000, (3, 64, 64), 200),
        "unicauca75": DataSize(300_000, (80,), 75),
        "unicauca141": DataSize(220_000, (44,), 141),
    }
)
"""Sizes of the data sets that experiments name; those of the traffic sets are their caps."""
_PER_CLASS = {"ktpfl-1": 450, "ktpfl-2": 300}
"""Samples that KT-pFL's divisions give a client of a class that it has many of, by default."""
_TIMED = 16
"""Samples of a batch that is timed."""
_PREDICTED = 1 / 3
"""Of a training step's time, the forward pass."""
_PER_REPLY = 0.01
"""Seconds for each client and round, whatever is trained: messages, checks, and the client's own test."""
_PUBLIC = 5_000
"""Public samples if no limit is set."""
_WORK = MappingProxyType(
    {
        **dict.fromkeys(("dafkd", "fedhkd-dafkd"), 8.0),
        **dict.fromkeys(("fedgkt", "feddkc-kkr", "feddkc-skr"), 7.0),
        **dict.fromkeys(("fedalign", "pfedme", "per-fedavg-hf", "fedhyb-star"), 4.0),
        **dict.fromkeys(("fedhyb", "fedhyb-1", "fedhyb-2", "fedhead-plus", "feddf"), 2.5),
    }
)
"""By method, a round's work over the clients' plain training, where that is more than :data:`_OTHERS`: measured
with four local epochs of an MLP and of LeNet."""
_OTHERS = 1.3


@dataclass(frozen=True)
class Cost:
    """What cells cost.

    Attributes
    ----------
    steps : int
        Steps of SGD in the clients' local training, of all cells, rows and seeds.
    seconds : float or None
        On one core, from the time of a few such steps, with what the methods do besides; None if a size is not
        known. It is right within a factor of two or so.
    """

    steps: int
    seconds: float | None


def data_of(experiment: PaperExperiment) -> list[str]:
    """Return the data sets that an experiment's cells need, with public data where a row does."""
    names: list[str] = []
    for cell in experiment.run:
        settings = {**experiment.settings, **cell.settings}
        names += [str(settings[key]) for key in ("dataset",) if key in settings]
        if experiment.trained and _needs_public(experiment):
            names += _public(settings)
    return list(dict.fromkeys(names))


def _public(settings: Mapping[str, Any]) -> list[str]:
    """Return the name of a cell's public data; nothing for a data set that does not exist yet."""
    from flwr_kd.data import public_name

    given, dataset = settings.get("public"), str(settings["dataset"])
    if given is not None:
        return [str(given)]
    return [public_name(None, dataset=dataset)] if dataset in catalogue.DATASETS else []


def _needs_public(experiment: PaperExperiment) -> bool:
    rows = entries_of(experiment, experiment.rows)
    return any(row.method.public_at in ("server", "clients") for row in rows)


def cost_of(experiment: PaperExperiment, cells: Sequence[PaperCell], seeds: int) -> Cost:
    """Return what cells of a trained experiment cost.

    Parameters
    ----------
    experiment : PaperExperiment
        With the values that its runs have.
    cells : sequence of PaperCell
        Of it.
    seeds : int
        Number of seeds.
    """
    steps, seconds, whole = 0, 0.0, True
    for cell in cells:
        settings = {**experiment.settings, **cell.settings}
        for row in entries_of(experiment, experiment.rows, cell.set):
            model = row.model or str(settings.get("model") or row.method.model)
            for name, clients in _clients_by_model(model, settings):
                count = _samples(settings)
                of_row = round(clients * _steps(row.config, count, settings)) * seeds
                steps += of_row
                rounds = int(settings.get("rounds", 10))
                each = seconds_per_sample(name, _size(settings), _padded(settings)) if count else None
                if each is None:
                    whole = False
                else:
                    trained = seeds * clients * _trained(row.config, count, settings)
                    trained *= _WORK.get(row.method.name, _OTHERS)
                    seen = seeds * clients * _of_public(row, rounds, settings)
                    seconds += each * (trained + seen) + _PER_REPLY * rounds * clients * seeds
    return Cost(steps, seconds if whole else None)


def _of_public(row: Entry, rounds: int, settings: Values) -> float:
    """Return the public samples on which a client trains over all rounds; a prediction counts for a third."""
    if row.method.public_at != "clients":
        return 0.0
    size, public = _size(settings), settings.get("public")
    there = int(settings.get("public-limit", _PUBLIC))
    if size is not None and public in (None, settings.get("dataset")):
        # A fifth of the data set is held back.
        there = min(there, size.train // 5)
    drawn = min(there, int(getattr(row.config, "public_samples", there)))
    epochs = int(getattr(row.config, "distill_epochs", 1))
    return rounds * drawn * (epochs + _PREDICTED) + there * int(getattr(row.config, "warmup_epochs", 0))


def _clients_by_model(model: str, settings: Values) -> Iterator[tuple[str, float]]:
    """Yield each model and the number of clients per round that have it."""
    names = [name.strip() for name in model.split(",")]
    taking_part = float(settings.get("clients", 10)) * float(settings.get("fraction-train", 1.0))
    for name in dict.fromkeys(names):
        yield name, taking_part * names.count(name) / len(names)


def _steps(config: MethodConfig, samples: int, settings: Values) -> int:
    """Return the steps of one client over all rounds."""
    rounds = int(settings.get("rounds", 10))
    if isinstance(config, LocalStepsConfig):
        return rounds * config.steps(samples)
    return rounds * config.local_epochs * -(-samples // config.batch_size)


def _trained(config: MethodConfig, samples: int, settings: Values) -> int:
    """Return the samples on which one client trains over all rounds, each as often as it is seen."""
    rounds = int(settings.get("rounds", 10))
    if isinstance(config, LocalStepsConfig):
        return rounds * config.steps(samples) * min(config.batch_size, samples)
    return rounds * config.local_epochs * samples


def _size(settings: Values) -> DataSize | None:
    """Return the size of what is used of the data set, if its classes have equally many samples."""
    size = SIZES.get(str(settings.get("dataset", "digits")))
    if size is None:
        return None
    chosen = settings.get("classes")
    classes = size.classes if chosen is None else len(chosen_classes(str(chosen), size.classes))
    return size._replace(train=size.train * classes // size.classes, classes=classes)


def _padded(settings: Values) -> int | None:
    side = settings.get("image-size")
    return None if side is None else int(side)


def _samples(settings: Values) -> int:
    """Return the training samples of a client, on average; 0 if not known."""
    size = _size(settings)
    share = 1 - float(settings.get("test-fraction", 0.25))
    kind, _, each = str(settings.get("partition", "")).partition(":")
    if "client-samples" in settings:
        return int(settings["client-samples"])
    if size is None:
        return 0
    if kind in _PER_CLASS and each != "max":
        # Case 1 has a third as many of each other class, case 2 two classes.
        classes = 2 if kind == "ktpfl-2" else size.classes * 2 / 3
        return round(int(each or _PER_CLASS[kind]) * classes * share)
    train = min(size.train, int(settings.get("limit", size.train)))
    return max(1, round(train * share / float(settings.get("clients", 10))))


def seconds_per_sample(model: str, size: DataSize | None, side: int | None = None) -> float | None:
    """Return the seconds of one training step per sample on one core; None if the model does not take the data."""
    return None if size is None else _timed(model, size, side)


@functools.lru_cache(maxsize=256)
def _timed(model: str, size: DataSize, side: int | None) -> float | None:
    import torch

    from flwr_kd.learning.device import one_thread
    from flwr_kd.models import build_model

    shape = (size.shape[0], side, side) if side is not None and len(size.shape) == 3 else size.shape
    try:
        with one_thread():
            built = build_model(
                model, input_shape=shape, num_classes=size.classes, seed=0, vocabulary=size.vocabulary or None
            )
            return _time_steps(built, shape, size, torch.Generator().manual_seed(0))
    except (ValueError, ImportError):
        return None


def _time_steps(model: object, shape: tuple[int, ...], size: DataSize, generator: object) -> float:
    import torch
    from torch.nn import functional

    assert isinstance(model, torch.nn.Module)
    assert isinstance(generator, torch.Generator)
    x = torch.rand(_TIMED, *shape, generator=generator)
    if size.vocabulary:
        x = torch.randint(2, size.vocabulary, (_TIMED, *shape), generator=generator)
    y = torch.randint(size.classes, (_TIMED,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    return min(_duration(step) for _ in range(2)) / _TIMED


def _duration(action: Callable[[], None]) -> float:
    # Of this thread: what else the machine does does not count.
    start = time.thread_time()
    action()
    return time.thread_time() - start
