"""A client whose replies are corrupted by an attack."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_kd.client.numpy_client import NumPyClient
from flwr_kd.experiments.attacks.attack import Attack
from flwr_kd.experiments.attacks.texts import parse_attack
from flwr_kd.experiments.errors import AttackError
from flwr_kd.seeding import numpy_generator
from flwr_kd.text import first_line
from flwr_kd.transport import flower_records

__all__ = ["ATTACKER", "MaliciousClient", "attacking", "generator"]

NDArray = npt.NDArray[Any]
Scalar = bool | int | float | str | bytes
ATTACKER = "attacker"
"""Metric by which an attacker that colludes shows its replies to the :class:`AttackedGrid`, which takes it out."""


class MaliciousClient(NumPyClient):
    """An honest client whose replies are corrupted.

    Random draws come from (seed, "attack", round, partition, phase), where seed, round and phase are in the
    server's config. The honest client's training set must be the one that :meth:`Attack.poison` returned. An attack
    that colludes needs an :class:`~flwr_kd.experiments.attacks.AttackedGrid` at the server; without one, the
    replies are honest. What an attack raises is raised as an :class:`~flwr_kd.experiments.errors.AttackError`.

    Parameters
    ----------
    client : NumPyClient
        A client of any method, or a user's own.
    attack : Attack or str
        See :func:`parse_attack`.
    partition : int
        The attacker's partition id.

    Raises
    ------
    ConfigError
        If the attack is not known.
    """

    def __init__(self, client: NumPyClient, attack: Attack | str, *, partition: int = 0) -> None:
        self.client = client
        self.attack = attack if isinstance(attack, Attack) else parse_attack(attack)
        self.partition = partition

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Reply to the handshake as the honest client does, but for the number of samples."""
        properties = self.client.get_properties(config)
        if "num-examples" in properties:
            with attacking():
                claimed = self.attack.claimed(int(properties["num-examples"]))
            properties = {**properties, "num-examples": claimed}
        return properties

    def get_parameters(self, config: dict[str, Scalar]) -> list[NDArray]:
        """Return the honest client's parameters."""
        return self.client.get_parameters(config)

    def fit(
        self, parameters: list[NDArray], config: dict[str, Scalar]
    ) -> tuple[list[NDArray], int, dict[str, Scalar]]:
        """Return the honest client's reply, of any phase, with corrupted models and payload."""
        # A client may train in the arrays it was given.
        received = [array.copy() for array in parameters]
        arrays, num_examples, metrics = self.client.fit(parameters, config)
        with attacking():
            claimed = self.attack.claimed(num_examples)
            if self.attack.colludes:
                return arrays, claimed, {**metrics, ATTACKER: self.partition}
            names = json.loads(str(config.get(flower_records.NAMES, "[]")))
            arrays = self.attack.models(arrays, received, names, generator(config, self.partition))
            payload = metrics.get(flower_records.PAYLOAD)
            if isinstance(payload, bytes):
                metrics = {**metrics, flower_records.PAYLOAD: self.attack.knowledge(payload, num_examples)}
        return arrays, claimed, metrics

    def evaluate(
        self, parameters: list[NDArray], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate as the honest client does."""
        return self.client.evaluate(parameters, config)


@contextmanager
def attacking() -> Iterator[None]:
    """Raise what an attack raises as an :class:`AttackError`, which a grid tells from a client's own errors."""
    try:
        yield
    except Exception as error:
        raise AttackError(f"the attack failed: {first_line(error)}") from error


def generator(config: Mapping[str, Any], partition: int) -> np.random.Generator:
    """Return an attacker's random numbers, from (seed, "attack", round, partition, phase)."""
    phase, server_round = config.get(flower_records.PHASE, "train"), config.get(flower_records.ROUND, 1)
    seed = int(config.get(flower_records.SEED, 0))
    return numpy_generator(seed, "attack", int(server_round), partition, str(phase))
