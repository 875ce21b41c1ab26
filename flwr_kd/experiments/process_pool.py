"""Clients in a pool of processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning.device import one_thread, resolve_device
from flwr_kd.transport.process_grid import ProcessGrid

if TYPE_CHECKING:
    from flwr.client import Client

__all__ = ["BuiltApp", "run_processes"]


class BuiltApp(ClientApp):
    """A ClientApp that can be pickled if its ``client_fn`` can: Flower's own cannot."""

    def __init__(self, client_fn: Callable[[Context], Client]) -> None:
        super().__init__(client_fn=client_fn)
        self._client_fn = client_fn

    def __reduce__(self) -> tuple[Any, ...]:
        return BuiltApp, (self._client_fn,)


def _load_what_training_needs() -> None:
    """Make an optimiser's step here: PyTorch loads for a second then, which each forked process would."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


def run_processes(app: ClientApp, experiment: Experiment, serve: Callable[[Grid], None]) -> None:
    """Run a server against clients in processes: as many as the experiment has workers, with one thread each.

    They are forked, so that they have the data at once, or spawned where a device other than the CPU is in use.

    Raises
    ------
    ConfigError
        If this platform has no processes, or what they need cannot be pickled where they are spawned.
    """
    on_cpu = resolve_device(experiment.device).type == "cpu"
    grid = ProcessGrid(
        app,
        experiment.clients,
        workers=experiment.workers,
        start_method=None if on_cpu else "spawn",
        seed=experiment.seed,
    )
    if on_cpu:
        _load_what_training_needs()
    with closing(grid), one_thread():
        # Before the server: what fails here is not the clients' fault.
        grid.begin()
        serve(grid)
