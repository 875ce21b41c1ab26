"""Ctrl-C, SIGTERM and the death of Ray: the command ends in order in each phase, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import Process, guarded, living, start_environment, wait_for

# A signal to the group goes to all that the command has started, as from a terminal.
SINGLE, GROUP_TWICE = (os.kill, 1), (os.killpg, 2)
HINT = "same command with --resume goes on"

Start = Callable[..., Process]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return the folder for temporary files; Ray needs one with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="fk-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    """Return a function that starts a command of a hundred thousand rounds."""
    environment = {
        **start_environment(tmp_path),
        "TMPDIR": str(temporary),
        "COLUMNS": "300",
        "OMP_NUM_THREADS": "1",
    }
    # A cache of PyTorch's, which is meant to stay.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")

    def simulate(*args: str) -> Process:
        words = [
            "-m",
            "flwr_kd.cli",
            "simulate",
            *args,
            "--rounds",
            "100000",
            "--clients",
            "2",
            "--limit",
            "60",
        ]
        command = [sys.executable, "-u", *words, "--device", "cpu", "--verbose", "--out", "o"]
        return Process(command, tmp_path / "log", environment)

    with guarded(tmp_path):
        yield simulate


def handles(process: Process, number: int) -> bool:
    """Whether a process has a handler for a signal; Python itself has one for SIGINT only."""
    (caught,) = re.findall(r"(?m)^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


def interrupt(
    process: Process, temporary: Path, number: int, kill: Callable[[int, int], None], times: int
) -> str:
    """Send signals, wait for the end of all that runs, and return what was printed."""
    for _ in range(times):
        with suppress(ProcessLookupError):
            kill(process.pid, number)
        time.sleep(0.3)
    assert process.wait(60) == 128 + number
    assert "Traceback" not in process.log
    assert list(temporary.iterdir()) == []
    return process.log.strip().splitlines()[-1]


@pytest.mark.program
@pytest.mark.parametrize(
    ("backend", "workers", "number", "how"),
    [
        *(
            (backend, workers, number, how)
            for backend, workers in (("inline", "1"), ("inline", "2"), ("processes", "2"))
            for number, how in ((signal.SIGINT, SINGLE), (signal.SIGTERM, GROUP_TWICE))
        ),
        ("processes", "2", signal.SIGINT, GROUP_TWICE),
    ],
)
def test_in_the_rounds_of_one_machines_backends(
    start: Start,
    temporary: Path,
    backend: str,
    workers: str,
    number: int,
    how: tuple[Callable[..., None], int],
) -> None:
    process = start("fedproto", "--backend", backend, "--workers", workers)
    process.wait_for_log(r"\[ROUND 3/")
    last = interrupt(process, temporary, number, *how)
    assert last.startswith("flwr-kd: interrupted; fedproto (seed 0) up to round ")
    assert last.endswith(HINT)


@pytest.mark.program
@pytest.mark.parametrize("backend", ["inline", "auto"])
def test_before_the_rounds(start: Start, temporary: Path, backend: str) -> None:
    process = start("fedavg", "--backend", backend)
    wait_for(lambda: handles(process, signal.SIGTERM), "the command's own handlers")
    time.sleep(0.5)
    assert interrupt(process, temporary, signal.SIGINT, *GROUP_TWICE).startswith("flwr-kd: interrupted")
    assert not (process.log_file.parent / "o").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, SINGLE), (signal.SIGTERM, GROUP_TWICE)])
def test_in_the_rounds_of_ray(
    start: Start, temporary: Path, number: int, how: tuple[Callable[..., None], int]
) -> None:
    process = start("fedproto", "--backend", "ray", "--workers", "1")
    process.wait_for_log(r"\[ROUND 3/")
    assert interrupt(process, temporary, number, *how).endswith(HINT)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["raylet", "gcs_server"])
def test_the_death_of_ray_ends_the_command(start: Start, temporary: Path, killed: str) -> None:
    process = start("fedproto", "--backend", "ray", "--workers", "1")
    process.wait_for_log(r"\[ROUND 3/")
    started = [pid for pid, session in living() if session == process.pid]
    programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in started}
    (pid,) = (pid for pid, program in programs.items() if program.endswith(f"/{killed}"))
    os.kill(pid, signal.SIGKILL)
    assert process.wait() == 1
    assert "Traceback" not in process.log.rpartition("ROUND")[2]
    last = process.log.strip().splitlines()[-1]
    assert last.startswith("flwr-kd: the simulation cannot go on: Ray")
    assert list(temporary.iterdir()) == []
