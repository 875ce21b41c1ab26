"""Which backend an experiment runs with."""

from __future__ import annotations

import importlib.util

from flwr_kd.experiments.options import ExperimentOptions
from flwr_kd.learning.device import resolve_device

__all__ = ["chosen_backend"]


def chosen_backend(options: ExperimentOptions) -> str:
    """Return the name of the backend that an experiment runs with: the one that ``auto`` stands for.

    Ray, if it is installed, where several workers share GPUs by fractions or a Ray cluster is named; otherwise
    processes, or this process for one worker. The numbers are the same with all of them.

    >>> [chosen_backend(ExperimentOptions(device="cpu", workers=n)) for n in (1, 2)]
    ['inline', 'processes']
    >>> chosen_backend(ExperimentOptions(backend="ray", workers=1))
    'ray'
    """
    if options.backend != "auto":
        return options.backend
    if options.ray_address is not None:
        return "ray"
    if min(options.workers, options.clients) == 1:
        return "inline"
    shares_gpus = resolve_device(options.device).type == "cuda"
    return "ray" if shares_gpus and importlib.util.find_spec("ray") is not None else "processes"
