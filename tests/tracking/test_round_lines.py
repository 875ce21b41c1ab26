"""The line per round of an app's log, and where an app's result goes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd import ConfigError, RoundStats
from flwr_kd.experiments.run_config import output_folder
from flwr_kd.results.errors import ResultExistsError
from flwr_kd.tracking import RoundLines, round_line


@pytest.fixture
def info() -> Iterator[list[str]]:
    """Return the lines of Flower's log at the level of its progress."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_each_round_has_a_line_and_the_end_names_the_result(
    federation: Any, info: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    _, result = federation("fedavg").run(rounds=2, callbacks=[RoundLines(file)])
    lines = [line for line in info if line.startswith(("round ", "result: "))]
    assert lines == [*(round_line(stats, 2) for stats in result.rounds), f"result: {file}"]
    for stats, line in zip(result.rounds, lines, strict=False):
        assert stats.local_accuracy is not None
        assert f"local {100 * stats.local_accuracy:.1f} %" in line
        assert f"{stats.bytes_up / 1e6:.3g} MB up" in line
        assert f"{stats.seconds:.1f} s" in line


def test_a_void_round_says_so() -> None:
    assert "void, nothing has changed; 0 MB up" in round_line(RoundStats(1, void=True), 3)
    assert "no accuracy" in round_line(RoundStats(1), 3)


def test_a_run_without_a_result_names_none(federation: Any, info: list[str]) -> None:
    federation("fedavg").run(rounds=1, callbacks=[RoundLines()])
    assert not [line for line in info if line.startswith("result: ")]


def test_the_result_is_in_the_home_folder_unless_out_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of(**settings: str) -> Path | None:
        return output_folder(Context(42, 0, {}, RecordDict(), dict(settings)))

    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / "flwr-kd" / "runs" / "42"
    assert of() == of(out="") == own
    assert of(out="none") is None
    assert of(out="/data/x") == Path("/data/x")
    assert not own.exists()
    with pytest.raises(ConfigError, match="out must be an absolute path, got 'here'"):
        of(out="here")
    own.mkdir(parents=True)
    (own / "result.json").write_text("precious")
    with pytest.raises(ResultExistsError, match="exists"):
        of()
