"""Arrays beside a result: coefficients are read as written, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments import saved_arrays
from flwr_kd.results.errors import ResultError
from flwr_kd.results.schema import RoundResult, RunResult
from flwr_kd.server.checkpoint import Checkpoint

MATRIX = np.array([[0.6, 0.3, 0.1], [0.25, 0.5, 0.25], [-0.2, 0.1, 1.1]])
CLIENTS = np.array([0, 3, 7])


def a_run(method: str = "fedhkd", seed: int = 0) -> RunResult:
    rounds = (RoundResult(1, 0.5, None, None, 1, 1, 1.0, 2, 0),)
    return RunResult(method, seed, rounds, hyperparameters=registry.get(method).config().to_wire())


def keep(folder: Path, run: RunResult, **state: np.ndarray[Any, Any]) -> Path:
    strategy = registry.get(run.method).strategy.__name__
    checkpoint = Checkpoint(strategy, 1, run.hyperparameters, run.seed, ArrayRecord(), state)
    return checkpoint.save(saved_arrays.folder_of(folder, run.method, run.seed))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_coefficients_are_those_of_the_state(tmp_path: Path, dtype: str) -> None:
    keep(tmp_path, a_run(), coefficients=MATRIX.astype(dtype), clients=CLIENTS.astype("int32"))
    saved = saved_arrays.coefficients(tmp_path, a_run())
    assert saved is not None
    matrix, clients = saved
    assert (matrix.dtype, clients.dtype.kind) == (np.float64, "i")
    np.testing.assert_array_equal(matrix, MATRIX.astype(dtype))
    assert clients.tolist() == [0, 3, 7]


def test_a_run_without_coefficients_has_none(tmp_path: Path) -> None:
    keep(tmp_path, a_run("fedproto"), prototypes=np.ones(3))
    assert saved_arrays.coefficients(tmp_path, a_run("fedproto")) is None
    # Another run kept arrays, so this one had nothing to keep.
    assert saved_arrays.coefficients(tmp_path, a_run("fedavg")) is None


def test_missing_arrays_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="has no arrays of fedhkd with seed 0"):
        saved_arrays.coefficients(tmp_path, a_run())
    keep(tmp_path, a_run(seed=1), coefficients=MATRIX, clients=CLIENTS)
    saved_arrays.folder_of(tmp_path, "fedhkd", 0).mkdir()
    with pytest.raises(ResultError, match="has no arrays of fedhkd with seed 0"):
        saved_arrays.coefficients(tmp_path, a_run())


def test_an_unknown_method_is_reported(tmp_path: Path) -> None:
    keep(tmp_path, a_run(), coefficients=MATRIX, clients=CLIENTS)
    with pytest.raises(ConfigError, match="unknown method 'fedhdk'"):
        saved_arrays.coefficients(tmp_path, RunResult("fedhdk", 0, ()))


def changed(value: float) -> np.ndarray[Any, Any]:
    matrix = MATRIX.copy()
    matrix[1, 2] = value
    return matrix


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"coefficients": MATRIX[:2]}, "[N, N] with N from 1, got float64 [2, 3]"),
        ({"coefficients": MATRIX[0]}, "[N, N] with N from 1, got float64 [3]"),
        ({"coefficients": np.float64(1)}, "[N, N] with N from 1, got float64 []"),
        ({"coefficients": MATRIX[None]}, "[N, N] with N from 1, got float64 [1, 3, 3]"),
        ({"coefficients": np.ones((0, 0))}, "[N, N] with N from 1, got float64 [0, 0]"),
        (
            {"coefficients": np.eye(3, dtype=np.int64)},
            "must be floats of the shape [N, N] with N from 1, got int64 [3, 3]",
        ),
        ({"coefficients": changed(np.nan)}, "array 'state/coefficients' has values that are not finite"),
        ({"coefficients": changed(np.inf)}, "coefficients of fedhkd must be finite"),
        (
            {"clients": None},
            "integers of the shape [3], as many as its coefficients have rows, got int64 [0]",
        ),
        (
            {"clients": np.arange(2)},
            "integers of the shape [3], as many as its coefficients have rows, got int64 [2]",
        ),
        ({"clients": CLIENTS[:, None]}, "rows, got int64 [3, 1]"),
        ({"clients": CLIENTS.astype(float)}, "rows, got float64 [3]"),
        ({"clients": np.array([0, 7, 3])}, "clients of fedhkd must be ascending, got [0, 7, 3]"),
        (
            {"clients": np.array([0, 3, 3], dtype=np.uint64)},
            "clients of fedhkd must be ascending, got [0, 3, 3]",
        ),
        (
            {"clients": np.array([3, 1, 7], dtype=np.uint64)},
            "clients of fedhkd must be ascending, got [3, 1, 7]",
        ),
    ],
)
def test_arrays_that_are_no_coefficients_are_refused(
    tmp_path: Path, state: dict[str, Any], reason: str
) -> None:
    whole = {"coefficients": MATRIX, "clients": CLIENTS, **state}
    keep(tmp_path, a_run(), **{name: value for name, value in whole.items() if value is not None})
    with pytest.raises(ResultError, match=re.escape(reason)):
        saved_arrays.coefficients(tmp_path, a_run())
