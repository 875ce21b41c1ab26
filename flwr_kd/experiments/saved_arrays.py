"""The last arrays that are saved beside a result, and the experiment that they belong to.

In a result's folder a run has ``arrays/<name>-seed<seed>/checkpoint.safetensors``: the global arrays and the
strategy's own state after the last round.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RunResult
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint
from flwr_kd.text import first_line

__all__ = [
    "FOLDER",
    "coefficients",
    "copy",
    "experiment_of",
    "folder_of",
    "global_model",
    "move",
    "read",
    "remove",
    "synthetic_images",
    "training_rows",
]

FOLDER = "arrays"
"""Name of the folder inside a result's."""


def folder_of(directory: Path, name: str, seed: int) -> Path:
    """Return where a run's last arrays are, below a result's folder.

    >>> folder_of(Path("runs/a"), "fedavg", 3).as_posix()
    'runs/a/arrays/fedavg-seed3'
    """
    return directory / FOLDER / f"{name}-seed{seed}"


def read(directory: Path, run: RunResult) -> Checkpoint:
    """Read what a run kept.

    Parameters
    ----------
    directory : Path
        The result's folder.
    run : RunResult
        A run of that result.

    Returns
    -------
    Checkpoint
        ``arrays`` is empty for a method without a global model, ``state`` for one without a state.

    Raises
    ------
    ResultError
        If nothing was kept, if it cannot be read, or if it is of another run than the result's.
    ConfigError
        If the method is not registered.
    """
    strategy = registry.get(run.method).strategy.__name__
    folder = folder_of(directory, run.name, run.seed)
    try:
        saved = Checkpoint.load(folder, strategy)
    except Exception as error:  # safetensors, JSON and the file system have no common error
        raise ResultError(f"cannot read the arrays in {str(folder)!r}: {first_line(error)}") from error
    if saved is None:
        raise ResultError(
            f"{str(directory)!r} has no arrays of {run.name} with seed {run.seed} ({str(folder)!r}): run it "
            "again, without --no-arrays"
        )
    last = run.rounds[-1].round if run.rounds else 0
    # A RunResult converts them as a result does, so that both sides went through the same conversion.
    config = replace(run, hyperparameters=dict(saved.config)).hyperparameters
    if (saved.seed, saved.server_round, config) != (run.seed, last, run.hyperparameters):
        raise ResultError(f"the arrays in {str(folder)!r} are of another run than the result: run it again")
    return saved


def remove(directory: Path) -> None:
    """Remove all arrays that runs kept in a result's folder, and no other files."""
    for file in directory.glob(f"{FOLDER}/*-seed*/{CHECKPOINT}"):
        file.unlink()
        with suppress(OSError):
            file.parent.rmdir()
    with suppress(OSError):
        (directory / FOLDER).rmdir()


def move(source: Path, directory: Path) -> None:
    """Move the arrays that runs kept in one folder to another."""
    for file, target in _pairs(source, directory):
        shutil.move(file, target)


def copy(source: Path, directory: Path) -> None:
    """Copy the arrays that runs kept in one folder to another."""
    for file, target in _pairs(source, directory):
        shutil.copyfile(file, target)


def _pairs(source: Path, directory: Path) -> Iterator[tuple[Path, Path]]:
    for file in sorted(source.glob(f"{FOLDER}/*-seed*/{CHECKPOINT}")):
        target = directory / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield file, target


def experiment_of(
    config: Mapping[str, Any], run: RunResult, *, data_dir: str | None = None, device: str = "cpu"
) -> Experiment:
    """Return the experiment that a result's ``config`` describes, for one of its runs.

    Parameters
    ----------
    config : mapping
        A comparison's. Keys that an :class:`~flwr_kd.Experiment` does not have are ignored; keys that older
        results lack get their default. ``model`` may be a mapping by the runs' names.
    run : RunResult
        A run of that comparison.
    data_dir : str, optional
        Where data files are; the config's if None.
    device : str
        In place of the runs' device, since the machine may be another.

    Raises
    ------
    ConfigError
        If a value is not allowed, or the method is not registered.

    Examples
    --------
    >>> run = RunResult("fedavg", 3, ())
    >>> config = {"dataset": "digits", "model": {"fedavg": "lenet", "fedhkd": "mlp"}, "seeds": [3]}
    >>> experiment = experiment_of(config, run)
    >>> experiment.model, experiment.seed, experiment.clients
    ('lenet', 3, 10)
    """
    known = {field.name for field in fields(Experiment)} - {"seed", "device"}
    values = {name: value for name, value in config.items() if name in known}
    if isinstance(model := values.get("model"), Mapping):
        values["model"] = model.get(run.name)
    if data_dir is not None:
        values["data_dir"] = data_dir
    try:
        return Experiment(**values, seed=run.seed, device=device).of(registry.get(run.method))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"the result's config is not one of an experiment: {first_line(error)}") from None


def global_model(experiment: Experiment, kept: Checkpoint) -> nn.Module:
    """Return the global model after the last round, on the CPU and in eval mode.

    Raises
    ------
    ResultError
        If the arrays are not those of the experiment's model.
    """
    model = experiment.build_model()
    try:
        model.load_state_dict(kept.arrays.to_torch_state_dict())
    except RuntimeError as error:
        raise ResultError(f"the arrays kept are not of the model {experiment.models[0]}: {error}") from None
    return model.eval()


def synthetic_images(directory: Path, run: RunResult) -> np.ndarray[Any, Any] | None:
    """Return the images that a run's server made, from the array ``synthetic`` of its state.

    Parameters
    ----------
    directory : Path
        The result's folder.
    run : RunResult
        A run of that result; its histogram has one column for each of the C classes.

    Returns
    -------
    ndarray or None
        ``[C, n, K, H, W]``, the rows of the state's ``[C · n, K, H, W]`` in their order; None for a method whose
        server makes no images.

    Raises
    ------
    ResultError
        As :func:`read`; also if the array has another shape.
    """
    makes_images = registry.get(run.method).public_at == "synthetic"
    if not makes_images and _had_nothing_to_keep(directory, run):
        return None
    images = read(directory, run).state.get("synthetic")
    if images is None:
        return None
    classes = len(run.histogram[0]) if run.histogram else 0
    if images.ndim != 4 or not images.size or not classes or len(images) % classes:
        raise ResultError(
            f"synthetic of {run.method} must have the shape [C * n, K, H, W] with C = {classes} classes, got "
            f"{list(images.shape)}"
        )
    return images.reshape(classes, -1, *images.shape[1:])


def coefficients(
    directory: Path, run: RunResult
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.integer[Any]]] | None:
    """Return how a run's clients weigh each other, from the arrays ``coefficients`` and ``clients`` of its state.

    Parameters
    ----------
    directory : Path
        The result's folder.
    run : RunResult
        A run of that result.

    Returns
    -------
    (ndarray, ndarray) or None
        The matrix, float64 ``[N, N]``, finite: row n has the weights of all clients in client n's target. Then
        the clients' partition or node ids, integers ``[N]``, ascending. None for a run that kept no such matrix.

    Raises
    ------
    ResultError
        As :func:`read`, unless other runs of the result kept arrays and this one none. Also if one of the two
        arrays is not as above, or has no clients.
    ConfigError
        If the method is not registered.
    """
    registry.get(run.method)
    if _had_nothing_to_keep(directory, run):
        return None
    state = read(directory, run).state
    if "coefficients" not in state:
        return None
    matrix = state["coefficients"]
    count = len(matrix) if matrix.ndim else 0
    if matrix.dtype.kind != "f" or not count or matrix.shape != (count, count):
        raise ResultError(
            f"coefficients of {run.method} must be floats of the shape [N, N] with N from 1, got "
            f"{matrix.dtype} {list(matrix.shape)}"
        )
    if not np.isfinite(matrix).all():
        raise ResultError(f"coefficients of {run.method} must be finite")
    clients = state.get("clients", np.empty(0, dtype=np.int64))
    if clients.dtype.kind not in "iu" or clients.shape != (count,):
        raise ResultError(
            f"clients of {run.method} must be integers of the shape [{count}], as many as its coefficients have "
            f"rows, got {clients.dtype} {list(clients.shape)}"
        )
    if (clients[1:] <= clients[:-1]).any():
        raise ResultError(f"clients of {run.method} must be ascending, got {clients.tolist()}")
    return matrix.astype(np.float64), clients


def _had_nothing_to_keep(directory: Path, run: RunResult) -> bool:
    """Return whether other runs kept arrays and this one none, because it has neither a model nor a state."""
    others = any(directory.glob(f"{FOLDER}/*-seed*/{CHECKPOINT}"))
    return others and not folder_of(directory, run.name, run.seed).exists()


def training_rows(experiment: Experiment, size: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw training samples of all clients together.

    Parameters
    ----------
    experiment : Experiment
        Its data and partitions.
    size : int
        Number of samples, at least 1; all of them if there are fewer.
    generator : numpy.random.Generator
        Draws them without replacement.

    Returns
    -------
    ndarray
        Rows of the training part, int64, ascending; at most ``size``.
    """
    rows = np.sort(np.concatenate([train for train, _ in client_splits(experiment)]))
    return np.sort(generator.choice(rows, size=min(size, len(rows)), replace=False))
