"""Flower's Ray simulation.

Everything that needs Flower's deprecated ``run_simulation`` is here: it is the only way that gives the strategy's
result back to the caller.
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

__all__ = ["run_ray"]

_RESTARTS = {"max_restarts": -1, "max_task_retries": 1}
"""Ray's options of an actor, which Flower takes among the resources of a client.

Flower keeps a dead actor in its pool, and what is handed to it is lost, in every later round. Ray starts it anew
instead. The retry makes messages wait for that; its price is that a client which has died is asked once more.
"""
_FOR_RAY = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)}
"""For glibc in Ray's workers, unless the user has set them: keep what is freed, up to 64 MiB.

By default it gives the memory of each layer's output back and asks for it anew in the next step. In a worker, where
each message builds a model, that takes 5 % of a CNN's training.
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
            "backend ray needs Ray: pip install 'flwr-kd[simulation]', or --backend inline"
        ) from None
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
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
        # A Ray of an earlier run would keep that run's number of workers.
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
    """End Ray's workers for good, before Flower asks them to.

    What Flower asks ends in an error by design, and a worker that is restarted is asked again: Ray would print that
    into the output. It has no public way to end actors to which one has no handle; where this one fails, it prints.
    """
    with suppress(Exception):
        import ray
        from ray._private import state, worker

        for actor_id in state.actors():
            core: Any = worker.global_worker.core_worker  # type: ignore[attr-defined]
            core.kill_actor(ray.ActorID.from_hex(actor_id), True)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for Ray's workers; what Flower changes in the environment is put back, too."""
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
    """Keep back the notice that ``run_simulation`` is deprecated: the reader cannot act on it."""
    logger, notice = logging.getLogger("flwr"), _NoDeprecation()
    logger.addFilter(notice)
    try:
        yield
    finally:
        logger.removeFilter(notice)
