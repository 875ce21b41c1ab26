"""The command, called in this process from an empty folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flwr_kd.cli import app
from flwr_kd.experiments import runner
from tests.cli.commands import Command, Outcome


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["flwr-kd", *args])
        capsys.readouterr()
        code = 0
        try:
            app.main()
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda *args, **kwargs: pytest.fail("something was run"))
