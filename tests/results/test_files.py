"""Result files: written as a whole, and never over another one by mistake."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from flwr_kd.experiments import saved_arrays
from flwr_kd.results import files
from flwr_kd.results.errors import ResultError, ResultExistsError
from tests.results.examples import a_comparison, a_run


def test_save_and_load(tmp_path):
    directory = tmp_path / "a" / "b"
    comparison = a_comparison()
    file = files.save(comparison, directory)
    assert file == directory / "result.json"
    assert files.load(directory) == files.load(file) == comparison
    assert os.listdir(directory) == ["result.json"]
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_result_is_not_overwritten_unless_forced(tmp_path):
    files.check_free(tmp_path, force=False)
    file = files.save(a_comparison(), tmp_path)
    other = a_comparison(a_run("fedhkd"))
    with pytest.raises(ResultExistsError, match=r"result\.json' exists"):
        files.check_free(tmp_path, force=False)
    with pytest.raises(FileExistsError):
        files.save(other, tmp_path)
    assert files.load(file) == a_comparison()
    files.check_free(tmp_path, force=True)
    files.save(other, tmp_path, force=True)
    assert files.load(file) == other


def test_a_dangling_link_counts_as_a_result(tmp_path):
    (tmp_path / "result.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResultExistsError):
        files.check_free(tmp_path, force=False)


def test_check_free_sees_what_cannot_become_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResultError, match="is not a directory"):
        files.check_free(tmp_path / "file" / "deeper", force=True)
    (tmp_path / "dir" / "result.json").mkdir(parents=True)
    with pytest.raises(ResultError, match="is itself a directory"):
        files.check_free(tmp_path / "dir", force=True)
    files.check_free(tmp_path / "new" / "deeper", force=False)
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_the_old_result(tmp_path, monkeypatch):
    files.save(a_comparison(), tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.save(a_comparison(a_run("fedhkd")), tmp_path, force=True)
    assert files.load(tmp_path) == a_comparison()
    assert os.listdir(tmp_path) == ["result.json"]


def test_load_names_the_file(tmp_path):
    file = tmp_path / "result.json"
    file.write_text("{}")
    with pytest.raises(ResultError, match=r"result\.json: schema_version must be 1"):
        files.load(tmp_path)


COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy").glob("*/result.json"))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.parent.name)
def test_results_of_version_0_1_are_read(file):
    """Published by 0.1 and still of schema 1: a newer version must read and redraw them."""
    comparison = files.load(file)
    document = json.loads(file.read_text())
    assert document["schema_version"] == 1
    assert [(run.method, run.seed) for run in comparison.runs] == [
        (run["method"], run["seed"]) for run in document["runs"]
    ]
    for run, written in zip(comparison.runs, document["runs"], strict=True):
        assert [each.local_accuracy for each in run.rounds] == [
            each["local_accuracy"] for each in written["rounds"]
        ]
        experiment = saved_arrays.experiment_of(comparison.config, run)
        assert (experiment.seed, experiment.dataset) == (run.seed, document["config"]["dataset"])
    assert json.loads(comparison.to_json())["runs"] == document["runs"]
