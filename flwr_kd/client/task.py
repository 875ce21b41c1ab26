"""What a client is asked to do in one phase, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy.typing as npt
import torch

from flwr_kd.config import ConfigT
from flwr_kd.learning.scores import Measured
from flwr_kd.seeding import derive_seed, torch_generator
from flwr_kd.transport import flower_records as records
from flwr_kd.transport.payload import MAX_PAYLOAD_BYTES, Payload

__all__ = ["Answer", "Task", "metrics_of"]

NDArray = npt.NDArray[Any]
P = TypeVar("P", bound=Payload)


@dataclass(frozen=True)
class Task(Generic[ConfigT]):
    """What the server asks of a client in one phase.

    Attributes
    ----------
    server_round : int
        From 1.
    phase : str
        Name of the phase.
    seed : int
        Seed of this client, phase and round; :meth:`generator` derives private generators from it.
    names : tuple of str
        Names of the model's arrays, in the server's order.
    arrays : list of ndarray
        The arrays that the server sent; empty if none.
    payload : bytes or None
        Knowledge, still encoded.
    config : MethodConfig
        The method's hyper-parameters.
    max_payload_bytes : int
        Largest payload.
    extra : mapping
        The message's whole config, with what a strategy put into ``config`` of :class:`~flwr_kd.Outgoing`.
    client_seed : int
        Seed of this client in the whole run, for what is drawn once.
    """

    server_round: int
    phase: str
    seed: int
    names: tuple[str, ...]
    arrays: list[NDArray]
    payload: bytes | None
    config: ConfigT
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    extra: Mapping[str, Any] = field(default_factory=dict)
    client_seed: int = 0

    @classmethod
    def of_message(
        cls,
        kind: Callable[[Mapping[str, Any]], ConfigT],
        arrays: list[NDArray],
        config: Mapping[str, Any],
        *,
        client: int | str,
    ) -> Self:
        """Return the task that a message's arrays and config ask for.

        Parameters
        ----------
        kind : callable
            Reads the method's hyper-parameters from the config.
        arrays, config
            As Flower hands them to a client.
        client : int or str
            What tells the clients apart when seeds are derived.

        Raises
        ------
        ConfigError
            If a hyper-parameter is not allowed.
        """
        server_round, phase = int(config.get(records.ROUND, 1)), str(config.get(records.PHASE, "train"))
        seed = int(config.get(records.SEED, 0))
        return cls(
            server_round=server_round,
            phase=phase,
            seed=derive_seed(seed, "client", phase, server_round, client),
            names=tuple(json.loads(config.get(records.NAMES, "[]"))),
            arrays=arrays,
            payload=config.get(records.PAYLOAD),
            config=kind(config),
            max_payload_bytes=int(config.get(records.MAX_BYTES, MAX_PAYLOAD_BYTES)),
            extra=config,
            client_seed=derive_seed(seed, "client", client),
        )

    def generator(self, purpose: str) -> torch.Generator:
        """Return a private generator for one purpose in this phase."""
        return torch_generator(self.seed, purpose)

    @property
    def steps_before(self) -> int:
        """Steps of the run before this client's, where the learning rate falls with them; else 0."""
        return int(self.extra.get(records.STEPS, 0))

    def read(self, kind: type[P], **dims: int) -> P | None:
        """Decode the payload as a message of a kind; None if none was sent.

        Raises
        ------
        PayloadError
            If it is anything else.
        """
        if self.payload is None:
            return None
        return kind.from_bytes(self.payload, dims=dims, max_bytes=self.max_payload_bytes)


def metrics_of(**measured: Measured | None) -> dict[str, float]:
    """Return what was measured, as a reply names it; see :meth:`Measured.metrics` for the names of the arguments.

    >>> metrics_of(local=Measured(0.1, 0.75, None), common=None)
    {'local-accuracy': 0.75}
    """
    metrics: dict[str, float] = {}
    for kind, found in measured.items():
        metrics |= {} if found is None else found.metrics(kind)
    return metrics


@dataclass
class Answer:
    """What a client's phase returns; it travels as a message, and becomes the server's ``Reply``.

    Attributes
    ----------
    arrays : list of ndarray
        The model's arrays in the server's order; empty if none are sent.
    payload : Payload or None
        Knowledge.
    num_examples : int
        Samples that the client trained on.
    metrics : dict
        Numbers such as ``train-loss`` and ``local-accuracy``.
    """

    arrays: list[NDArray] = field(default_factory=list)
    payload: Payload | None = None
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
