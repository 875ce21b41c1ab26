"""What a client is asked in one phase, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
import torch

from flwr_kd.config import ConfigT
from flwr_kd.seeding import torch_generator
from flwr_kd.transport.payload import MAX_PAYLOAD_BYTES, Payload

__all__ = ["Answer", "Measured", "Task"]

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
        Of this client, phase and round; :meth:`generator` derives private generators from it.
    names : tuple of str
        Names of the model's arrays, in the server's order.
    arrays : list of ndarray
        What the server sent; empty where it sends none.
    payload : bytes or None
        Knowledge, still encoded.
    config : MethodConfig
        The method's hyper-parameters.
    max_payload_bytes : int
        Largest payload.
    extra : mapping
        The message's whole config; what a strategy put into :attr:`~flwr_kd.Outgoing.config` is there.
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

    def generator(self, purpose: str) -> torch.Generator:
        """Return a private generator for one purpose in this phase."""
        return torch_generator(self.seed, purpose)

    def read(self, kind: type[P], **dims: int) -> P | None:
        """Decode the payload as a message of a kind; None where none was sent.

        Raises
        ------
        PayloadError
            If it is anything else.
        """
        if self.payload is None:
            return None
        return kind.from_bytes(self.payload, dims=dims, max_bytes=self.max_payload_bytes)


class Measured(NamedTuple):
    """What a model reaches on test data: mean cross-entropy, accuracy, and top-5 where there are more classes."""

    loss: float
    accuracy: float
    top5: float | None


@dataclass
class Answer:
    """What a client sends back after one phase."""

    arrays: list[NDArray] = field(default_factory=list)
    payload: Payload | None = None
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
