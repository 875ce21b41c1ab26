"""A toy method, a model, and grids that keep what passes or let nodes come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

from flwr_kd import registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.server.records import Node, Outgoing, Reply
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import WORK_SECONDS
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import Payload, PayloadError, array
from tests.tiers import first_variants

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}


@dataclass(frozen=True, eq=False)
class Note(Payload, schema="test.note", version=1):
    values: np.ndarray = array("int64", "K")
    owner: int = 0


class ToyClient(KDClient):
    """Answers with its partition id; says what it was asked and given."""

    def __init__(self, *args: Any, seen: list[tuple[Any, ...]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen, self.partition = seen, int(self.context.node_config["partition-id"])

    def fit(self, parameters: Any, config: Mapping[str, Any]) -> Any:
        self.seen.append(("config", self.partition, dict(config)))
        return super().fit(parameters, config)

    def phase_ask(self, task: Task) -> Answer:
        self.seen.append((task.server_round, "ask", self.partition, len(task.arrays)))
        return Answer(payload=Note(np.array([self.partition]), self.partition), num_examples=1)

    def phase_tell(self, task: Task) -> Answer:
        note = task.read(Note)
        assert note is not None
        self.seen.append((task.server_round, "tell", self.partition, note.owner, note.values.tolist()))
        return Answer(num_examples=1)

    def phase_close(self, task: Task) -> Answer:
        self.seen.append((task.server_round, "close", self.partition, task.payload))
        return Answer(num_examples=1)


class Toy(KDStrategy):
    """Three phases, no weights: all are asked, even partitions are sent a note of their own."""

    phases = ("ask", "tell", "close")
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"ask": Note}
    sends_weights = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Any, ...]] = []

    def select(self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]) -> list[Node]:
        chosen = super().select(phase, server_round, nodes, answered)
        return [n for n in chosen if (n.partition_id or 0) % 2 == 0] if phase == "tell" else chosen

    def configure_phase(
        self, phase: str, server_round: int, nodes: list[Node], arrays: ArrayRecord | None
    ) -> Iterable[Outgoing]:
        for node in nodes:
            own = node.partition_id or 0
            note = Note(np.arange(own + 1) * 10 * server_round, own) if phase == "tell" else None
            yield Outgoing(node, payload=note, config={"spoken-to": own})

    def check_reply(self, phase: str, reply: Reply) -> None:
        if isinstance(reply.payload, Note) and reply.payload.owner != reply.node.partition_id:
            raise PayloadError(f"a note of {reply.payload.owner}")

    def aggregate_phase(
        self, phase: str, server_round: int, replies: Iterable[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        self.calls.append((server_round, phase, [r.node.partition_id for r in replies]))
        return None


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, width), nn.Linear(width, 4)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.body(x.flatten(1))))
        return out


class Watched(InlineGrid):
    """Keeps what passes, and lets a test decide which nodes are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"work_seconds": WORK_SECONDS, **kwargs})
        self.sent: list[Message] = []
        self.came: list[tuple[Message, int]] = []
        self.absent: set[int] = set()
        self.empty_for = 0

    def partition(self, node_id: int) -> int:
        return int(self.contexts[node_id].node_config["partition-id"])

    def get_node_ids(self) -> Iterable[int]:
        if self.empty_for > 0:
            self.empty_for -= 1
            return []
        return [i for i in super().get_node_ids() if self.partition(i) not in self.absent]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent.extend(messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        came = list(super().pull_messages(message_ids))
        # Sizes are taken here: the strategy empties a message once it has read it.
        self.came.extend((message, size_of(message) if message.has_content() else 0) for message in came)
        return came

    def of_type(self, kind: str) -> list[Message]:
        return [m for m in self.sent if m.metadata.message_type == kind]


def initial() -> ArrayRecord:
    return ArrayRecord(Net().state_dict())


def events(seen: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [entry for entry in seen if entry[0] != "config"]


def drawn(grid: Watched) -> list[list[int]]:
    rounds: dict[str, list[int]] = {}
    for message in grid.of_type("train"):
        rounds.setdefault(message.metadata.group_id, []).append(grid.partition(message.metadata.dst_node_id))
    return list(rounds.values())


class OnePhase(Toy):
    phases = ("ask",)


def size_of(message: Message) -> int:
    total = 0
    for record in message.content.values():
        for value in record.values():
            if isinstance(value, Array):
                total += len(value.data)
            elif isinstance(value, bytes):
                total += len(value)
    return total


METHODS = list(registry.methods())


PERSONAL = [name for name in METHODS if getattr(registry.get(name).client, "personal", False)]


def each_method(variants: pytest.MarkDecorator | None = None) -> pytest.MarkDecorator:
    """Parametrise a test by all methods; further variants of a method get a mark of their own."""
    # FedHyb* trains a generator at the server in every round.
    marks = {"fedhyb-star": [pytest.mark.long]}
    if variants is not None:
        marks |= {name: [variants] for name in METHODS if name not in first_variants()}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, ())) for name in METHODS]
    )


every = each_method()


class Killed(BaseException):
    """Ends a server as a signal would: nothing of the strategy catches it."""


def failing(count: int, rounds: set[int]) -> dict[int, Fault]:
    return {i: Fault("raise", frozenset(rounds)) for i in range(count)}


class Coming(InlineGrid):
    """Nodes are there from a certain question for them on."""

    def __init__(
        self, *args: Any, since: dict[int, int], gone: Callable[[int, int], bool], **kw: Any
    ) -> None:
        super().__init__(*args, **{"work_seconds": WORK_SECONDS, **kw})
        self.since, self.gone, self.asked = since, gone, 0

    def get_node_ids(self) -> list[int]:
        self.asked += 1
        there = []
        for node_id, context in self.contexts.items():
            partition = int(context.node_config["partition-id"])
            if self.asked > self.since.get(partition, 0) and not self.gone(partition, self.asked):
                there.append(node_id)
        return there


def states_of(folder: Path, clients: int = 4) -> dict[str, Any]:
    return {"node_configs": [{"state-dir": str(folder)}] * clients}


def in_a_process(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a script that may be killed, or may change what its whole process is allowed."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def claiming(count: Any) -> Fault:
    def garble(content: RecordDict) -> None:
        content.metric_records["fitres.num_examples"] = MetricRecord({"num_examples": count})

    return Fault("garbage", garble=garble)
