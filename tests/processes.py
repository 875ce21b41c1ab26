"""Processes of the tests' own: found by a mark in their environment, and ended, whatever becomes of the tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
MARK = "FLWR_KD_TESTS"
"""The variable by which all processes of one folder are found, their children's children, too."""


def wait_for(ready: Callable[[], Any], what: str, seconds: float, pause: float = 0.2) -> Any:
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + seconds
    while not (answer := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return answer


def free_port(following: int = 0) -> int:
    """Return a free port, after which so many others are free, too."""
    while True:
        with ExitStack() as sockets:
            first = 0
            try:
                for index in range(following + 1):
                    taken = sockets.enter_context(socket.socket())
                    taken.bind(("127.0.0.1", first and first + index))
                    first = first or taken.getsockname()[1]
            # The next is not free, or there is none.
            except (OSError, OverflowError):
                continue
            return int(first)


def living() -> Iterator[tuple[int, int]]:
    """Return process and session of all processes that have not ended."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            yield int(entry.parent.name), int(session)


def sessions_of(mark: Path) -> set[int]:
    """Return the sessions of all processes that were started with this folder's mark."""
    found = set()
    for pid, session in living():
        try:
            values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in values:
            found.add(session)
    return found - {os.getsid(0)}


def start_environment(folder: Path) -> dict[str, str]:
    """Return what all of a folder's processes start with: a home there, this Python's programs, no GPU."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    found = {
        **os.environ,
        MARK: str(folder),
        "HOME": str(home),
        "FLWR_HOME": str(home / ".flwr"),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.dont_write_bytecode:
        # A dozen processes would each compile torch, Ray and Flower anew; so none writes beside the sources.
        cache = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "pycache")}
        found |= cache
    return found


def end_all(folder: Path) -> None:
    """Tell all processes of a folder to end, end those that do not, and check that none is left."""
    # Before they end: Ray's processes change their names, and with them lose what tells whose they are.
    sessions = sessions_of(folder)

    def left() -> list[int]:
        return [pid for pid, session in living() if session in sessions]

    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(TimeoutError):
            wait_for(lambda: not left(), "processes ending", 15)
    assert not left(), f"processes are left: {left()}"
    assert not sessions_of(folder), f"processes were started while the others ended: {sessions_of(folder)}"


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """End all of a folder's processes after the block, and also when this process is killed inside it."""
    # It waits for its input's end, which comes when the last that could write to it has ended: this process.
    guard = subprocess.Popen(
        [sys.executable, "-IS", __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        try:
            end_all(folder)
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait(60)


class Process:
    """A program that runs in the background, in a session of its own, with its output in a file."""

    def __init__(
        self, command: list[Any], log: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.log_file = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd or log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        """All that it has printed so far, without colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.log_file.read_text("utf-8", errors="replace"))

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def wait_for_log(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Wait until it prints something; fail at once when it has ended without."""

        def found() -> re.Match[str] | None:
            ended = self.returncode is not None
            match = re.search(pattern, self.log, flags=re.MULTILINE)
            assert match or not ended, f"it ended without printing {pattern}:\n{self.log[-5000:]}"
            return match

        try:
            return wait_for(found, pattern, seconds)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{self.log[-5000:]}") from None

    def send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait_alone(self, seconds: float = 30) -> int:
        """Wait for its end, whatever it has started; return its exit status."""
        return self._popen.wait(seconds)

    def wait(self, seconds: float = 30) -> int:
        """Wait for its end, and for that of all that it has started; return its exit status."""
        found = self.wait_alone(seconds)
        wait_for(
            lambda: all(session != self.pid for _, session in living()),
            f"the end of what {self.log_file.stem} has started",
            seconds,
        )
        return found

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Send it a signal, and wait for its end and for that of all that it has started."""
        self.send(number)
        return self.wait(seconds)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(Path(sys.argv[1]))
