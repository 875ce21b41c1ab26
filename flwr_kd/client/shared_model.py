"""The client half of methods that exchange no weights, whose models a server may average to measure the mean."""

from __future__ import annotations

from typing import Any

from flwr_kd.checks import ConfigError, checked
from flwr_kd.client.client import KDClient
from flwr_kd.client.noise import in_simulation
from flwr_kd.client.task import Answer, Task
from flwr_kd.config import ConfigT

__all__ = ["SharedModelClient"]

_KEY = "share-model"


class SharedModelClient(KDClient[ConfigT]):
    """Sends its personal model where ``global-model=average`` asks for it, and its owner allows it.

    Parameters
    ----------
    *args, **options
        See :class:`flwr_kd.KDClient`.
    shares_model : bool, optional
        Whether the model may leave the client, which it does not in the method itself. The server chooses the
        hyper-parameters, so that the client's owner has to allow it. If None, the node config's ``share-model``
        decides, and without that key the model is shared in a simulation only.

    Raises
    ------
    ConfigError
        If ``share-model`` in the node config is not true or false.
    """

    def __init__(self, *args: Any, shares_model: bool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        allowed = checked(_KEY, self.context.node_config.get(_KEY, in_simulation()), bool, {})
        self.shares_model = bool(allowed) if shares_model is None else shares_model

    def phase_model(self, task: Task[ConfigT]) -> Answer:
        """Return the model of this round, for the mean that the server measures.

        Raises
        ------
        ConfigError
            If its owner does not allow it.
        StateError
            If there is no model of this round's training.
        """
        if not self.shares_model:
            raise ConfigError(
                "global-model=average asks for this client's model, which its owner did not allow: set "
                "share-model=true in its node config (in Python: shares_model=True), or global-model=none"
            )
        self.load_trained()
        return Answer(arrays=self.arrays(task.names), num_examples=len(self.train_batches))
