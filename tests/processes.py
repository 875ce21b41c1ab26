"""Processes of the tests: marked in their environment, and ended however the test ends."""

from __future__ import annotations

import os
import random
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
"""The variable that names the folder of a process. Processes that it starts inherit it."""
PATIENCE = 600.0
"""Seconds after which a condition counts as never met.

It ends tests that hang, and says nothing about speed: on a loaded machine, what takes seconds may take minutes.
"""
SIGNAL_SECONDS = 15.0
"""Seconds that processes have to end after a signal, before they get a stronger one."""


def wait_for(ready: Callable[[], Any], what: str, seconds: float = PATIENCE, pause: float = 0.2) -> Any:
    """Call ``ready`` until it returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (answer := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return answer


def free_port(following: int = 0) -> int:
    """Return a free port of the loopback interface that is followed by ``following`` more free ports.

    It is drawn at random below the ports that the system gives to outgoing connections, so that neither these nor
    tests that run at the same time take it before the program that it is for has started.
    """
    while True:
        first = random.SystemRandom().randrange(10_000, 32_000)
        with ExitStack() as sockets:
            try:
                for port in range(first, first + following + 1):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def living() -> Iterator[tuple[int, int]]:
    """Yield process id and session of each process that has not ended."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            yield int(entry.parent.name), int(session)


def sessions_of(mark: Path) -> set[int]:
    """Return the sessions of all processes that were started with this folder's mark."""
    sessions = set()
    for pid, session in living():
        try:
            values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in values:
            sessions.add(session)
    return sessions - {os.getsid(0)}


def start_environment(folder: Path) -> dict[str, str]:
    """Return the environment of all processes of a folder: a home in it, this Python's programs, no GPU."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    environment = {
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
        # Otherwise each of a dozen processes would compile PyTorch, Ray and Flower. Nothing is written beside the
        # sources.
        cache = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "pycache")}
        environment |= cache
    return environment


def end_all(folder: Path) -> None:
    """End all processes of a folder, by force where they do not end in order, and check that none is left."""
    # Read before any of them ends: Ray's processes change their names, and lose their environment with that.
    sessions = sessions_of(folder)

    def left() -> list[int]:
        return [pid for pid, session in living() if session in sessions]

    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        with suppress(TimeoutError):
            wait_for(lambda: not left(), "processes ending", SIGNAL_SECONDS)
    # Nothing survives SIGKILL, but on a loaded machine the end may take long.
    wait_for(lambda: not left(), f"the end of processes {left()}")
    assert not sessions_of(folder), f"processes were started while the others ended: {sessions_of(folder)}"


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """End all of a folder's processes after the block, and also when this process is killed inside it."""
    # The guard waits for the end of its input, which comes when this process has ended: no other writes to it.
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
            guard.wait(PATIENCE)


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

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Wait until it prints something that matches; fail at once when it has ended without."""

        def search() -> re.Match[str] | None:
            ended = self.returncode is not None
            match = re.search(pattern, self.log, flags=re.MULTILINE)
            assert match or not ended, f"it ended without printing {pattern}:\n{self.log[-5000:]}"
            return match

        try:
            return wait_for(search, pattern)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{self.log[-5000:]}") from None

    def send(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait_alone(self, silence: float = PATIENCE) -> int:
        """Wait for its end, but not for what it has started; return its exit status.

        It may run for longer than ``silence`` seconds, but not print nothing for so long: how long a script of many
        commands takes depends on the machine.
        """
        size = -1
        while size != (size := self.log_file.stat().st_size):
            with suppress(subprocess.TimeoutExpired):
                return self._popen.wait(silence)
        raise TimeoutError(f"it has printed nothing for {silence:g} s, and runs:\n{self.log[-5000:]}")

    def wait(self, silence: float = PATIENCE) -> int:
        """Wait as :meth:`wait_alone` does, and then for the end of all that it has started."""
        status = self.wait_alone(silence)
        wait_for(
            lambda: all(session != self.pid for _, session in living()),
            f"the end of what {self.log_file.stem} has started",
        )
        return status

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait as :meth:`wait` does."""
        self.send(number)
        return self.wait()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(Path(sys.argv[1]))
