"""Peaks of memory: what was there and freed before does not count."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json
import peak_memory

before = bytearray(200 * 10**6)
del before
start = peak_memory.begin()
held = bytearray(50 * 10**6)
print("first another line")
print(json.dumps({"grown": peak_memory.peak() - start}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read in /proc")
def test_a_peak_is_counted_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    monkeypatch.syspath_prepend(folder)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    made = importlib.import_module("peak_memory").of_program([str(program)], PYTHONPATH=folder)
    assert 50e6 <= made["grown"] < 60e6
