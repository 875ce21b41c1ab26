"""A client's personal model between rounds: in Flower's context, or in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import Tensor

from flwr_kd.client import personal_state
from flwr_kd.client.personal_state import PersonalState, StateError
from flwr_kd.files import write_atomically


def _context(folder: Path | None = None, *, node_id: int = 5, run_id: int = 1, **config: Any) -> Context:
    if folder is not None:
        config["state-dir"] = str(folder)
    named = {name.replace("_", "-"): value for name, value in config.items()}
    return Context(run_id=run_id, node_id=node_id, node_config=named, state=RecordDict(), run_config={})


def _tensors() -> dict[str, Tensor]:
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.float16),
        "counter": torch.tensor(7),
        "flag": torch.tensor(True),
        "mask": torch.tensor([[True], [False]]),
        "empty": torch.zeros(0, 3),
        "bytes": torch.tensor([255], dtype=torch.uint8),
    }


def _assert_same(actual: dict[str, Tensor] | None, expected: dict[str, Tensor]) -> None:
    assert actual is not None
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(actual[name], value), name


@pytest.fixture(params=["context", "file"])
def context(request: pytest.FixtureRequest, tmp_path: Path) -> Context:
    return _context(tmp_path if request.param == "file" else None)


def test_nothing_saved_yet(context: Context) -> None:
    assert PersonalState(context).load() is None


def test_round_trip_in_a_new_object(context: Context) -> None:
    PersonalState(context).save(_tensors())
    _assert_same(PersonalState(context).load(), _tensors())


def test_the_last_one_counts(context: Context) -> None:
    PersonalState(context).save({"a": torch.zeros(3), "old": torch.zeros(1)})
    PersonalState(context).save({"a": torch.ones(2)})
    _assert_same(PersonalState(context).load(), {"a": torch.ones(2)})


def test_no_tensors_are_not_the_same_as_nothing_saved(context: Context) -> None:
    PersonalState(context).save({})
    assert PersonalState(context).load() == {}


def test_a_model_with_shared_strided_and_trained_tensors(context: Context) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    PersonalState(context).save({"a": base, "shared": base, "turned": base.T, "parameter": parameter})
    expected = {"a": base, "shared": base, "turned": base.T, "parameter": parameter.detach()}
    _assert_same(PersonalState(context).load(), expected)


def test_saved_and_loaded_values_are_copies(context: Context) -> None:
    mine = torch.zeros(3)
    PersonalState(context).save({"a": mine})
    mine.add_(1)
    loaded = PersonalState(context).load()
    _assert_same(loaded, {"a": torch.zeros(3)})
    assert loaded is not None
    loaded["a"].add_(5)
    _assert_same(PersonalState(context).load(), {"a": torch.zeros(3)})


def test_loads_into_a_model_with_batchnorm(context: Context) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    PersonalState(context).save(model.state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    other.load_state_dict(PersonalState(context).load() or {}, strict=True)
    _assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert other[1].num_batches_tracked.item() == 1


def test_other_records_in_the_context_stay() -> None:
    context = _context()
    context.state["other"] = ConfigRecord({"x": 1})
    PersonalState(context).save(_tensors())
    assert dict(context.state.config_records["other"]) == {"x": 1}
    _assert_same(PersonalState(context).load(), _tensors())


class TestLimit:
    def test_real_limit(self) -> None:
        assert personal_state.MAX_STATE_BYTES == 150_000_000

    def test_too_large_for_the_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 2_000_000)
        context = _context()
        PersonalState(context).save({"a": torch.zeros(250_000, dtype=torch.float64)})  # exactly the limit
        with pytest.raises(StateError) as caught:
            PersonalState(context).save(
                {"a": torch.zeros(2_900_000, dtype=torch.uint8), "b": torch.zeros(25_000)}
            )
        assert str(caught.value) == (
            "a personal model of 3 MB is more than the 2 MB that Flower keeps between rounds; name a folder "
            "for it: --node-config 'state-dir=\"/path\"'"
        )
        _assert_same(PersonalState(context).load(), {"a": torch.zeros(250_000, dtype=torch.float64)})

    def test_a_view_counts_as_what_it_shows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 100)
        context = _context()
        PersonalState(context).save({"a": torch.zeros(10_000)[:20]})
        assert sum(len(a.data) for a in context.state.array_records[PersonalState._KEY].values()) < 1000

    def test_no_limit_in_a_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 10)
        context = _context(tmp_path)
        PersonalState(context).save(_tensors())
        _assert_same(PersonalState(context).load(), _tensors())
        assert len(context.state) == 0


class TestFile:
    def test_name_and_folder(self, tmp_path: Path) -> None:
        PersonalState(_context(tmp_path / "deep" / "er", run_id=12, node_id=34)).save(_tensors())
        assert [p.name for p in (tmp_path / "deep" / "er").iterdir()] == [
            "run-12-node-34-round-0.safetensors"
        ]

    def test_survives_a_new_node_id_by_the_partition_id(self, tmp_path: Path) -> None:
        PersonalState(_context(tmp_path, node_id=1, partition_id=3)).save(_tensors())
        _assert_same(PersonalState(_context(tmp_path, node_id=99, partition_id=3)).load(), _tensors())

    @pytest.mark.parametrize("changes", [{"run_id": 2}, {"partition_id": 4}])
    def test_runs_and_clients_are_kept_apart(self, tmp_path: Path, changes: dict[str, int]) -> None:
        PersonalState(_context(tmp_path, partition_id=3)).save(_tensors())
        assert PersonalState(_context(tmp_path, **{"partition_id": 3, **changes})).load() is None

    @pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "header", "folder"])
    def test_a_file_that_cannot_be_read(self, tmp_path: Path, damage: str) -> None:
        personal = PersonalState(_context(tmp_path))
        personal.save(_tensors())
        (path,) = tmp_path.iterdir()
        data = path.read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            new = {"empty": b"", "cut": data[:-1], "garbage": b"\xff" * 64, "header": data[:20]}[damage]
            path.write_bytes(new)
        with pytest.raises(StateError, match=f"cannot read the personal model in .*{path.name}"):
            personal.load()

    def test_a_crash_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        personal = PersonalState(_context(tmp_path))
        personal.save({"a": torch.zeros(3)})

        def crash(*_: Any) -> None:
            raise KeyboardInterrupt

        for call in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, crash)
                with pytest.raises(KeyboardInterrupt):
                    personal.save({"a": torch.ones(3)})
            _assert_same(personal.load(), {"a": torch.zeros(3)})
            assert len(list(tmp_path.iterdir())) == 1

    def test_a_reader_of_the_old_file_is_not_disturbed(self, tmp_path: Path) -> None:
        personal = PersonalState(_context(tmp_path))
        personal.save({"a": torch.zeros(1000)})
        before = personal.load()
        personal.save({"a": torch.ones(10)})
        _assert_same(before, {"a": torch.zeros(1000)})

    def test_write_atomically(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "file.bin"
        for data in (b"one", b"", b"three" * 1000):
            write_atomically(path, data)
            assert path.read_bytes() == data
        assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


class TestSets:
    """Several named sets of tensors of one client."""

    @pytest.fixture(params=["context", "folder"])
    def state(self, request: pytest.FixtureRequest, tmp_path: Path) -> PersonalState:
        config: dict[str, Any] = {"state-dir": str(tmp_path)} if request.param == "folder" else {}
        return PersonalState(Context(1, 2, {"partition-id": 3, **config}, RecordDict(), {}))

    def test_they_do_not_touch_each_other(self, state: PersonalState) -> None:
        state.at("a", 1, known=1, saved=0)
        state.save({"w": torch.ones(2)})
        assert state.load("previous") is None
        state.save({"w": torch.zeros(3)}, "previous")
        state.save({"x": torch.full((1,), 5.0)}, "other")
        assert [
            state.load(name)[key].tolist() for name, key in (("", "w"), ("previous", "w"), ("other", "x"))
        ] == [  # type: ignore[index]
            [1, 1],
            [0, 0, 0],
            [5],
        ]
        state.at("a", 2, known=2, saved=1)
        state.save({"w": torch.zeros(2)})
        assert state.load("previous")["w"].tolist() == [0, 0, 0]  # type: ignore[index]
        assert state.load("")["w"].tolist() == [0, 0]  # type: ignore[index]
        state.at("b", 1, known=1, saved=0)
        assert state.load() is state.load("previous") is None

    def test_a_resumed_run_has_each_as_it_was(self, tmp_path: Path) -> None:
        state = PersonalState(Context(1, 2, {"state-dir": str(tmp_path)}, RecordDict(), {}))
        for number in (1, 2, 3):
            state.at("a", number, known=number, saved=1)
            state.save({"w": torch.full((1,), float(number))}, "previous")
        state.at("a", 2, known=1, saved=1)
        assert state.load("previous")["w"].item() == 1.0  # type: ignore[index]

    def test_their_sizes_count_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(personal_state, "MAX_STATE_BYTES", 1000)
        state = PersonalState(Context(1, 2, {}, RecordDict(), {}))
        state.save({"w": torch.zeros(150)})
        with pytest.raises(StateError, match="state-dir"):
            state.save({"w": torch.zeros(100)}, "previous")
        assert state.load("previous") is None
        # The set's own earlier tensors do not count.
        state.save({"w": torch.zeros(160)})
