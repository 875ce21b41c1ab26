"""The memory of a process that keeps many clients' models, by its operating system's account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.program
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read in /proc")
def test_memory_does_not_grow_with_the_clients(tmp_path: Path) -> None:
    """300 models of 1 MB, of which 16 MB are in memory: stored, compared, mixed, written and restored.

    benchmarks/model_store.py measures the same for 1,000 models of 1 MB and 100 of 45 MB.
    """
    program = ROOT / "benchmarks" / "model_store.py"
    words = [sys.executable, str(program), "--folder", str(tmp_path), "--one", "300", "1", "16"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_mb"] < 180
