"""Flower's Ray simulation.

All use of Flower's deprecated ``run_simulation`` is in this module: nothing else in Flower returns the strategy's
result to the caller.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning.device import one_thread, resolve_device
from flwr_kd.transport.node_threads import ask_to_end
from flwr_kd.wording import option

__all__ = ["run_ray"]

_RESTARTS = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's options of an actor, which Flower takes among the resources of a client.

Flower keeps a dead actor in its pool and loses every message that it gives to it, in all later rounds. With these
options Ray restarts the actor, and the retry makes messages wait for the restart. In return, a message whose client
killed the actor is delivered once more.
"""
_FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
_STOP_SECONDS, _KILL_SECONDS = 4.0, 1.0
_LOOK_SECONDS = 0.2
_LONGEST_SESSION_FOLDER = 40
"""Characters: paths of Ray's sockets are up to 65 characters longer, and a system allows 107, or 104."""
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)}
"""For glibc in Ray's workers, unless the user has set them: keep what is freed, up to 64 MiB.

By default it returns the memory of each layer's output to the system and requests it again in the next step. In a
worker, where each message builds a model, that takes 5 % of a CNN's training.
"""


def run_ray(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    """Run a server against clients in Ray's workers.

    Ray and Flower work in another thread, so that an interrupt can end this one at any time: it ends the server and
    with it the simulation, and waits for that some seconds.

    Raises
    ------
    ConfigError
        If Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"backend ray needs Ray: pip install 'flwr-kd[simulation]', or {option('backend', 'processes')}"
        ) from None
    if ray.is_initialized():
        # Ray of an earlier run would keep that run's number of workers.
        ray.shutdown()
    simulation = _Simulation(app, experiment, serve)
    with _environment(**{**_ALLOCATOR, **os.environ, **_FOR_RAY}), _quiet_loggers():
        simulation.run()


class _Simulation:
    """Flower's simulation in a thread of its own."""

    def __init__(self, app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
        self._app, self._experiment, self._serve = app, experiment, serve
        self._error: BaseException | None = None
        self._server_thread: int | None = None
        self._stopping, self._ended = threading.Event(), threading.Event()

    def run(self) -> None:
        """Run the simulation, and raise what it raised."""
        before = _ray_processes()
        # Ray's own processes end with the thread that has started them, if not before.
        threading.Thread(target=self._simulate, daemon=True, name="flwr-kd-simulation").start()
        try:
            # Not Thread.join(): interrupted, it may take a thread that runs for one that has ended.
            while not self._ended.wait(_LOOK_SECONDS):
                _keep_signal_handlers()
        except BaseException:
            with _silent_flower():
                running = _is_running()
                self._stop()
                # A start of Ray cannot be broken off, and has nothing to end in order.
                if not self._ended.wait(_STOP_SECONDS if running else 0.5):
                    for process in set(_ray_processes()) - set(before):
                        with suppress(OSError):
                            os.kill(process, signal.SIGKILL)
                    self._ended.wait(_KILL_SECONDS)
            raise
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        self._stopping.set()
        if self._server_thread is not None:
            ask_to_end(self._server_thread)

    def _simulate(self) -> None:
        import ray
        from flwr.simulation import run_simulation

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
                _end_workers()

        try:
            with _session_folder() as folder, _own_process_groups():
                try:
                    run_simulation(
                        server_app=server,
                        client_app=self._app,
                        num_supernodes=self._experiment.clients,
                        backend_config=_backend(self._experiment, folder),
                    )
                finally:
                    ray.shutdown()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def _backend(experiment: Experiment, session_folder: str) -> dict[str, Any]:
    """Return Flower's options of a simulation."""
    gpus = 0.0
    if resolve_device(experiment.device).type == "cuda":
        gpus = torch.cuda.device_count() / experiment.workers
    options = {
        "num_cpus": experiment.workers,
        "include_dashboard": False,
        "log_to_driver": False,
        "_temp_dir": session_folder,
    }
    return {"client_resources": {"num_cpus": 1, "num_gpus": gpus, **_RESTARTS}, "init_args": options}


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start Ray's processes outside of this one's process group, to which a terminal sends its signals.

    If Ray's node ends, its driver ends at once, in C++, and could neither end in order nor keep anything. On other
    systems than Linux Ray needs its processes in the group to end them.
    """
    services: Any = import_module("ray._private.services")
    start = getattr(services, "ConsolePopen", None)
    if start is None or not sys.platform.startswith("linux"):
        yield
        return
    services.ConsolePopen = functools.partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start


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


def _end_workers() -> None:
    """End Ray's workers for good, before Flower ends them.

    Flower's own way ends in an error by design, and is repeated for a worker that was restarted: Ray would print
    these errors. Ray has no public way to end actors without a handle to them; if this one fails, they are printed.
    """
    with suppress(Exception):
        import ray
        from ray._private import state, worker

        for actor_id in state.actors() if ray.is_initialized() else ():
            core: Any = worker.global_worker.core_worker  # type: ignore[attr-defined]
            core.kill_actor(ray.ActorID.from_hex(actor_id), True)


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
