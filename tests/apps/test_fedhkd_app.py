"""The FedHKD app, by ``flwr run`` on a SuperLink of its own, gives the numbers of ``flwr-kd simulate``."""

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
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd import registry, results
from flwr_kd.config import ConfigError
from flwr_kd.simulation import Experiment, run
from flwr_kd.strategies.fedhkd import FedHKDConfig

pytest.importorskip("ray", reason="a local simulation needs Ray")

APP = Path(__file__).resolve().parents[2] / "apps" / "fedhkd"
PROGRAMS = Path(sys.executable).parent
SETTINGS: dict[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"][
    "config"
]
CLIENTS, ROUNDS, SEED = 3, 2, 5


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
            "OMP_NUM_THREADS": "1",
        }
        if sys.dont_write_bytecode:
            # A dozen processes would each compile torch, Ray and Flower anew; so none writes beside the sources.
            self.environment |= {
                "PYTHONDONTWRITEBYTECODE": "",
                "PYTHONPYCACHEPREFIX": str(APP.parents[1] / ".cache" / "pycache"),
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

    def flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [PROGRAMS / "flwr", *arguments, "--format", "json"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

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


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    if not Path("/proc/self/stat").exists():
        pytest.skip("without /proc, processes that are left could not be found and ended")
    link = SuperLink(tmp_path)
    try:
        wait_for(link.healthy, "the SuperLink's start", 60)
        yield link
    finally:
        link.stop()


@pytest.fixture
def server_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(APP))
    yield importlib.import_module("fedhkd_app.server_app")
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedhkd_app"]:
        del sys.modules[name]


def context(**settings: Any) -> Context:
    changed = {name.replace("_", "-"): value for name, value in settings.items()}
    return Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={**SETTINGS, **changed}
    )


@pytest.mark.flwr_run
@pytest.mark.timeout(420)
def test_flwr_run_gives_the_numbers_of_the_simulation(superlink: SuperLink, tmp_path: Path) -> None:
    out = tmp_path / "result"
    started = superlink.flwr(
        "run",
        str(APP),
        "--federation-config",
        f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2",
        "--run-config",
        f"num-server-rounds={ROUNDS} min-nodes={CLIENTS} seed={SEED} local-epochs=2 gamma=0.2 sigma=0.5 "
        f"reproducible-noise=true out='{out}'",
    )

    def finished() -> dict[str, Any] | None:
        (found,) = superlink.flwr("ls", "--run-id", started["run-id"])["runs"]
        assert isinstance(found, dict)
        return found if found["status"].startswith("finished") else None

    ended = wait_for(finished, "the run's end", 240, pause=3)
    assert ended["status"] == "finished:completed", superlink.log.read_text()[-5000:]

    method = registry.get("fedhkd")
    expected = run(
        method,
        Experiment(clients=CLIENTS, rounds=ROUNDS, seed=SEED, backend="inline", device="cpu"),
        method.config(["local-epochs=2", "gamma=0.2", "sigma=0.5"]),
    )
    comparison = results.load(out)
    (found,) = comparison.runs
    assert (found.method, found.seed) == ("fedhkd", SEED)
    assert found.hyperparameters == expected.hyperparameters
    assert comparison.config["clients"] == CLIENTS
    assert f"seed={SEED}" in comparison.command
    assert len(found.rounds) == ROUNDS
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (ours.participants, ours.failures) == (CLIENTS, 0)
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        for name in ("local_accuracy", "global_accuracy", "train_loss"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6), name


def test_the_apps_hyper_parameters_are_the_methods() -> None:
    defaults = FedHKDConfig().to_wire()
    listed = {name: value for name, value in SETTINGS.items() if name in defaults}
    assert listed == {name: defaults[name] for name in listed}
    assert {"gamma", "classifier-weight", "noise", "sigma", "clip", "local-epochs"} <= set(listed)


def test_the_readme_explains_every_setting() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (APP / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert {name for name in SETTINGS if name not in FedHKDConfig().to_wire()} <= explained


def test_a_relative_out_is_refused_before_the_work(server_app: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"out must be an absolute path, got 'runs/here'"):
        server_app.main(None, context(out="runs/here"))


def test_a_result_is_not_overwritten(server_app: ModuleType, tmp_path: Path) -> None:
    (tmp_path / results.FILE_NAME).write_text("{}")
    with pytest.raises(results.ResultExistsError, match=re.escape(str(tmp_path))):
        server_app.main(None, context(out=str(tmp_path)))


def test_settings_are_checked_before_the_work(server_app: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"gamma must be >= 0, got -1"):
        server_app.main(None, context(gamma=-1.0))
    with pytest.raises(ConfigError, match=r"mlpp.*mlp"):
        server_app.main(None, context(model="mlpp"))
