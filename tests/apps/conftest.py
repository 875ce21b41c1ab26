"""The apps as modules, and one SuperLink of the tests' own for all of their runs."""

from __future__ import annotations

import importlib
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent


def wait_for(ready: Callable[[], Any], what: str, seconds: float, pause: float = 0.2) -> Any:
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + seconds
    while not (answer := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return answer


def living() -> Iterator[tuple[int, int]]:
    """Return process and session of all processes that have not ended."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            yield int(entry.parent.name), int(session)


def sessions_of(home: Path) -> set[int]:
    """Return the sessions whose processes have this home: the SuperLink's and those that it started."""
    found = set()
    for pid, session in living():
        try:
            values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"HOME={home}".encode() in values:
            found.add(session)
    return found - {os.getsid(0)}


class SuperLink:
    """A SuperLink with Flower's simulation runtime, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.home, self.log = folder / "home", folder / "superlink.log"
        config = self.home / ".flwr" / "config.toml"
        config.parent.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config.write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.environment = {
            **os.environ,
            "HOME": str(self.home),
            "FLWR_HOME": str(config.parent),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # The apps themselves see to the threads.
        self.environment.pop("OMP_NUM_THREADS", None)
        if sys.dont_write_bytecode:
            # A dozen processes would each compile torch, Ray and Flower anew; so none writes beside the sources.
            self.environment |= {
                "PYTHONDONTWRITEBYTECODE": "",
                "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "pycache"),
            }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    PROGRAMS / "flower-superlink",
                    "--insecure",
                    "--simulation",
                    "--disable-runtime-dependency-installation",
                    "--host=127.0.0.1",
                    f"--port={self.port}",
                ],
                cwd=folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def healthy(self) -> bool:
        assert self.process.poll() is None, f"the SuperLink ended:\n{self.log.read_text()}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def flwr(self, *arguments: str, timeout: float = 60) -> str:
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

    def run(self, app: Path, clients: int, run_config: str) -> None:
        """Run an app to its end, one CPU per client."""
        federation = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus=2"
        settings = ("--federation-config", federation, "--run-config", run_config)
        printed = self.flwr("run", str(app), "--stream", *settings, timeout=300)
        started = re.search(r"started run (\d+)", printed)
        assert started, printed

        # The exit status is 0 however the run ended, and the stream may end before the run is entered as ended.
        def ended() -> str | None:
            (found,) = json.loads(self.flwr("ls", "--run-id", started[1], "--format", "json"))["runs"]
            status = str(found["status"])
            return status if status.startswith("finished") else None

        assert wait_for(ended, "the run's end", 60, pause=2) == "finished:completed", printed[-5000:]

    def stop(self) -> None:
        """End everything that was started, and check that nothing is left."""
        # Before it ends: Ray's processes change their names, and with them lose what tells whose they are.
        sessions = sessions_of(self.home)

        def left() -> list[int]:
            return [pid for pid, session in living() if session in sessions]

        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(15)
        try:
            wait_for(lambda: not left(), "processes ending by themselves", 10)
        except TimeoutError:
            for pid in left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not left(), "processes ending when killed", 15)


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    pytest.importorskip("ray", reason="a local simulation needs Ray")
    if not Path("/proc/self/stat").exists():
        pytest.skip("without /proc, processes that are left could not be found and ended")
    link = SuperLink(tmp_path_factory.mktemp("superlink"))
    try:
        wait_for(link.healthy, "the SuperLink's start", 60)
        yield link
    finally:
        link.stop()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import an app's module as Flower does, from the app's own folder."""
    packages, threads = set(), torch.get_num_threads()

    def load(app: str, name: str) -> ModuleType:
        package = f"{app}_app"
        packages.add(package)
        monkeypatch.syspath_prepend(str(ROOT / "apps" / app))
        return importlib.import_module(f"{package}.{name}")

    yield load
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
