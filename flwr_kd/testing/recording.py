"""Recorded rounds: what each phase of a method sent and received, so that the checks can change one reply of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.registry import Method
from flwr_kd.rules import Rules
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing import inside
from flwr_kd.testing.federation import Federation, quiet, small_model
from flwr_kd.testing.hostile_values import fresh
from flwr_kd.text import unknown_name
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid

__all__ = ["CLIENTS", "HOSTILE", "Case", "Recording", "Scene", "cases", "foreign_replies", "recorded"]

CLIENTS, HOSTILE = 4, 1
"""Number of clients, and the position of the one whose replies are changed."""


@dataclass(frozen=True)
class Case:
    """A method, or one of its variants with further hyper-parameters or another model.

    Attributes
    ----------
    method_name : str
        The method.
    variant : str
        A name in the method's ``variants``; empty for the method itself.
    aggregation, knowledge : str
        The rules by which the strategy averages models, and what clients know.
    message_api : bool
        Whether the clients are those of Flower's Message API.
    """

    method_name: str
    variant: str = ""
    aggregation: str = "mean"
    knowledge: str = "mean"
    message_api: bool = False

    def __str__(self) -> str:
        name = f"{self.method_name}, {self.variant}" if self.variant else self.method_name
        name = name if self.aggregation == "mean" else f"{name}, by {self.aggregation}"
        name = name if self.knowledge == "mean" else f"{name}, knowledge by {self.knowledge}"
        return f"{name}, by messages" if self.message_api else name

    @property
    def method(self) -> Method:
        """The method's entry in the registry."""
        return registry.get(self.method_name)

    @property
    def settings(self) -> tuple[str, ...]:
        """Hyper-parameters as ``name=value``."""
        own = self.method.variants[self.variant].settings if self.variant else ()
        return (*self.method.quick, *own)

    @property
    def model(self) -> str:
        """The clients' model."""
        return self.method.variants[self.variant].model if self.variant else "mlp"

    @property
    def rules(self) -> Rules | None:
        """The rules of the method's payloads, if its clients send any."""
        return self.method.rules

    def federation(self, clients: int = CLIENTS) -> Federation:
        """Return the clients."""
        federation = Federation(self.method_name, clients)
        federation.models = [self.model] * clients
        federation.aggregation, federation.knowledge_aggregation = self.aggregation, self.knowledge
        federation.message_api = range(clients) if self.message_api else ()
        return federation

    def initial(self) -> ArrayRecord:
        """Return the initial global arrays."""
        return ArrayRecord(small_model(self.model).state_dict())

    def strategy(self, federation: Federation) -> KDStrategy[Any, Any]:
        """Return the strategy for these clients."""
        options: dict[str, Any] = {}
        takes_model = self.method.server_model or self.method.public_at in ("server", "synthetic")
        if self.model != "mlp" and takes_model and not self.method.heterogeneous:
            model: torch.nn.Module = small_model(self.model)
            options = {"model": model}
        return federation.strategy(*self.settings, **options)


def cases(method: str, *, variants: bool = True) -> list[Case]:
    """Return a method's cases: itself and its variants.

    >>> [str(case) for case in cases("fedavg")]
    ['fedavg', 'fedavg, batch norm']

    Raises
    ------
    ConfigError
        If there is no such method.
    """
    names = registry.get(method).variants if variants else ()
    return [Case(method), *(Case(method, name) for name in names)]


def case_of(name: str) -> Case:
    """Return a case by its text, ``method`` or ``method, variant``.

    Raises
    ------
    ConfigError
        If there is no such method, or it has no such variant.
    """
    method, _, variant = name.partition(", ")
    known = registry.get(method).variants
    if variant and variant not in known:
        raise ConfigError(unknown_name(f"variant of {method}", variant, known))
    return Case(method, variant)


@dataclass(frozen=True)
class Scene:
    """A phase of a round, as the strategy stood when its replies arrived."""

    phase: str
    server_round: int
    strategy: KDStrategy[Any, Any]
    messages: list[Message]
    answers: list[RecordDict]
    arrays: ArrayRecord | None


@dataclass(frozen=True)
class Recording:
    """Two rounds of a case: all their phases, and the replies to the handshakes by node."""

    initial: ArrayRecord
    scenes: dict[tuple[int, str], Scene]
    handshakes: dict[int, dict[str, Any]]
    federation: Federation


@functools.cache
def recorded(case: Case) -> Recording:
    """Run two rounds of a case, and keep what was sent and received.

    A phase ``X-again`` takes the place of clients that failed in phase ``X``: one of them fails here, so that it is
    recorded as well.
    """
    federation, initial = case.federation(), case.initial()
    scenes: dict[tuple[int, str], Scene] = {}

    def note(
        strategy: KDStrategy[Any, Any],
        phase: str,
        server_round: int,
        arrived: list[tuple[Message, Any]],
        arrays: ArrayRecord | None,
    ) -> None:
        if arrived:
            messages = [message for message, _ in arrived]
            answers = [fresh(answer.content) for _, answer in arrived]
            kept = copy.deepcopy(strategy)
            scenes[server_round, phase] = Scene(phase, server_round, kept, messages, answers, arrays)
        if f"{phase}-again" in strategy.phases:
            arrived[0] = (arrived[0][0], None)

    with quiet(), inside.noting_phases(note):
        strategy = case.strategy(federation)
        grid = InlineGrid(federation.app(), CLIENTS)
        strategy.start(grid, initial, num_rounds=2)
        missing = set(strategy.phases) - {phase for _, phase in scenes}
        if missing:
            raise RuntimeError(f"{case}: in two rounds nothing arrived in phase {', '.join(sorted(missing))}")
        handshakes = {}
        for node in grid.get_node_ids():
            config = {**strategy.config.to_wire(), flower_records.SEED: strategy.seed}
            (message_id,) = grid.push_messages([flower_records.properties_message(node, config=config)])
            (answer,) = grid.pull_messages([message_id])
            handshakes[node] = flower_records.read_properties(answer)
    return Recording(initial, scenes, handshakes, federation)


@functools.cache
def _one_method_per_kind_of_reply() -> tuple[str, ...]:
    """Return the methods of this library that differ in their phases or in the payloads of their replies."""
    kinds: dict[Any, str] = {}
    for name, method in registry.methods().items():
        if method.strategy_path.startswith("flwr_kd."):
            payloads = tuple(kind.schema for kind in method.strategy.reply_payloads.values())
            kinds.setdefault((method.strategy.phases, payloads), name)
    return tuple(kinds.values())


def foreign_replies(case: Case) -> list[RecordDict]:
    """Return replies of this and other methods, phases and rounds, with each kind of payload."""
    others: Mapping[Case, None] = dict.fromkeys(
        [case, *(Case(name, message_api=case.message_api) for name in _one_method_per_kind_of_reply())]
    )
    return [scene.answers[0] for each in others for scene in recorded(each).scenes.values()]
