"""A federation on the inline grid that is watched: each message, each answer, and what clients keep.

Hooks stand where the world acts on a federation: a node that comes, goes or loses its state before a round
(``arrive``), something done to a client before a message reaches it (``before``), an answer that is changed on its
way (``after``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.client.task import Task
from flwr_kd.config import MethodConfig
from flwr_kd.seeding import derive_seed
from flwr_kd.server.records import KDResult, RoundStats, VoidRoundsError
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import WORK_SECONDS
from flwr_kd.transport.inline_grid import InlineGrid

CLASSES, SHAPE, FEATURES = 3, (1, 2, 4), 8
Arrays = dict[str, npt.NDArray[Any]]


def samples(index: int, size: int, shape: Sequence[int] = SHAPE) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 + index)
    y = torch.randint(CLASSES, (size,), generator=draw)
    x = torch.randn(size, *shape, generator=draw)
    x[:, ..., 0] += y.view(-1, *[1] * (len(shape) - 1))
    return x, y


def net(kind: int = 1, seed: int = 0) -> nn.Sequential:
    """Return one of four architectures, smooth everywhere, so that float32 and float64 stay close."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10 * seed + kind)
        layers: list[nn.Module] = [
            [nn.Flatten(), nn.Linear(FEATURES, CLASSES)],
            [nn.Flatten(), nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)],
            [nn.Flatten(), nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES)],
            [nn.Conv2d(1, 2, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)],
        ][kind]
        return nn.Sequential(*layers)


class Passed(NamedTuple):
    """A message to a client, and its reply."""

    server_round: int
    phase: str
    partition: int
    down: bytes | None
    down_arrays: list[npt.NDArray[Any]]
    up: bytes | None
    up_arrays: list[npt.NDArray[Any]]
    metrics: dict[str, float]
    error: str
    kept: Arrays
    """The client's model afterwards."""

    def sent(self) -> Arrays:
        return with_positions(load(self.down or b""))

    def came(self) -> Arrays:
        return with_positions(load(self.up or b""))


def with_positions(arrays: Arrays) -> Arrays:
    """Positions travel as bits, the first in the lowest."""
    for name in {"rows", "classes"} & set(arrays):
        bits = [byte >> place & 1 for byte in arrays[name].tolist() for place in range(8)]
        arrays[name] = np.array([place for place, bit in enumerate(bits) if bit], dtype=np.int64)
    return arrays


class Watched(InlineGrid):
    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        *,
        arrive: Callable[[Watched, int], None] | None = None,
        before: Callable[[int, str, Context], None] | None = None,
        after: Callable[[int, str, int, RecordDict], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, nodes, **{"work_seconds": WORK_SECONDS, **options})
        self.passed: list[Passed] = []
        self.away: set[int] = set()
        self.asked = 0
        self._arrive, self._before, self._after = arrive, before, after

    def get_node_ids(self) -> Iterable[int]:
        """Ask for the ids: once or more often before the first round (0), then once a round (1, 2, ...)."""
        if self._arrive is not None:
            self._arrive(self, self.asked)
        self.asked += 1
        return [i for i, c in self.contexts.items() if int(c.node_config["partition-id"]) not in self.away]

    def context(self, partition: int) -> Context:
        return next(c for c in self.contexts.values() if c.node_config["partition-id"] == partition)

    def restart(self, partition: int, node_id: int | None = None) -> None:
        """Lose a client's state, and give it another node id."""
        old = self.context(partition)
        del self.contexts[old.node_id]
        node_id = old.node_id + 1 if node_id is None else node_id
        self.contexts[node_id] = Context(
            run_id=old.run_id,
            node_id=node_id,
            node_config=dict(old.node_config),
            state=RecordDict(),
            run_config={},
        )

    def of(self, server_round: int, phase: str) -> dict[int, Passed]:
        """Return what passed in a phase, by partition."""
        return {
            call.partition: call
            for call in self.passed
            if (call.server_round, call.phase) == (server_round, phase)
        }

    def _call(self, message: Message, context: Context, fault: Fault | None) -> tuple[Message, RecordDict]:
        if message.metadata.message_type != "train":
            return super()._call(message, context, fault)
        config = message.content.config_records["fitins.config"]
        server_round, phase = int(config["server-round"]), str(config["phase"])
        partition = int(context.node_config["partition-id"])
        if self._before is not None:
            self._before(server_round, phase, context)
        down = _arrays(message.content, "fitins.parameters")
        reply, state = super()._call(message, context, fault)
        up, came, metrics, error = None, [], {}, ""
        if reply.has_error():
            error = reply.error.reason or ""
        else:
            if self._after is not None:
                self._after(server_round, phase, partition, reply.content)
            metrics = dict(reply.content.config_records.get("fitres.metrics", {}))
            up, came = metrics.pop("payload", None), _arrays(reply.content, "fitres.parameters")
        kept = kept_in(state)
        passed = (server_round, phase, partition, config.get("payload"), down, up, came, metrics, error, kept)
        self.passed.append(Passed(*passed))
        return reply, state


def void(start: Callable[[], KDResult]) -> KDResult:
    """Return what there is of a run whose rounds were all void, which is an error."""
    with pytest.raises(VoidRoundsError) as raised:
        start()
    assert raised.value.result is not None
    return raised.value.result


def _arrays(content: RecordDict, key: str) -> list[npt.NDArray[Any]]:
    record = content.array_records.get(key, ArrayRecord())
    return [array.numpy().copy() for name, array in record.items() if name != "_empty"]


def kept_model(context: Context) -> Arrays:
    return kept_in(context.state)


def kept_in(state: RecordDict) -> Arrays:
    record = state.array_records.get("flwr-kd.personal", ArrayRecord())
    return {name: array.numpy().copy() for name, array in record.items()}


@dataclass
class Party:
    """Clients of one method, with all that they are built from; what is by client is a list, or a callable."""

    name: str
    models: list[nn.Module]
    train: list[Any]
    test: list[Any]
    public: Callable[[int], Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    client: Any = None
    client_options: dict[str, Any] = field(default_factory=dict)
    strategy: Any = None
    grid: Any = None
    matrices: list[Arrays] = field(default_factory=list)
    """The strategy's state after each round."""
    strategy_rounds: list[RoundStats] = field(default_factory=list)

    def make(self, context: Context) -> Any:
        index = int(context.node_config["partition-id"])
        method = registry.get(self.name)
        public = {} if self.public is None else {"public_set": self.public(index)}
        options = {"context": context, "device": "cpu", **self.client_options, **public}
        kind = self.client or method.client
        return kind(copy.deepcopy(self.models[index]), self.train[index], self.test[index], **options)

    def app(self) -> ClientApp:
        return ClientApp(client_fn=lambda context: self.make(context).to_client())

    def build(self, kind: Any = None, **options: Any) -> Any:
        method = registry.get(self.name)
        strategy = kind or method.strategy
        config = strategy.config_class(**{**method.fixed, **self.config})
        options = {"min_available_nodes": len(self.models), **options}
        return strategy(config, on_round=self._note, **options)

    def _note(self, _: Any) -> None:
        state = self.strategy.state_arrays()
        self.matrices.append({name: value.copy() for name, value in state.items()})

    def start(
        self,
        rounds: int = 2,
        *,
        initial: ArrayRecord | None = None,
        grid: dict[str, Any] | None = None,
        timeout: float = 20.0,
        kind: Any = None,
        **options: Any,
    ) -> KDResult:
        self.strategy, self.matrices = self.build(kind, **options), []
        return self.again(rounds, Watched(self.app(), len(self.models), **(grid or {})), initial, timeout)

    def again(
        self, rounds: int, grid: Watched, initial: ArrayRecord | None = None, timeout: float = 20.0
    ) -> KDResult:
        """Start the strategy that there is, on a grid that may have been used."""
        self.grid = grid
        try:
            actual = self.strategy.start(grid, initial or ArrayRecord(), num_rounds=rounds, timeout=timeout)
        finally:
            grid.close()
        self.strategy_rounds = actual.rounds
        return actual  # type: ignore[no-any-return]

    def draw(self, phase: str, server_round: int, partition: int, purpose: str) -> torch.Generator:
        """Return the library's own generator for a client's order of samples."""
        seed = derive_seed(self.strategy.seed, "client", phase, server_round, partition)
        return Task(server_round, phase, seed, (), [], None, MethodConfig()).generator(purpose)


SIZES = (17, 22, 12, 27)
PUBLIC = 14


def party(name: str, *, clients: int = 4, alike: bool = False, public: Any = None, **config: Any) -> Party:
    """Return four clients with heterogeneous models (or one architecture), different sizes, and public data."""
    kinds = [2 if alike else i % 4 for i in range(clients)]
    sizes = [SIZES[i % 4] + 3 * (i // 4) for i in range(clients)]
    values: dict[str, Any] = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1}
    if registry.get(name).public_at:
        values |= {"public_samples": 10, "public_batch_size": 4, "distill_learning_rate": 0.05}
        values |= {"temperature": 2.0}
        shared = TensorDataset(*samples(99, PUBLIC))
        public = public or (lambda _: shared)
    return Party(
        name,
        [net(kind, seed=0 if alike else i) for i, kind in enumerate(kinds)],
        [TensorDataset(*samples(i, size)) for i, size in enumerate(sizes)],
        [TensorDataset(*samples(50 + i, 9 + i)) for i in range(clients)],
        public,
        values | config,
    )


def equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def same_models(one: Watched, other: Watched) -> bool:
    """Say whether all clients of two runs keep the same models, to the bit; and that there are any."""
    pairs = [
        (kept_model(c), kept_model(other.context(int(c.node_config["partition-id"]))))
        for c in one.contexts.values()
    ]
    return bool(pairs) and all(a and equal(a, b) for a, b in pairs)
