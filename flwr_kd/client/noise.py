"""Whether a client's noise may come from the run's seed: only in a simulation, or if the client itself says so."""

from __future__ import annotations

import sys

from flwr.app import Context

from flwr_kd.checks import checked
from flwr_kd.transport.local_grid import answers_locally
from flwr_kd.wording import warn_once

__all__ = ["in_simulation", "reproducible_noise"]

_KEY = "reproducible-noise"


def in_simulation() -> bool:
    """Return whether a grid of this package or Flower's simulation engine runs the client, and no SuperNode."""
    if answers_locally():
        return True
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def reproducible_noise(context: Context) -> bool:
    """Return whether an app's client draws its noise from the run's seed, which the server knows.

    The key ``reproducible-noise`` of the run config is the server's wish. It counts in a simulation only, so that
    no server can turn the protection of a SuperNode off. In the node config the key is the client's own will.

    Raises
    ------
    ConfigError
        If a value is not true or false.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> wish = {"reproducible-noise": True}
    >>> reproducible_noise(Context(1, 1, node_config={}, state=RecordDict(), run_config=wish))
    False
    >>> reproducible_noise(Context(1, 1, node_config=wish, state=RecordDict(), run_config={}))
    True
    """
    if checked(_KEY, context.node_config.get(_KEY, False), bool, {}):
        return True
    wanted = bool(checked(_KEY, context.run_config.get(_KEY, False), bool, {}))
    if wanted and not in_simulation():
        warn_once(
            "%s=true in the run config is not followed: the server could subtract the noise. A client that wants "
            "it has %s=true in its node config",
            _KEY,
            _KEY,
        )
        return False
    return wanted
