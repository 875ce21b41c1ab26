"""A SuperLink of the tests' own, SuperNodes, and runs on them: real processes, on loopback only."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from flwr_kd import results

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent


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


MARK = "FLWR_KD_TESTS"
"""The variable by which all processes of one folder are found, their children's children, too."""


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


class Run:
    """A run on a SuperLink, while ``flwr run --stream`` shows its log."""

    def __init__(self, link: SuperLink, stream: Process, out: Path) -> None:
        self.link, self.stream, self.out = link, stream, out
        self.status: str | None = None
        """How it ended, once :meth:`wait` has seen it."""
        self.run_id = stream.wait_for_log(r"started run (\d+)")[1]

    @property
    def log(self) -> str:
        """What the ServerApp has logged so far."""
        return self.stream.log

    def wait_for_log(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Wait until the ServerApp logs something, for example ``r"\\[ROUND 2/"``."""
        return self.stream.wait_for_log(pattern, seconds)

    def entry(self) -> dict[str, Any]:
        """Return the run as ``flwr ls --format json`` has it."""
        (found,) = self.link.json("ls", "--run-id", self.run_id)["runs"]
        return dict(found)

    def wait(self, seconds: float = 300) -> str:
        """Wait for the run's end, and return its status: ``finished:completed`` where all went well."""
        try:
            self.stream.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the run did not end within {seconds:g} s:\n{self.log[-5000:]}") from error

        # The exit status is 0 however the run ended, and the stream may end before the run is entered as ended.
        def ended() -> str | None:
            status = str(self.entry()["status"])
            return status if status.startswith("finished") else None

        self.status = str(wait_for(ended, "the run's end", 60, pause=1))
        return self.status

    def result(self) -> results.Comparison:
        """Wait for the run's end, and read what it has saved."""
        status = self.wait()
        assert status == "finished:completed", f"{status}\n{self.log[-5000:]}"
        return results.load(self.out)


class SuperLink:
    """A SuperLink in a folder of its own; within ``with`` it is there, and after it nothing is left.

    Parameters
    ----------
    folder : Path
        Empty; its home, its logs and its runs' results are there.
    *options : str
        Of ``flower-superlink``.
    environment : mapping of str
        Further variables of all processes; None takes one away.
    """

    def __init__(self, folder: Path, *options: str, environment: Mapping[str, str | None]) -> None:
        if not Path("/proc/self/stat").exists():
            pytest.skip("without /proc, processes that are left could not be found and ended")
        self.folder, self.port = folder, free_port()
        self.runs: list[Run] = []
        merged: dict[str, str | None] = {**start_environment(folder), **environment}
        self.environment = {name: value for name, value in merged.items() if value is not None}
        config = Path(self.environment["FLWR_HOME"]) / "config.toml"
        config.parent.mkdir(parents=True)
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        config.write_text(f'[superlink]\ndefault = "test"\n[superlink.test]\n{address}')
        self.process = self.start(
            "superlink",
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--host=127.0.0.1",
            f"--port={self.port}",
            *options,
        )

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def begin(self) -> None:
        """Wait until it answers."""
        wait_for(self.healthy, "the SuperLink's start", 60)

    def start(self, name: str, *command: Any, environment: Mapping[str, str] | None = None) -> Process:
        """Start one of this environment's programs in the background; it ends with the SuperLink."""
        program, *arguments = command
        return Process(
            [PROGRAMS / program, *arguments],
            self.folder / f"{name}.log",
            {**self.environment, **(environment or {})},
        )

    def healthy(self) -> bool:
        assert self.process.returncode is None, f"the SuperLink ended:\n{self.process.log}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def flwr(self, *arguments: str, timeout: float = 60) -> str:
        """Run a ``flwr`` command to its end, and return what it printed."""
        done = subprocess.run(
            [PROGRAMS / "flwr", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.flwr(*arguments, "--format", "json")))

    def submit(self, app: Path, settings: Mapping[str, Any], *options: str, out: Path | None = None) -> Run:
        """Start a run of an app, and return while it goes on.

        Parameters
        ----------
        app : Path
            The app's folder.
        settings : mapping
            Its run config; ``out`` is added.
        *options : str
            Further options of ``flwr run``.
        out : Path, optional
            Where the result goes; a new folder if None.
        """
        name = f"run-{len(self.runs)}"
        out = out or self.folder / name
        values = " ".join(
            f"{key}={json.dumps(value)}" for key, value in {**settings, "out": str(out)}.items()
        )
        stream = self.start(name, "flwr", "run", app, "--stream", "--run-config", values, *options)
        self.runs.append(Run(self, stream, out))
        return self.runs[-1]

    def stop(self) -> None:
        """End everything that was started, and check that nothing is left."""
        end_all(self.folder)


class SuperNode:
    """A SuperNode of a :class:`Deployment`; what it is started with may be changed between two starts.

    Attributes
    ----------
    config : dict
        The node config: ``partition-id``, ``num-partitions``, ``state-dir`` and what the test adds.
    environment : dict
        Further variables of its processes, its clients' among them.
    state_dir : Path
        Where its clients keep their models.
    """

    def __init__(self, link: Deployment, name: str, config: Mapping[str, Any]) -> None:
        self.link, self.name, self.config = link, name, dict(config)
        self.folder = link.folder / name
        self.folder.mkdir()
        # As on a machine of its own: two that install an app into the same folder at once get in each other's way.
        self.environment = {"FLWR_HOME": str(self.folder / ".flwr")}
        self.state_dir = self.folder / "state"
        self.config.setdefault("state-dir", str(self.state_dir))
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        """What it and its clients have printed, over all its starts."""
        return self.process.log

    @property
    def node_id(self) -> int:
        """Flower's id of its last start, once it is online."""
        return int(re.findall(r"SuperNode ID: (\d+)", self.log)[-1])

    def start(self, *options: str) -> SuperNode:
        """Start it, without waiting for the SuperLink to take it."""
        assert not self.running, f"{self.name} is running"
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in self.config.items())
        self._before = len(re.findall(r"SuperNode ID: \d+", self.log)) if self._process else 0
        self._process = self.link.start(
            self.name,
            "flower-supernode",
            "--insecure",
            f"--superlink=127.0.0.1:{self.link.port}",
            f"--port={free_port()}",
            f"--node-config={values}",
            *options,
            environment=self.environment,
        )
        return self

    def wait_online(self, seconds: float = 60) -> SuperNode:
        """Wait until the SuperLink has given it an id, from when on it takes part."""
        ids = rf"(?s)(?:SuperNode ID: \d+.*?){{{self._before + 1}}}"
        self.process.wait_for_log(ids, seconds)
        return self

    def stop(self) -> None:
        """End it in order: it takes its leave from the SuperLink."""
        self.process.end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does: the SuperLink takes it for online until its heartbeats are missed."""
        self.process.end(signal.SIGKILL)

    def restart(self, **environment: str) -> SuperNode:
        """Start it anew, stopped before if it still runs, and wait until it is online."""
        if self.running:
            self.stop()
        self.environment |= environment
        return self.start().wait_online()

    def clients(self) -> list[int]:
        """Return the processes of the clients that it runs now; there is a new one for each message."""
        found = []
        for pid, session in living():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if session == self.pid and any(word.endswith(b"/flwr-clientapp") for word in words):
                    found.append(pid)
        return found


class Deployment(SuperLink):
    """A SuperLink with SuperNodes, one thread for torch in each process.

    Parameters
    ----------
    folder : Path
        Empty.
    nodes : int
        So many are there from the start; their partitions are ``0`` to ``nodes - 1``.
    """

    def __init__(self, folder: Path, nodes: int = 3, *options: str) -> None:
        self.nodes: list[SuperNode] = []
        self._settled: list[tuple[int, bool]] = []
        super().__init__(folder, *options, environment={"OMP_NUM_THREADS": "1"})
        self._kept = nodes

    def begin(self) -> None:
        """Wait for the SuperLink, start the SuperNodes, and wait for them."""
        super().begin()
        for index in range(self._kept):
            self.add(partition_id=index, num_partitions=self._kept)
        for node in self.nodes:
            node.wait_online()
        assert self.online() == {node.node_id for node in self.nodes}
        self._settled = self._state()

    def add(self, **config: Any) -> SuperNode:
        """Start a further SuperNode with this node config, as ``add(partition_id=3, num_partitions=4)``.

        It may not be online yet: ``add(...).wait_online()``. A value of None leaves a key out.
        """
        named = {key.replace("_", "-"): value for key, value in config.items()}
        node = SuperNode(self, f"node-{len(self.nodes)}", named)
        node.config = {key: value for key, value in node.config.items() if value is not None}
        self.nodes.append(node)
        return node.start()

    def online(self) -> set[int]:
        """Return the ids of the SuperNodes that the SuperLink takes for online."""
        found = self.json("supernode", "ls")["nodes"]
        return {int(node["node-id"]) for node in found if node["status"] == "online"}

    def _state(self) -> list[tuple[int, bool]]:
        return [(node.pid, node.running) for node in self.nodes]

    def settle(self) -> None:
        """Bring the SuperNodes of the start back, and end the others and all runs, for the next test."""
        for run in self.runs:
            if run.status is None and not run.entry()["status"].startswith("finished"):
                self.flwr("stop", run.run_id)
                run.wait()
        if self._state() == self._settled:
            return
        kept, others = self.nodes[: self._kept], self.nodes[self._kept :]
        for node in others:
            if node.running:
                node.stop()
        for node in kept:
            if not node.running:
                node.start()
        for node in kept:
            node.wait_online()
        expected = {node.node_id for node in kept}
        # One that was killed counts as online until its heartbeats are missed for a minute.
        wait_for(lambda: self.online() == expected, "only the first SuperNodes online", 120, pause=2)
        self._settled = self._state()
