"""Flower's Ray simulation.

All use of Flower's deprecated ``run_simulation`` is in this module: nothing else in Flower returns the strategy's
result to the caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning.device import one_thread, resolve_device
from flwr_kd.wording import option

__all__ = ["run_ray"]

_RESTARTS = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's options of an actor, which Flower takes among the resources of a client.

Flower keeps a dead actor in its pool and loses every message that it gives to it, in all later rounds. With these
options Ray restarts the actor, and the retry makes messages wait for the restart. In return, a message whose client
killed the actor is delivered once more.
"""
_FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)}
"""For glibc in Ray's workers, unless the user has set them: keep what is freed, up to 64 MiB.

By default it returns the memory of each layer's output to the system and requests it again in the next step. In a
worker, where each message builds a model, that takes 5 % of a CNN's training.
"""


def run_ray(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    """Run a server against clients in Ray's workers.

    Raises
    ------
    ConfigError
        If Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"backend ray needs Ray: pip install 'flwr-kd[simulation]', or {option('backend', 'inline')}"
        ) from None
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        # Ray's workers also have one thread: both backends give the same numbers to the last bit.
        try:
            with one_thread():
                serve(grid)
        finally:
            _end_workers()

    gpus = (
        torch.cuda.device_count() / experiment.workers
        if resolve_device(experiment.device).type == "cuda"
        else 0.0
    )
    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": gpus, **_RESTARTS},
        "init_args": {"num_cpus": experiment.workers, "include_dashboard": False, "log_to_driver": False},
    }
    if ray.is_initialized():
        # Ray of an earlier run would keep that run's number of workers.
        ray.shutdown()
    with _environment(**{**_ALLOCATOR, **os.environ, **_FOR_RAY}), _quiet_flower():
        try:
            run_simulation(
                server_app=server,
                client_app=app,
                num_supernodes=experiment.clients,
                backend_config=backend,
            )
        finally:
            ray.shutdown()


def _end_workers() -> None:
    """End Ray's workers for good, before Flower ends them.

    Flower's own way ends in an error by design, and is repeated for a worker that was restarted: Ray would print
    these errors. Ray has no public way to end actors without a handle to them; if this one fails, they are printed.
    """
    with suppress(Exception):
        import ray
        from ray._private import state, worker

        for actor_id in state.actors():
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


class _NoDeprecation(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "DEPRECATED" not in record.getMessage()


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Suppress the notice that ``run_simulation`` is deprecated, on which the user cannot act."""
    logger, notice = logging.getLogger("flwr"), _NoDeprecation()
    logger.addFilter(notice)
    try:
        yield
    finally:
        logger.removeFilter(notice)
