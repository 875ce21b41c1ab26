"""A SuperLink, SuperNodes and runs for tests: real processes, on the loopback interface only."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from flwr_kd.results import files, schema
from tests.processes import (
    PATIENCE,
    PROGRAMS,
    Process,
    free_port,
    guarded,
    living,
    start_environment,
    wait_for,
)

__all__ = ["Deployment", "Run", "SuperLink", "SuperNode", "living", "wait_for"]


class Run:
    """A run on a SuperLink, while ``flwr run --stream`` shows its log."""

    def __init__(self, link: SuperLink, stream: Process, out: Path) -> None:
        self.link, self.stream, self.out = link, stream, out
        self.status: str | None = None
        """Its final status, once :meth:`wait` has returned."""
        self.run_id = stream.wait_for_log(r"started run (\d+)")[1]

    @property
    def log(self) -> str:
        """What the ServerApp has logged so far."""
        return self.stream.log

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Wait until the ServerApp logs something that matches, for example ``r"\\[ROUND 2/"``."""
        return self.stream.wait_for_log(pattern)

    def entry(self) -> dict[str, Any]:
        """Return the run's entry in ``flwr ls --format json``."""
        (entry,) = self.link.json("ls", "--run-id", self.run_id)["runs"]
        return dict(entry)

    def wait(self) -> str:
        """Wait for the run's end, and return its status, which is ``finished:completed`` after a success."""
        self.stream.wait()

        # The exit status of the stream is always 0, and it may end before the SuperLink has stored the run's end.
        def ended() -> str | None:
            status = str(self.entry()["status"])
            return status if status.startswith("finished") else None

        self.status = str(wait_for(ended, "the run's end", pause=1))
        return self.status

    def result(self) -> schema.Comparison:
        """Wait for the run's success, and read the result that it has saved."""
        status = self.wait()
        assert status == "finished:completed", f"{status}\n{self.log[-5000:]}"
        return files.load(self.out)


class SuperLink:
    """A SuperLink in a folder of its own, which runs inside a ``with`` block and leaves nothing behind.

    Parameters
    ----------
    folder : Path
        Empty folder for its home, its logs and the results of its runs.
    *options : str
        Options of ``flower-superlink``.
    environment : mapping of str
        Further variables of all processes. None removes a variable.
    """

    def __init__(self, folder: Path, *options: str, environment: Mapping[str, str | None]) -> None:
        if not Path("/proc/self/stat").exists():
            pytest.skip("without /proc, processes that are left behind cannot be found and ended")
        self.folder, self.port = folder, free_port()
        self.runs: list[Run] = []
        merged: dict[str, str | None] = {**start_environment(folder), **environment}
        self.environment = {name: value for name, value in merged.items() if value is not None}
        config = Path(self.environment["FLWR_HOME"]) / "config.toml"
        config.parent.mkdir(parents=True)
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        config.write_text(f'[superlink]\ndefault = "test"\n[superlink.test]\n{address}')
        self._options, self._guard = options, ExitStack()

    def __enter__(self) -> Self:
        with self._guard:
            self._guard.enter_context(guarded(self.folder))
            self.begin()
            self._guard = self._guard.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._guard.close()

    def begin(self) -> None:
        """Start it, and wait until it replies."""
        self.process = self.start(
            "superlink",
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--host=127.0.0.1",
            f"--port={self.port}",
            *self._options,
        )
        wait_for(self.healthy, "the SuperLink's start")

    def start(self, name: str, *command: Any, environment: Mapping[str, str] | None = None) -> Process:
        """Start one of this environment's programs in the background. It is ended with the SuperLink."""
        program, *arguments = command
        return Process(
            [PROGRAMS / program, *arguments],
            self.folder / f"{name}.log",
            {**self.environment, **(environment or {})},
        )

    def healthy(self) -> bool:
        """Say whether it replies; fail if it has ended."""
        assert self.process.returncode is None, f"the SuperLink ended:\n{self.process.log}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def flwr(self, *arguments: str, check: bool = True) -> str:
        """Run a ``flwr`` command to its end, and return its output; fail where it fails, if ``check``."""
        done = subprocess.run(
            [PROGRAMS / "flwr", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a ``flwr`` command that prints JSON."""
        return dict(json.loads(self.flwr(*arguments, "--format", "json")))

    def submit(self, app: Path, settings: Mapping[str, Any], *options: str, out: Path | None = None) -> Run:
        """Start a run of an app, and return while it goes on.

        Parameters
        ----------
        app : Path
            The app's folder.
        settings : mapping
            Its run config, to which ``out`` is added.
        *options : str
            Further options of ``flwr run``.
        out : Path, optional
            Folder of the result; a new one if None.
        """
        name = f"run-{len(self.runs)}"
        out = out or self.folder / name
        values = " ".join(
            f"{key}={json.dumps(value)}" for key, value in {**settings, "out": str(out)}.items()
        )
        stream = self.start(name, "flwr", "run", app, "--stream", "--run-config", values, *options)
        self.runs.append(Run(self, stream, out))
        return self.runs[-1]


class SuperNode:
    """A SuperNode of a :class:`Deployment`. Its config and environment may change between two starts.

    Attributes
    ----------
    config : dict
        The node config: ``partition-id``, ``num-partitions``, ``state-dir`` and what the test adds.
    environment : dict
        Further variables of its processes and of its clients.
    state_dir : Path
        Folder in which its clients keep their models.
    """

    def __init__(self, link: Deployment, name: str, config: Mapping[str, Any]) -> None:
        self.link, self.name, self.config = link, name, dict(config)
        self.folder = link.folder / name
        self.folder.mkdir()
        # As on a machine of its own: SuperNodes that install an app into one folder at once disturb each other.
        self.environment = {"FLWR_HOME": str(self.folder / ".flwr")}
        self.state_dir = self.folder / "state"
        self.config.setdefault("state-dir", str(self.state_dir))
        # A SuperNode has secret noise, whatever the run config says; runs here are compared with simulations.
        self.config.setdefault("reproducible-noise", True)
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
        """All that it and its clients have printed since its first start."""
        return self.process.log

    @property
    def node_id(self) -> int:
        """Flower's id for it since its last start, once it is online."""
        return int(re.findall(r"SuperNode ID: (\d+)", self.log)[-1])

    def start(self, *options: str) -> SuperNode:
        """Start it, without waiting until it is online."""
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

    def wait_online(self) -> SuperNode:
        """Wait until the SuperLink has given it an id. From then on it takes part in runs."""
        ids = rf"(?s)(?:SuperNode ID: \d+.*?){{{self._before + 1}}}"
        self.process.wait_for_log(ids)
        return self

    def stop(self) -> None:
        """End it in order: it signs off at the SuperLink."""
        self.process.end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does: the SuperLink counts it as online until heartbeats are missed."""
        self.process.end(signal.SIGKILL)

    def restart(self, **environment: str) -> SuperNode:
        """Stop it if it runs, start it again, and wait until it is online."""
        if self.running:
            self.stop()
        self.environment |= environment
        return self.start().wait_online()

    def clients(self) -> list[int]:
        """Return the processes of the clients that it runs now. Each message has a process of its own."""
        clients = []
        for pid, session in living():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if session == self.pid and any(word.endswith(b"/flwr-clientapp") for word in words):
                    clients.append(pid)
        return clients


class Deployment(SuperLink):
    """A SuperLink with SuperNodes. Each process uses one thread for PyTorch.

    Parameters
    ----------
    folder : Path
        Empty folder for all its files.
    nodes : int
        Number of SuperNodes that are started with it. Their partitions are ``0`` to ``nodes - 1``.
    """

    def __init__(self, folder: Path, nodes: int = 3, *options: str) -> None:
        self.nodes: list[SuperNode] = []
        self._settled: list[tuple[int, bool]] = []
        super().__init__(folder, *options, environment={"OMP_NUM_THREADS": "1"})
        self._kept = nodes

    def begin(self) -> None:
        """Start the SuperLink and the SuperNodes, and wait for them."""
        super().begin()
        for index in range(self._kept):
            self.add(partition_id=index, num_partitions=self._kept)
        for node in self.nodes:
            node.wait_online()
        assert self.online() == {node.node_id for node in self.nodes}
        self._settled = self._state()

    def add(self, **config: Any) -> SuperNode:
        """Start a further SuperNode with this node config, as in ``add(partition_id=3, num_partitions=4)``.

        It may not be online yet: ``add(...).wait_online()`` waits for that. A value of None leaves a key out.
        """
        named = {key.replace("_", "-"): value for key, value in config.items()}
        node = SuperNode(self, f"node-{len(self.nodes)}", named)
        node.config = {key: value for key, value in node.config.items() if value is not None}
        self.nodes.append(node)
        return node.start()

    def online(self) -> set[int]:
        """Return the ids of the SuperNodes that the SuperLink counts as online."""
        nodes = self.json("supernode", "ls")["nodes"]
        return {int(node["node-id"]) for node in nodes if node["status"] == "online"}

    def _state(self) -> list[tuple[int, bool]]:
        return [(node.pid, node.running) for node in self.nodes]

    def settle(self) -> None:
        """Restore the first SuperNodes, and end the others and all runs, for the next test."""
        for run in self.runs:
            if run.status is None and not run.entry()["status"].startswith("finished"):
                # It fails if the run has just ended by itself.
                self.flwr("stop", run.run_id, check=False)
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
        # A SuperNode that was killed counts as online until its heartbeats are missed for a minute.
        wait_for(lambda: self.online() == expected, "only the first SuperNodes online", pause=2)
        self._settled = self._state()
