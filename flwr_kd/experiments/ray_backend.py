"""Flower's Ray simulation.

All use of Flower's deprecated ``run_simulation`` is in this module: nothing else in Flower returns the strategy's
result to the caller.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning.allocator import SETTINGS
from flwr_kd.learning.device import one_thread, resolve_device
from flwr_kd.text import first_line
from flwr_kd.transport.node_threads import ask_to_end
from flwr_kd.wording import option

if TYPE_CHECKING:
    from flwr_kd.experiments.ray_pool import Room, Watch

__all__ = ["run_ray"]

_RESTARTS = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's options of an actor, which Flower takes among the resources of a client.

Flower keeps a dead actor in its pool and loses every message that it gives to it, in all later rounds. With these
options Ray restarts the actor, and the retry makes messages wait for the restart. In return, a message whose client
killed the actor is delivered once more.
"""
_FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
_ALLOCATOR = {name: str(number) for name, number in SETTINGS.items()}
"""For Ray's workers, unless the user has set them; from the start of the process, before it imports PyTorch."""
_STOP_SECONDS, _KILL_SECONDS = 4.0, 1.0
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 60.0
_FOR_CLUSTER = (*_ALLOCATOR, *_FOR_RAY, "CUBLAS_WORKSPACE_CONFIG")
"""Variables of this process that workers on a cluster have as well. Ray's workers on this machine have them all."""
_LONGEST_SESSION_FOLDER = 40
"""Characters: paths of Ray's sockets are up to 65 characters longer, and a system allows 107, or 104."""


def run_ray(
    app: ClientApp,
    experiment: Experiment,
    serve: Callable[[Grid], None],
    *,
    method: str | None = None,
    state_dir: str | None = None,
) -> None:
    """Run a server against clients in Ray's workers.

    Ray and Flower work in another thread, so that an interrupt can end this one at any time: it ends the server and
    with it the simulation, and waits for that some seconds. Likewise the server ends when Ray does.

    Parameters
    ----------
    app : ClientApp
        Ray sends it to the workers.
    experiment : Experiment
        With ``ray_address`` it runs on that cluster, which goes on after it. Otherwise Ray is started for this run,
        whatever else of Ray's runs on the machine.
    serve : callable
        Runs the server.
    method : str, optional
        A name of the registry, whose data is checked on each node of a cluster; nothing is checked if None.
    state_dir : str, optional
        The clients' folder for personal models, which is checked as well.

    Raises
    ------
    ConfigError
        If Ray is not installed or in use in this process, or the cluster lacks what the run needs.
    SimulationError
        If Ray does not start, or ends before the server.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"backend ray needs Ray: pip install 'flwr-kd[simulation]', or {option('backend', 'processes')}"
        ) from None
    if ray.is_initialized():
        if not _Simulation.uses_ray:
            raise ConfigError(
                "Ray is in use in this process, and a run needs a connection of its own: call ray.shutdown() "
                f"before, and for a run on a running cluster set {option('ray_address', 'HOST:PORT')}"
            )
        # It is left from a run that was interrupted, and could not end in order.
        ray.shutdown()
    simulation = _Simulation(
        app, experiment, serve, functools.partial(_prepare, experiment, method, state_dir)
    )
    with _environment(**{**_ALLOCATOR, **os.environ, **_FOR_RAY}), _quiet_loggers():
        simulation.run()


class _Simulation:
    """Flower's simulation in a thread of its own."""

    uses_ray = False
    """Whether this process's connection to Ray, if any, is a simulation's."""

    def __init__(
        self,
        app: ClientApp,
        experiment: Experiment,
        serve: Callable[[Grid], None],
        prepare: Callable[[str], None],
    ) -> None:
        self._app, self._experiment, self._serve, self._prepare = app, experiment, serve, prepare
        self._error: BaseException | None = None
        self._server_thread: int | None = None
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._room: Room | None = None
        self._watch: Watch | None = None
        self._folder: str | None = None
        self._begun = time.monotonic()

    def run(self) -> None:
        """Run the simulation, and raise what it raised."""
        before = _ray_processes()
        try:
            with self._watching_threads():
                # Ray's own processes end with the thread that has started them, if not before.
                threading.Thread(target=self._simulate, daemon=True, name="flwr-kd-simulation").start()
                # Not Thread.join(): interrupted, it may take a thread that runs for one that has ended.
                while not self._ended.wait(_LOOK_SECONDS):
                    _keep_signal_handlers()
                    self._check()
        except BaseException:
            with _silent_flower():
                running = _is_running()
                self._stop()
                # A start of Ray cannot be broken off, and has nothing to end in order.
                if not self._ended.wait(_STOP_SECONDS if running else 0.5):
                    self._kill(before)
                self._remove_folder()
            raise
        if self._error is not None:
            raise self._error

    def _check(self) -> None:
        """Raise SimulationError if the simulation no longer works, or cannot begin."""
        if self._error is not None:
            # Also while the simulation's thread still ends.
            raise self._error
        if self._watch is not None:
            self._watch.check()
        address, seconds = self._experiment.ray_address, time.monotonic() - self._begun
        if address is not None and seconds > _CONNECT_SECONDS and self._room is None and not _is_running():
            raise SimulationError(
                f"ray-address={address}: no Ray answered within {_CONNECT_SECONDS:g} s. HOST:PORT is what "
                "`ray start --head` printed, and this machine must be a node of the cluster"
            )

    def _stop(self) -> None:
        self._stopping.set()
        if self._room is not None:
            # In a thread: Ray may not answer.
            threading.Thread(target=self._room.close, daemon=True, name="flwr-kd-ray-end").start()
        self._end_server()

    def _end_server(self) -> None:
        """End the server's thread. Code that it calls may catch what ends it, so it is asked again."""
        self._stopping.set()
        end = time.monotonic() + _STOP_SECONDS
        while (thread := self._server_thread) is not None and time.monotonic() < end:
            ask_to_end(thread)
            time.sleep(_LOOK_SECONDS)

    def _kill(self, before: list[int]) -> None:
        """End the processes of Ray that this simulation has started; on a cluster there are none."""
        if self._experiment.ray_address is not None:
            return
        for process in set(_ray_processes()) - set(before):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self._ended.wait(_KILL_SECONDS)

    def _remove_folder(self) -> None:
        """Remove the session's folder, where the simulation's thread has not, or while Ray still wrote to it."""
        end = time.monotonic() + _STOP_SECONDS
        while (folder := self._folder) is not None and os.path.exists(folder) and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(_LOOK_SECONDS)

    def _simulate(self) -> None:
        import ray

        try:
            with _session_folder() as folder, _own_process_groups():
                self._folder = folder
                try:
                    _Simulation.uses_ray = True
                    self._prepare(folder)
                    if not self._stopping.is_set():
                        self._simulate_on_ray()
                finally:
                    ray.shutdown()
                    _Simulation.uses_ray = False
        except BaseException as error:
            self._error = error
        finally:
            # Flower does not end a server whose simulation has failed.
            self._end_server()
            self._ended.set()

    def _simulate_on_ray(self) -> None:
        from flwr.simulation import run_simulation

        from flwr_kd.experiments.ray_pool import Room, Watch

        gpus = _gpus(self._experiment)
        self._room = room = Room(self._experiment.workers, gpus)
        try:
            room.wait(self._stopping)
            if self._stopping.is_set():
                return
            self._watch = Watch(room)
            with room.given_to_flower():
                run_simulation(
                    server_app=self._server(),
                    client_app=self._app,
                    num_supernodes=self._experiment.clients,
                    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus, **_RESTARTS}},
                )
            if self._server_thread is not None and not self._stopping.is_set():
                raise SimulationError("Flower's simulation on Ray has ended before the server")
        except RuntimeError as error:
            if isinstance(error, SimulationError):
                raise
            raise SimulationError(f"Flower's simulation on Ray has ended: {_first_cause(error)}") from error
        finally:
            room.close()

    def _server(self) -> ServerApp:
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            self._server_thread = threading.get_ident()
            # Ray's workers also have one thread: both backends give the same numbers to the last bit.
            try:
                with one_thread():
                    if not self._stopping.is_set():
                        self._serve(grid)
            except SystemExit:
                if not self._stopping.is_set():
                    raise
            finally:
                self._server_thread = None
                if self._room is not None:
                    self._room.close()

        return server

    @contextmanager
    def _watching_threads(self) -> Iterator[None]:
        """End the simulation when one of the threads has failed by which Flower carries messages.

        Flower does not notice it, and the server would wait for its timeout.
        """
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            frames = [frame for frame, _ in traceback.walk_tb(args.exc_traceback)]
            if any("flwr.server.superlink.fleet" in frame.f_globals.get("__name__", "") for frame in frames):
                self._error = SimulationError(f"Flower's simulation on Ray has ended: {args.exc_value!r}")
            before(args)

        threading.excepthook = hook
        try:
            yield
        finally:
            threading.excepthook = before


def _prepare(experiment: Experiment, method: str | None, state_dir: str | None, session_folder: str) -> None:
    """Start Ray, or connect to a cluster and check its nodes."""
    import ray

    from flwr_kd.experiments import ray_cluster

    if experiment.ray_address is not None:
        variables = {name: os.environ[name] for name in _FOR_CLUSTER if name in os.environ}
        ray_cluster.connect(experiment.ray_address, experiment.workers, variables)
        if method is not None:
            ray_cluster.check_nodes(method, experiment, state_dir)
        return
    # Ray's processes inherit the environment, but not what this one has added to its path.
    os.environ["PYTHONPATH"] = path = os.pathsep.join(
        filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")])
    )
    try:
        ray.init(
            "local",
            num_cpus=experiment.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            _temp_dir=session_folder,
        )
    except Exception as error:
        raise SimulationError(
            f"Ray did not start: {first_line(error)}. Without Ray: {option('backend', 'inline')}"
        ) from error


def _gpus(experiment: Experiment) -> float:
    """Return the part of a GPU for each worker. On a cluster the nodes' GPUs count, not this machine's."""
    import ray

    from flwr_kd.experiments.ray_pool import gpu_share

    device = experiment.device
    if experiment.ray_address is None or device != "auto":
        device = resolve_device(device).type
    if device not in ("cuda", "auto"):
        return 0.0
    return gpu_share(experiment.workers, int(ray.cluster_resources().get("GPU", 0)))  # type: ignore[no-untyped-call]


def _first_cause(error: BaseException) -> str:
    while (cause := error.__cause__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start Ray's processes outside of this one's process group, to which a terminal sends its signals.

    If Ray's node ends, its driver ends at once, in C++, and could neither end in order nor keep anything. On other
    systems than Linux Ray needs its processes in the group to end them.
    """
    from flwr_kd.experiments.ray_pool import replaced

    services: Any = import_module("ray._private.services")
    start = getattr(services, "ConsolePopen", None)
    if start is None or not sys.platform.startswith("linux"):
        yield
        return
    with replaced(services, "ConsolePopen", functools.partial(start, process_group=0)):
        yield


@contextmanager
def _session_folder() -> Iterator[str]:
    """Make a folder for Ray's session, and remove it in the end: Ray's own, ``ray`` beside it, would stay."""
    with ExitStack() as folders:
        for parent in (None, "/tmp"):
            folder = folders.enter_context(
                tempfile.TemporaryDirectory(prefix="flwr-kd-ray-", dir=parent, ignore_cleanup_errors=True)
            )
            if len(folder) <= _LONGEST_SESSION_FOLDER:
                break
        yield folder


def _keep_signal_handlers() -> None:
    """Put this process's handlers of signals back: in the driver Ray sets some that print addresses, and abort."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Python does not notice what other code sets, and returns its own.
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _is_running() -> bool:
    import ray

    return bool(ray.is_initialized())


def _ray_processes() -> list[int]:
    """Return the ids of Ray's processes that this process has started; none where that cannot be read."""
    with suppress(Exception):
        psutil: Any = import_module("psutil")  # comes with Ray
        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if "ray" in " ".join(child.cmdline())]
    return []


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for Ray's workers; afterwards restore the environment, also where Flower changed it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Without(logging.Filter):
    """Drops the records whose message contains a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()


@contextmanager
def _without(name: str, text: str) -> Iterator[None]:
    """Drop the records of a logger whose message contains a text."""
    logger, without = logging.getLogger(name), _Without(text)
    logger.addFilter(without)
    try:
        yield
    finally:
        logger.removeFilter(without)


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Suppress notices on which the user cannot act: a deprecated function, a signal handler that is not set."""
    with _without("flwr", "DEPRECATED"), _without("ray._private.worker", "SIGTERM handler is not set"):
        yield


@contextmanager
def _silent_flower() -> Iterator[None]:
    """Suppress Flower's report of all that fails when a simulation is broken off."""
    with _without("flwr", ""):
        yield
