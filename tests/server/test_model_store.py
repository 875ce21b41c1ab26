"""A model per client at the server, against plain NumPy; in memory, in the file, and partly in both."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from safetensors.numpy import load_file, save_file

from flwr_kd.server import model_store
from flwr_kd.server.checkpoint import Checkpoint
from flwr_kd.server.model_store import ModelStore
from flwr_kd.server.tensor_file import read_tensors, write_tensors
from flwr_kd.transport.template import ArrayTemplate

KEYS = [2**64 - 1, 3, 8, 5, 0]
PLACES = pytest.mark.parametrize("memory", [0, 700, 2**20], ids=["file", "both", "memory"])


def model(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "bn.running_mean": (100 * rng.normal(size=3)).astype(np.float32),
        "bn.running_var": (1e4 * rng.uniform(size=3)).astype(np.float32),
        "bn.num_batches_tracked": np.array(seed),
        "half": rng.normal(size=4).astype(np.float16),
        "double": rng.normal(size=(2, 1, 2)),
        "none": np.zeros((0, 3), np.float32),
    }


def store(memory: int, folder: Path | None = None, count: int = len(KEYS)) -> ModelStore:
    made = ModelStore(ArrayTemplate.of_ndarrays(model(0)), memory=memory, folder=folder)
    for seed, key in enumerate(KEYS[:count]):
        made.put(key, list(model(seed).values()))
    return made


def flat(seed: int, *, parameters: bool) -> np.ndarray:
    names = ["conv.weight", "half", "double", *([] if parameters else ["bn.running_mean", "bn.running_var"])]
    return np.concatenate([model(seed)[name].astype(np.float64).ravel() for name in names])


@pytest.fixture(autouse=True, params=[7, 2**22], ids=["small blocks", "large blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_BLOCK_NUMBERS", request.param)


@PLACES
def test_what_is_put_in_comes_out(memory: int) -> None:
    made = store(memory)
    assert made.keys == sorted(KEYS)
    assert len(made) == 5
    assert 3 in made
    assert 4 not in made
    assert made.in_memory <= memory
    for seed, key in enumerate(KEYS):
        for mine, (name, theirs) in zip(made.get(key), model(seed).items(), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
            np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(KeyError):
        made.get(4)


@PLACES
def test_distances_cosines_and_products(memory: int) -> None:
    """The first two without running statistics, which are by far the largest numbers here."""
    made, chosen = store(memory), [5, 2**64 - 1, 8]
    models = np.stack([flat(KEYS.index(key), parameters=True) for key in chosen])
    away = ((models[:, None] - models[None]) ** 2).sum(axis=2)
    norms = np.linalg.norm(models, axis=1)
    np.testing.assert_allclose(made.squared_distances(chosen), away, rtol=1e-12)
    np.testing.assert_allclose(made.cosines(chosen), models @ models.T / norms[:, None] / norms, rtol=1e-12)
    assert (made.squared_distances(chosen).diagonal() == 0).all()
    assert (made.cosines(chosen).diagonal() == 1).all()
    every = np.stack([flat(KEYS.index(key), parameters=False) for key in chosen])
    np.testing.assert_allclose(made.products(chosen), every @ every.T, rtol=1e-12)


def test_near_models_have_their_distance() -> None:
    """By inner products alone it would be rounding: 1e-8 of 1e8."""
    template = ArrayTemplate.of_ndarrays({"w": np.zeros(100)})
    made = ModelStore(template, memory=0)
    for key in range(3):
        made.put(key, [np.full(100, 1e3) + 1e-5 * key])
    np.testing.assert_allclose(made.squared_distances([0, 1, 2])[0], [0, 1e-8, 4e-8], rtol=1e-6)


def test_huge_and_zero_models_are_no_error() -> None:
    made = ModelStore(ArrayTemplate.of_ndarrays({"w": np.zeros(3)}))
    for key, value in enumerate((1e200, 1.0, 0.0, 1.0)):
        made.put(key, [np.full(3, value)])
    assert made.cosines(range(4)).tolist() == [[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 1]]
    distances = made.squared_distances(range(4))
    assert (distances[0, 1:] == np.inf).all()
    assert not np.isnan(distances).any()


@PLACES
@pytest.mark.parametrize("parameters_only", [False, True])
def test_mixtures(memory: int, parameters_only: bool) -> None:
    made, chosen = store(memory), [5, 8, 3]
    rows = {8: np.array([0.5, 0.25, 0.25]), 0: np.array([1.0, 0.0, 0.0])}
    mixed = made.mixed(rows, chosen, parameters_only=parameters_only)
    assert mixed.keys == [0, 8]
    assert mixed.in_memory <= memory
    for key, row in rows.items():
        own = model(KEYS.index(key))
        for (name, mine), theirs in zip(own.items(), mixed.get(key), strict=True):
            kept = mine.dtype.kind != "f" or (parameters_only and "running" in name)
            models = [model(KEYS.index(other))[name].astype(np.float64) for other in chosen]
            expected = mine if kept else np.tensordot(row, np.stack(models), axes=1).astype(mine.dtype)
            assert theirs.dtype == mine.dtype
            np.testing.assert_allclose(theirs, expected, rtol=1e-3 if mine.dtype == "f2" else 1e-6)
    # What was mixed has not changed.
    for seed, key in enumerate(KEYS):
        np.testing.assert_array_equal(made.get(key)[0], model(seed)["conv.weight"])


def test_no_mixtures_are_an_empty_store() -> None:
    """As where a round draws only clients whose models are not known yet."""
    mixed = store(3).mixed({}, [0, 1])
    assert mixed.keys == []


def test_mixtures_are_clipped_and_variances_stay_positive() -> None:
    made, limit = store(0), float(np.finfo(np.float16).max)
    big = model(0) | {"half": np.full(4, limit, np.float16), "bn.running_var": np.ones(3, np.float32)}
    for key in (3, 8):
        made.put(key, list(big.values()))
    mixed = made.mixed({3: np.array([2.0, 1.0]), 8: np.array([-2.0, 1.0])}, [3, 8])
    names = list(big)
    assert mixed.get(3)[names.index("half")].tolist() == [limit] * 4
    assert mixed.get(8)[names.index("half")].tolist() == [-limit] * 4
    assert mixed.get(8)[names.index("bn.running_var")].tolist() == [0] * 3


@pytest.mark.long
@PLACES
def test_a_copy_and_a_state_do_not_change(memory: int) -> None:
    made = store(memory)
    before, state, deep = made.copy(), made.state_arrays(), copy.deepcopy(made)
    frozen = {name: value.copy() for name, value in state.items()}
    for round_ in range(4):
        for key in KEYS:
            made.put(key, list(model(100 + round_).values()))
        gc.collect()
    assert all(np.array_equal(state[name], frozen[name]) for name in frozen)
    for other in (before, deep):
        again = other.state_arrays()
        assert all(np.array_equal(again[name], frozen[name]) for name in frozen)
    with pytest.raises(ValueError, match="read-only"):
        state["3/double"][...] = 0


def test_slots_are_used_again(tmp_path: Path) -> None:
    made = store(0, tmp_path)
    state = made.state_arrays()
    for _ in range(20):
        pending = made.copy()
        for key in KEYS:
            pending.put(key, list(model(1).values()))
        made = pending
    # Those of the state, of the store before, and of its copy.
    assert made._file._used <= 3 * len(KEYS)
    del state, pending
    gc.collect()
    assert len(made._file.free) == made._file._used - len(KEYS)


def test_merge_and_share(tmp_path: Path) -> None:
    one, other = store(700, tmp_path, 2), store(2**20)
    one.merge(other)
    assert one.keys == sorted(KEYS)
    assert one.in_memory <= 700
    one.share(77, 3)
    np.testing.assert_array_equal(one.get(77)[0], one.get(3)[0])
    one.put(3, list(model(9).values()))
    np.testing.assert_array_equal(one.get(77)[0], model(1)["conv.weight"])
    assert len(one.empty()) == 0


@PLACES
def test_the_file_has_no_name_and_takes_one_descriptor(memory: int, tmp_path: Path) -> None:
    """A process that is killed leaves nothing, and 1,200 clients are no more open files than one."""
    made = store(memory, tmp_path / "new" / "folder")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for key in range(1200):
        made.put(key, list(model(1).values()))
    made.state_arrays()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_disk_is_an_error_that_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = store(0, tmp_path)

    class Full:
        def seek(self, at: int) -> None:
            pass

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(made._file, "_file", Full())
    with pytest.raises(OSError, match=rf"No space left on device: .* kept in {tmp_path}; choose a folder"):
        made.put(1, list(model(1).values()))


@PLACES
def test_a_checkpoint_is_written_and_restored_to_the_last_bit(memory: int, tmp_path: Path) -> None:
    made = store(memory, tmp_path)
    state = made.state_arrays()
    Checkpoint("FedAMP", 4, {}, 1, ArrayRecord(), state).save(tmp_path)
    read = Checkpoint.load(tmp_path, "FedAMP")
    assert read is not None
    restored = ModelStore.from_state(read.state, memory=memory, folder=tmp_path)
    assert restored.keys == made.keys
    assert restored.template == made.template
    other = restored.state_arrays()
    assert list(other) == list(state)
    assert all(other[name].tobytes() == value.tobytes() for name, value in state.items())
    assert (restored.products(KEYS) == made.products(KEYS)).all()


def test_arrays_in_another_order(tmp_path: Path) -> None:
    made = store(0)
    names = sorted(model(0))
    template = ArrayTemplate.of_ndarrays({name: model(0)[name] for name in names})
    other = made.in_order_of(template)
    assert other.template.names == tuple(names)
    np.testing.assert_array_equal(other.get(8)[names.index("double")], model(2)["double"])


def test_a_mask_is_sent_as_it_is_and_counts_as_nothing() -> None:
    arrays = {"mask": np.float32([0, -np.inf]), "w": np.float32([1, 2])}
    made = ModelStore(ArrayTemplate.of_ndarrays(arrays))
    made.put(0, list(arrays.values()))
    made.put(1, [arrays["mask"], np.float32([4, 6])])
    assert made.squared_distances([0, 1]).tolist() == [[0, 25], [25, 0]]
    mixed = made.mixed({1: np.array([0.5, 0.5])}, [0, 1])
    assert mixed.record(1)["mask"].numpy().tolist() == [0, -np.inf]
    assert mixed.record(1)["w"].numpy().tolist() == [2.5, 4]
    assert np.isfinite(made.state_arrays()["0/mask"]).all()


@pytest.mark.parametrize(
    "state",
    [
        {"0/w": np.zeros(2), "1/w": np.zeros(3)},
        {"0/w": np.zeros(2), "1/v": np.zeros(2)},
        {"0/w": np.zeros(2), "1/w": np.zeros(2, np.float32)},
        {"x/w": np.zeros(2)},
        {"1": np.zeros(2)},
    ],
)
def test_another_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ModelStore.from_state(state)


def test_a_tensor_file_is_one_of_safetensors(tmp_path: Path) -> None:
    tensors = {**model(3), "truth": np.array([True, False]), "large": np.arange(3, dtype=np.uint64)}
    write_tensors(tmp_path / "ours", tensors, {"a": "b"})
    theirs = load_file(tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs", metadata={"a": "b"})
    for read in (theirs, read_tensors(tmp_path / "theirs")[1], read_tensors(tmp_path / "ours")[1]):
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(read[name], value)
    assert read_tensors(tmp_path / "ours")[0] == {"a": "b"}
    assert list(read_tensors(tmp_path / "ours")[1]) == list(tensors)
