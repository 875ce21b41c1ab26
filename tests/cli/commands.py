"""What the tests of the command share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.image import imread

from flwr_kd.results import files

SMALL = ["--backend", "inline", "--clients", "3", "--rounds", "2", "--limit", "150", "--device", "cpu"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


TINY = ["--backend", "inline", "--clients", "2", "--rounds", "1", "--limit", "150", "--device", "cpu"]


def kept_files(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("arrays/*/checkpoint.safetensors"))


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return what TensorBoard's event files have under a name, by round."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def is_a_picture(path: Path) -> bool:
    return bool(imread(path)[..., :3].std() > 0.01)


PAIR = ("compare", "fedavg", "fedhkd", *TINY, "--seeds", "0,1")


def numbers(folder: Path) -> dict[tuple[str, int], Any]:
    runs = files.load(folder).runs
    return {(run.method, run.seed): [replace(each, seconds=0.0) for each in run.rounds] for run in runs}
