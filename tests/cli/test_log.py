"""Flower's log and Python's warnings, as the command shows them."""

from __future__ import annotations

import warnings

import pytest
from flwr.common.logger import FLOWER_LOGGER

from flwr_kd.cli.log import one_line_warnings, showing_log


@pytest.mark.parametrize("verbose", [False, True])
def test_one_warning_of_each_kind_is_shown(
    flower_log: list[str], capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    level = FLOWER_LOGGER.level
    with showing_log(verbose=verbose):
        for server_round in (1, 2, 3):
            FLOWER_LOGGER.warning("round %d: no replies, loss %g", server_round, -1e-3 * server_round)
        FLOWER_LOGGER.warning("another")
    FLOWER_LOGGER.warning("after it")
    rounds = [f"round {number}: no replies, loss -0.00{number}" for number in (1, 2, 3)]
    assert flower_log == [*(rounds if verbose else rounds[:1]), "another", "after it"]
    said = capsys.readouterr().err.splitlines()
    assert ("note: 2 more warnings of the kinds above; --verbose shows all" in said) is not verbose
    assert FLOWER_LOGGER.level == level


def test_a_warning_of_python_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with one_line_warnings():
        warnings.showwarning("left\nout", RuntimeWarning, "file.py", 3)
    assert capsys.readouterr().err == "warning: left out\n"
