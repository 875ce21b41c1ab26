"""Ways in which Ray, or Flower's simulation, ends before the server: the run ends as well, with an error."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flwr.simulation
import pytest
import ray
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_kd.checks import ConfigError
from flwr_kd.experiments import ray_backend, ray_pool
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment
from tests.processes import PATIENCE, wait_for

EXPERIMENT = Experiment(clients=2, device="cpu", backend="ray")


class Server:
    """A server that would wait for ever, and whose error handler delays its end."""

    def __init__(self) -> None:
        self.runs, self.ended = threading.Event(), threading.Event()
        self.stubborn = 2

    def __call__(self, grid: Grid) -> None:
        self.runs.set()
        try:
            while True:
                try:
                    time.sleep(0.01)
                except SystemExit:
                    self.stubborn -= 1
                    if not self.stubborn:
                        raise
        finally:
            self.ended.set()


class Room:
    """Stands for room on Ray's nodes."""

    def __init__(self, *_: Any) -> None:
        self.closed, self.lost = threading.Event(), None

    def wait(self, stopping: threading.Event) -> None:
        pass

    @contextmanager
    def given_to_flower(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.closed.set()


class Watch:
    """Stands for one that sees nothing, or what a test has set."""

    problem = ""

    def __init__(self, room: Room) -> None:
        pass

    def check(self) -> None:
        if self.problem:
            raise SimulationError(self.problem)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(ray_backend, "_prepare", lambda *_: None)
    monkeypatch.setattr(ray_pool, "Room", Room)
    monkeypatch.setattr(ray_pool, "Watch", Watch)
    return Server()


def run(server: Server, monkeypatch: pytest.MonkeyPatch, end: Callable[[threading.Thread], None]) -> None:
    """Run a server with a simulation of Flower's that ends in some way while the server runs."""

    def run_simulation(server_app: ServerApp, **_: Any) -> None:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        thread = threading.Thread(target=server_app, args=(None, context))
        thread.start()
        assert server.runs.wait(PATIENCE)
        end(thread)

    monkeypatch.setattr(flwr.simulation, "run_simulation", run_simulation)
    app = ClientApp(client_fn=lambda context: None)  # type: ignore[arg-type, return-value]
    ray_backend.run_ray(app, EXPERIMENT, server)


def crash(thread: threading.Thread) -> None:
    try:
        raise OSError("no space left on device")
    except OSError as error:
        raise RuntimeError("An error was encountered. Ending simulation.") from error


def leave(thread: threading.Thread) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("end", "error", "text"),
    [
        (crash, SimulationError, "simulation on Ray has ended: OSError: no space left on device"),
        (lambda thread: None, SimulationError, "has ended before the server"),
        (leave, SystemExit, "1"),
    ],
)
def test_the_server_ends_when_the_simulation_does(
    end: Callable[[threading.Thread], None],
    error: type[BaseException],
    text: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(error, match=text):
        run(server, monkeypatch, end)
    assert server.ended.wait(PATIENCE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_server_ends_when_a_thread_of_flowers_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry_messages() -> None:
        raise ValueError("a reply that cannot be stored")

    flowers = types.FunctionType(
        carry_messages.__code__,
        {"__name__": "flwr.server.superlink.fleet.vce.vce_api", "__builtins__": __builtins__},
    )

    failed = threading.Event()

    def end(thread: threading.Thread) -> None:
        fails = threading.Thread(target=flowers)
        fails.start()
        fails.join(PATIENCE)
        failed.set()
        thread.join(PATIENCE)

    start_thread = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        start_thread(thread)
        if thread.name == "flwr-kd-simulation":
            # Nothing that fails before the main thread goes on may be missed.
            assert failed.wait(PATIENCE)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(SimulationError, match="a reply that cannot be stored"):
        run(server, monkeypatch, end)
    assert server.ended.wait(PATIENCE)


def test_the_server_ends_when_ray_does(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(thread: threading.Thread) -> None:
        monkeypatch.setattr(Watch, "problem", "Ray has not answered for 30 s")
        thread.join(PATIENCE)

    with pytest.raises(SimulationError, match="has not answered"):
        run(server, monkeypatch, end)
    assert server.ended.wait(PATIENCE)


def test_a_connection_that_never_comes_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    monkeypatch.setattr(ray_backend, "_prepare", lambda *_: given_up.wait(PATIENCE))
    monkeypatch.setattr(ray_backend, "_CONNECT_SECONDS", 0.1)
    app = ClientApp(client_fn=lambda context: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(SimulationError, match=r"ray-address=host:1: no Ray answered within 0\.1 s"):
            ray_backend.run_ray(app, Experiment(device="cpu", ray_address="host:1"), server)
    finally:
        given_up.set()
        # Its thread goes on for a moment, and still counts as this process's use of Ray.
        wait_for(lambda: not ray_backend._Simulation.uses_ray, "the end of the simulation's thread")
    assert not server.runs.is_set()


def test_a_ray_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(ray, "init", init)
    app = ClientApp(client_fn=lambda context: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(SimulationError, match=r"Ray did not start: no space left.*backend="):
        ray_backend.run_ray(app, EXPERIMENT, Server())


def test_a_ray_that_the_caller_uses_is_not_shut_down(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("it was shut down"))
    app = ClientApp(client_fn=lambda context: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"Ray is in use in this process.*ray\.shutdown\(\)"):
        ray_backend.run_ray(app, EXPERIMENT, server)
