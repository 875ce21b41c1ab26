"""The loop, on a toy method: phases, handshake, faults, counting; and Flower's own loop on ours."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy
from torch import nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task
from flwr_kd.server.records import HandshakeError, KDResult, Node, Outgoing, Reply, RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import Payload, PayloadError, array

QUICK: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}

# ---------------------------------------------------------------------- the toy method


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
    """Three phases, no weights: all are asked, even partitions are told something of their own."""

    phases: ClassVar[tuple[str, ...]] = ("ask", "tell", "close")
    reply_payloads: ClassVar[Mapping[str, type[Payload]]] = {"ask": Note}
    sends_weights = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: dict[int, int] = {}
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
        super().__init__(*args, **kwargs)
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


@pytest.fixture
def toy(make_blobs: Callable[..., Any]) -> Callable[..., tuple[Watched, list[tuple[Any, ...]]]]:
    def build(clients: int = 4, **options: Any) -> tuple[Watched, list[tuple[Any, ...]]]:
        seen: list[tuple[Any, ...]] = []

        def client_fn(context: Context) -> Any:
            client = ToyClient(Net(), make_blobs(8, 0), context=context, device="cpu", seen=seen)
            return client.to_client()

        return Watched(ClientApp(client_fn=client_fn), clients, **options), seen

    return build


@pytest.fixture
def grid_of(make_blobs: Callable[..., Any]) -> Callable[..., Watched]:
    """A grid of real clients."""

    def build(
        kind: type[KDClient] = FedAvgClient,
        clients: int = 3,
        *,
        model: Callable[[int], nn.Module] = lambda index: Net(),
        grid: dict[str, Any] | None = None,
        **options: Any,
    ) -> Watched:
        def client_fn(context: Context) -> Any:
            index = int(context.node_config["partition-id"])
            client = kind(
                model(index), make_blobs(16 + 4 * index, index), make_blobs(4 + index, 50), context=context,
                device="cpu", **options,
            )  # fmt: skip
            return client.to_client()

        return Watched(ClientApp(client_fn=client_fn), clients, **(grid or {}))

    return build


def initial() -> ArrayRecord:
    return ArrayRecord(Net().state_dict())


def events(seen: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [entry for entry in seen if entry[0] != "config"]


# ---------------------------------------------------------------------- phases


def test_phases_run_in_order_each_for_its_own_nodes(toy: Any) -> None:
    grid, seen = toy()
    strategy = Toy()
    result = strategy.start(grid, ArrayRecord(), num_rounds=2)
    phases = [(r, p, i) for r, p, i, *_ in events(seen)]
    expected = []
    for r in (1, 2):
        expected += [(r, "ask", {0, 1, 2, 3}), (r, "tell", {0, 2}), (r, "close", {0, 2})]
    at = 0
    for server_round, phase, who in expected:
        part = phases[at : at + len(who)]
        assert {i for *_, i in part} == who
        assert {(r, p) for r, p, _ in part} == {(server_round, phase)}
        at += len(who)
    assert at == len(phases)
    # The server sees the answers in the order of partitions, whatever the node ids are.
    assert strategy.calls == [(r, p, sorted(who)) for r, p, who in expected]
    assert [r.participants for r in result.rounds] == [4, 4]
    assert not result.arrays


def test_every_node_gets_its_own_payload_and_config(toy: Any) -> None:
    grid, seen = toy()
    Toy().start(grid, ArrayRecord(), num_rounds=2)
    told = [entry for entry in events(seen) if entry[1] == "tell"]
    assert len(told) == 4
    for server_round, _, partition, owner, values in told:
        assert owner == partition
        assert values == [10 * server_round * i for i in range(partition + 1)]
    for _, partition, config in (entry for entry in seen if entry[0] == "config"):
        assert config["spoken-to"] == partition


def test_a_phase_that_nobody_is_in_is_left_out(toy: Any, flower_log: list[str]) -> None:
    class Lonely(Toy):
        def select(
            self, phase: str, server_round: int, nodes: list[Node], answered: list[Node]
        ) -> list[Node]:
            return [] if phase == "tell" else nodes

    grid, _ = toy()
    strategy = Lonely()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert [phase for _, phase, _ in strategy.calls] == ["ask", "close"]
    assert len(grid.of_type("train")) == 8
    assert flower_log == []


def test_who_failed_a_phase_is_not_in_the_next(toy: Any) -> None:
    grid, _ = toy(faults={2: Fault("raise", frozenset({1}))})
    strategy = Toy()
    strategy.start(grid, ArrayRecord(), num_rounds=2)
    assert strategy.calls[:3] == [(1, "ask", [0, 1, 3]), (1, "tell", [0]), (1, "close", [0])]
    assert strategy.calls[3:] == [(2, "ask", [0, 1, 2, 3]), (2, "tell", [0, 2]), (2, "close", [0, 2])]


def test_an_answer_that_the_method_refuses_is_dropped(toy: Any, flower_log: list[str]) -> None:
    def forge(content: RecordDict) -> None:
        content.config_records["fitres.metrics"]["payload"] = Note(np.array([1]), 99).to_bytes()

    grid, _ = toy(faults={1: Fault("garbage", frozenset({1}), forge)})
    strategy = Toy()
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.calls[0] == (1, "ask", [0, 2, 3])
    assert (result.rounds[0].participants, result.rounds[0].failures) == (3, 1)
    (line,) = flower_log
    assert "partition 1" in line
    assert "a note of 99" in line


def test_arrays_or_a_payload_that_no_one_asked_for_are_dropped(toy: Any, flower_log: list[str]) -> None:
    def uninvited(content: RecordDict) -> None:
        content["fitres.parameters"] = ArrayRecord([np.zeros(3)])

    grid, _ = toy(faults={1: Fault("garbage", garble=uninvited)})
    strategy = Toy()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.calls[0] == (1, "ask", [0, 2, 3])
    assert "expected none in phase 'ask'" in flower_log[0]


def test_an_unknown_phase_fails_at_the_client_with_a_clear_text(toy: Any, flower_log: list[str]) -> None:
    class Other(Toy):
        phases = ("dance",)

    grid, _ = toy()
    result = Other().start(grid, ArrayRecord(), num_rounds=1)
    assert result.rounds[0].failures == 4
    assert "ToyClient does not know the phase 'dance'" in flower_log[0]


def test_several_phases_need_our_own_start(toy: Any) -> None:
    grid, _ = toy()
    with pytest.raises(RuntimeError, match=r"phases ask, tell, close per round; call its own start\(\)"):
        Toy().configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    with pytest.raises(RuntimeError, match="ask, tell, close"):
        Strategy.start(Toy(), grid, ArrayRecord(), num_rounds=1)


# ---------------------------------------------------------------------- nodes


def test_another_model_is_refused_before_any_training(grid_of: Any, flower_log: list[str]) -> None:
    grid = grid_of(model=lambda index: Net(7 if index == 1 else 5))
    with pytest.raises(HandshakeError) as caught:
        FedAvg(min_available_nodes=3).start(grid, initial(), num_rounds=2)
    assert "2 clients fit, 3 are needed" in str(caught.value)
    assert "array 'body.weight' has shape [7, 16], expected [5, 16]" in str(caught.value)
    assert grid.of_type("train") == []
    assert len(flower_log) == 1
    assert "(" not in flower_log[0].split(" is refused")[0]


def test_the_run_goes_on_without_a_refused_client_where_enough_fit(grid_of: Any) -> None:
    grid = grid_of(model=lambda index: Net(7 if index == 1 else 5))
    result = FedAvg(min_available_nodes=2, **QUICK).start(grid, initial(), num_rounds=2)
    assert [set(r.bytes_by_partition) for r in result.rounds] == [{0, 2}, {0, 2}]
    # It is asked once only.
    assert len(grid.of_type("get_properties")) == 3


def test_other_sizes_are_refused_where_no_weights_are_sent(grid_of: Any) -> None:
    grid = grid_of(FedProtoClient, model=lambda index: Net(7 if index == 2 else 5))
    with pytest.raises(HandshakeError, match="4 classes and"):
        FedProto(min_available_nodes=3).start(grid, ArrayRecord(), num_rounds=1)
    assert grid.of_type("train") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("num-examples", -1), ("num-classes", "ten"), ("arrays", "{"), ("feature-shape", "[0]")],
)
def test_a_handshake_of_nonsense_is_refused(grid_of: Any, name: str, value: Any) -> None:
    class Liar(FedAvgClient):
        def properties(self) -> dict[str, Any]:
            return {name: value} if self.context.node_config["partition-id"] == 1 else {}

    with pytest.raises(HandshakeError, match=name):
        FedAvg(min_available_nodes=3).start(grid_of(Liar), initial(), num_rounds=1)


def test_one_client_does_not_decide_what_the_others_must_be(grid_of: Any) -> None:
    """The first in the order of partitions has other features; it is the one that is refused."""
    grid = grid_of(FedProtoClient, model=lambda index: Net(7 if index == 0 else 5))
    result = FedProto(min_available_nodes=2, **QUICK).start(grid, ArrayRecord(), num_rounds=1)
    assert set(result.rounds[0].bytes_by_partition) == {1, 2}


@pytest.mark.parametrize("value", [5.0, -0.1])
def test_an_accuracy_that_cannot_be_is_dropped(grid_of: Any, value: float, flower_log: list[str]) -> None:
    class Boaster(FedAvgClient):
        def phase_train(self, task: Task) -> Answer:
            answer = super().phase_train(task)
            if self.context.node_config["partition-id"] == 1:
                answer.metrics["local-accuracy"] = value
            return answer

    result = FedAvg(min_available_nodes=3, **QUICK).start(grid_of(Boaster), initial(), num_rounds=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (2, 1)
    assert sorted(result.rounds[0].clients) == [0, 2]
    assert any(f"'local-accuracy' must be in [0, 1], got {value}" in line for line in flower_log)


def test_knowledge_is_not_held_while_the_next_answers_come(make_blobs: Callable[..., Any]) -> None:
    alive: list[int] = []
    kept: list[weakref.ref[Any]] = []

    class Noting(FedProto):
        def aggregate_phase(
            self, phase: str, server_round: int, replies: Iterable[Reply], arrays: Any
        ) -> Any:
            replies = list(replies)
            gc.collect()
            alive.append(sum(ref() is not None for ref in kept))
            kept.extend(weakref.ref(reply.payload) for reply in replies)
            return super().aggregate_phase(phase, server_round, replies, arrays)

    def client_fn(context: Context) -> Any:
        return FedProtoClient(Net(5), make_blobs(12, 0), context=context, device="cpu").to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), 2)
    Noting(min_available_nodes=2, **QUICK).start(grid, ArrayRecord(), num_rounds=3)
    assert alive == [0, 0, 0]
    assert len(kept) == 6


def test_a_message_is_emptied_once_it_has_been_read(grid_of: Any) -> None:
    grid = grid_of()
    FedAvg(min_available_nodes=3, **QUICK).start(grid, initial(), num_rounds=1)
    trained = [message for message, _ in grid.came if message.metadata.message_type == "train"]
    assert len(trained) == 3
    assert [size_of(message) for message in trained] == [0, 0, 0]


def test_a_partition_is_one_clients(flower_log: list[str], make_blobs: Callable[..., Any]) -> None:
    """What is kept for a client goes by its partition: another that claims it must not get, or replace, it."""

    def client_fn(context: Context) -> Any:
        return FedAvgClient(Net(5), make_blobs(12, 0), context=context, device="cpu").to_client()

    claims = [{}, {}, {"partition-id": 0}]
    grid = InlineGrid(ClientApp(client_fn=client_fn), 3, node_configs=claims)
    result = FedAvg(min_available_nodes=2, **QUICK).start(grid, initial(), num_rounds=3)
    assert [set(r.bytes_by_partition) for r in result.rounds] == [{0, 1}] * 3
    assert [r.participants for r in result.rounds] == [2] * 3
    (line,) = [line for line in flower_log if "has the same partition" in line]
    assert "(partition 0) is left out" in line


def test_it_waits_for_nodes_that_are_not_there_at_first(toy: Any) -> None:
    grid, _ = toy()
    grid.empty_for = 3
    strategy = Toy(min_available_nodes=4)
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.calls[0] == (1, "ask", [0, 1, 2, 3])
    assert grid.empty_for == 0


def test_it_does_not_wait_for_ever(toy: Any) -> None:
    grid, seen = toy(clients=3)
    with pytest.raises(TimeoutError, match=r"3 clients came within 0\.1 s, 4 are needed"):
        Toy(min_available_nodes=4).start(grid, ArrayRecord(), num_rounds=1, timeout=0.1)
    assert events(seen) == []


def test_nodes_may_join_late_leave_and_come_back(toy: Any) -> None:
    grid, _ = toy()
    grid.absent = {3}
    there = iter([{1}, set()])

    def between(stats: RoundStats) -> None:
        grid.absent = next(there, set())

    strategy = Toy(min_available_nodes=3, on_round=between)
    strategy.start(grid, ArrayRecord(), num_rounds=3)
    asked = [who for _, phase, who in strategy.calls if phase == "ask"]
    assert asked == [[0, 1, 2], [0, 2, 3], [0, 1, 2, 3]]
    # Who comes back introduces itself again.
    assert len(grid.of_type("get_properties")) == 5


def test_clients_that_cannot_be_built_end_the_waiting() -> None:
    """Such as by a mistake in client_fn: nobody should have to wait an hour to read of it."""
    calls = []

    def client_fn(context: Context) -> Any:
        calls.append(context.node_id)
        raise ValueError("no such column: price")

    grid = InlineGrid(ClientApp(client_fn=client_fn), num_nodes=2)
    # Long before the timeout, which is longer than a test may take.
    with pytest.raises(HandshakeError, match=r"0 clients fit, 2 are needed; .*no such column: price"):
        FedAvg(min_available_nodes=2).start(grid, initial(), num_rounds=1, timeout=3600)
    # It might have been a passing fault.
    assert set(Counter(calls).values()) == {3}


def test_a_node_that_fails_the_handshake_is_asked_again(make_blobs: Any, flower_log: list[str]) -> None:
    failures = iter([True])

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 0 and next(failures, False):
            raise OSError("the disk is not mounted yet")
        return ToyClient(Net(), make_blobs(8, 0), context=context, device="cpu", seen=[]).to_client()

    strategy = Toy(min_available_nodes=2)
    strategy.start(InlineGrid(ClientApp(client_fn=client_fn), 2), ArrayRecord(), num_rounds=1)
    assert strategy.calls[0] == (1, "ask", [0, 1])
    assert "the disk is not mounted yet" in flower_log[0]


def drawn(grid: Watched) -> list[list[int]]:
    rounds: dict[str, list[int]] = {}
    for message in grid.of_type("train"):
        rounds.setdefault(message.metadata.group_id, []).append(grid.partition(message.metadata.dst_node_id))
    return list(rounds.values())


class OnePhase(Toy):
    phases = ("ask",)


def test_the_same_seed_draws_the_same_partitions_whatever_the_node_ids(toy: Any) -> None:
    def run(node_seed: int, seed: int) -> tuple[list[list[int]], list[int]]:
        grid, _ = toy(clients=8, seed=node_seed)
        OnePhase(fraction_train=0.5, seed=seed).start(grid, ArrayRecord(), num_rounds=4)
        return drawn(grid), sorted(grid.contexts)

    (one, ids), (again, other_ids), (other, _) = run(1, 5), run(2, 5), run(1, 6)
    assert ids != other_ids
    assert one == again
    assert one != other
    assert all(len(who) == 4 and who == sorted(set(who)) for who in one)
    assert len({tuple(who) for who in one}) > 1


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"fraction_train": 0.5}, 2),
        ({"fraction_train": 0.1}, 1),
        ({"fraction_train": 0.1, "min_train_nodes": 3}, 3),
    ],
)
def test_fraction_train(toy: Any, options: dict[str, Any], size: int) -> None:
    grid, _ = toy()
    result = OnePhase(**options).start(grid, ArrayRecord(), num_rounds=2)
    assert [r.participants for r in result.rounds] == [size, size]


def test_without_a_partition_id_the_node_id_counts(toy: Any) -> None:
    grid, _ = toy(clients=3)

    class Anonymous(OnePhase):
        def accept_node(self, node: Node) -> str | None:
            object.__setattr__(node, "partition_id", None)
            return None

        def check_reply(self, phase: str, reply: Reply) -> None:
            """Whose note it is cannot be told."""

    result = Anonymous().start(grid, ArrayRecord(), num_rounds=1)
    assert set(result.rounds[0].bytes_by_partition) == set(grid.contexts)


# ---------------------------------------------------------------------- faults


def test_an_error_from_the_superlink_is_mapped_by_the_message_that_it_answers(
    toy: Any, flower_log: list[str]
) -> None:
    class ThroughSuperLink(Watched):
        """A SuperLink answers in a lost node's place, with its own id as the source."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = []
            sent = {m.metadata.message_id: m for m in self.sent}
            for reply in super().pull_messages(message_ids):
                asked = sent[reply.metadata.reply_to_message_id]
                lost = self.partition(asked.metadata.dst_node_id) == 2
                if lost and asked.metadata.message_type == "train":
                    reply = Message(Error(3, "message unavailable"), reply_to=asked)
                    reply.metadata.__dict__["_src_node_id"] = 1
                replies.append(reply)
            return replies

    base, _ = toy()
    grid = ThroughSuperLink(base._app, 4)
    strategy = OnePhase()
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.calls == [(1, "ask", [0, 1, 3])]
    assert result.rounds[0].failures == 1
    (line,) = flower_log
    assert "(partition 2) failed: it did not answer in time, or its answer was lost" in line


def test_of_rays_long_reason_the_last_line_is_shown_once(toy: Any, flower_log: list[str]) -> None:
    chain = "".join(
        f"ray::ClientAppActor.run() pid={i}, trace of the frame\n    File x.py\n" for i in range(40)
    )
    reason = chain + "RuntimeError: CUDA out of memory\n\n"
    assert len(reason) > 2000

    class Failing(Watched):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            sent = {m.metadata.message_id: m for m in self.sent}
            for reply in super().pull_messages(message_ids):
                asked = sent[reply.metadata.reply_to_message_id]
                yield (
                    Message(Error(2, reason), reply_to=asked)
                    if asked.metadata.message_type == "train"
                    else reply
                )

    base, _ = toy(clients=1)
    OnePhase(min_available_nodes=1).start(Failing(base._app, 1), ArrayRecord(), num_rounds=1)
    shown = [line for line in flower_log if "CUDA" in line]
    assert len(shown) == 1
    assert shown[0].endswith("failed: RuntimeError: CUDA out of memory")
    assert "ray::" not in "".join(flower_log)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_silent_node_costs_the_timeout_and_no_more(toy: Any, flower_log: list[str], workers: int) -> None:
    grid, _ = toy(workers=workers)
    begun = time.monotonic()
    OnePhase().start(grid, ArrayRecord(), num_rounds=1)
    grid.close()
    # Threads have to reply in time, so the timeout follows from how long all of that took on this machine.
    timeout = max(0.3, 20 * (time.monotonic() - begun))
    grid, _ = toy(faults={1: Fault("silent")}, workers=workers)
    strategy = OnePhase()
    begun = time.monotonic()
    result = strategy.start(grid, ArrayRecord(), num_rounds=1, timeout=timeout)
    assert time.monotonic() - begun >= timeout
    grid.close()
    assert strategy.calls == [(1, "ask", [0, 2, 3])]
    assert result.rounds[0].failures == 1
    assert "(partition 1) did not answer in time" in flower_log[0]
    # They live on while the others' answers are fetched: 200 seconds, and two for each.
    assert {m.metadata.ttl for m in grid.sent} == {timeout + 200 + 4 * 2}


def test_a_late_answer_does_not_count_in_the_next_round(toy: Any) -> None:
    grid, _ = toy(faults={1: Fault("late", frozenset({1}))})
    strategy = OnePhase()
    result = strategy.start(grid, ArrayRecord(), num_rounds=2, timeout=0.3)
    assert strategy.calls == [(1, "ask", [0, 2, 3]), (2, "ask", [0, 1, 2, 3])]
    assert [r.failures for r in result.rounds] == [1, 0]


# ---------------------------------------------------------------------- numbers


def size_of(message: Message) -> int:
    total = 0
    for record in message.content.values():
        for value in record.values():
            if isinstance(value, Array):
                total += len(value.data)
            elif isinstance(value, bytes):
                total += len(value)
    return total


def test_bytes_are_those_that_were_sent(grid_of: Any) -> None:
    grid = grid_of(FedHKDClient)
    rounds: list[RoundStats] = []
    result = FedHKD(min_available_nodes=3, fraction_evaluate=0.7, on_round=rounds.append, **QUICK).start(
        grid, initial(), num_rounds=2
    )
    assert result.rounds == rounds
    where = {m.metadata.message_id: grid.partition(m.metadata.dst_node_id) for m in grid.sent}
    for stats in rounds:
        group = str(stats.server_round)
        down = dict.fromkeys(range(3), 0)
        up = dict.fromkeys(range(3), 0)
        for message in grid.sent:
            if message.metadata.group_id == group:
                down[where[message.metadata.message_id]] += size_of(message)
        for message, size in grid.came:
            if message.metadata.group_id == group and message.metadata.message_type == "train":
                up[where[message.metadata.reply_to_message_id]] += size
        assert stats.bytes_by_partition == {i: (down[i], up[i]) for i in range(3)}
        assert (stats.bytes_down, stats.bytes_up) == (sum(down.values()), sum(up.values()))
    weights = sum(len(a.data) for a in initial().values())
    assert rounds[0].bytes_down == 5 * weights  # three trained and two evaluated, with no knowledge yet
    assert rounds[1].bytes_down > 5 * weights


def test_means_over_clients(grid_of: Any) -> None:
    told: dict[int, dict[str, Any]] = {}

    class Telling(FedAvgClient):
        def phase_train(self, task: Task) -> Answer:
            answer = super().phase_train(task)
            told[int(self.context.node_config["partition-id"])] = {
                "n": answer.num_examples, **answer.metrics, "arrays": answer.arrays
            }  # fmt: skip
            return answer

    result = FedAvg(min_available_nodes=3, **QUICK).start(grid_of(Telling), initial(), num_rounds=1)
    (stats,) = result.rounds
    counts = [told[i]["n"] for i in range(3)]
    assert counts == [16, 20, 24]
    assert stats.local_accuracy == pytest.approx(np.mean([told[i]["local-accuracy"] for i in range(3)]))
    losses = [told[i]["train-loss"] for i in range(3)]
    assert stats.train_loss == pytest.approx(np.average(losses, weights=counts))
    assert dict(result.train_metrics_clientapp[1]) == {
        "local-accuracy": stats.local_accuracy,
        "train-loss": stats.train_loss,
    }
    for index, array_ in enumerate(result.arrays.values()):
        mean = np.average([told[i]["arrays"][index] for i in range(3)], axis=0, weights=counts)
        np.testing.assert_allclose(array_.numpy(), mean, rtol=1e-6)


def test_evaluation_on_the_clients_is_off_unless_asked_for(grid_of: Any, make_blobs: Any) -> None:
    off, on = grid_of(), grid_of()
    quiet = FedAvg(min_available_nodes=3, **QUICK).start(off, initial(), num_rounds=1)
    assert off.of_type("evaluate") == []
    assert quiet.evaluate_metrics_clientapp == {}
    loud = FedAvg(min_available_nodes=3, fraction_evaluate=1.0, **QUICK).start(on, initial(), num_rounds=1)
    assert len(on.of_type("evaluate")) == 3
    model = Net()
    model.load_state_dict(loud.arrays.to_torch_state_dict())
    right = total = 0
    loss = 0.0
    for index in range(3):
        test = make_blobs(4 + index, 50)
        logits = model(test.x)
        right += int((logits.argmax(1) == test.y).sum())
        loss += float(nn.functional.cross_entropy(logits, test.y, reduction="sum").detach())
        total += len(test)
    assert loud.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(right / total)
    assert loud.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(loss / total, rel=1e-5)


def test_an_evaluation_that_fails_is_left_out(grid_of: Any, flower_log: list[str]) -> None:
    class Broken(FedAvgClient):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            if self.context.node_config["partition-id"] == 1:
                raise OSError("no test data here")
            return (
                (float("nan") if self.context.node_config["partition-id"] == 2 else 1.5),
                4,
                {"accuracy": 0.5},
            )

    result = FedAvg(min_available_nodes=3, fraction_evaluate=1.0, **QUICK).start(
        grid_of(Broken), initial(), num_rounds=1
    )
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.5, "loss": 1.5}
    assert any("no test data here" in line for line in flower_log)
    assert any("loss must be a finite number" in line for line in flower_log)


def test_evaluate_fn_is_called_before_and_after_every_round(grid_of: Any) -> None:
    calls = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        calls.append((server_round, {n: a.data for n, a in arrays.items()}))
        return None if server_round == 1 else MetricRecord({"accuracy": server_round / 10})

    result = FedAvg(min_available_nodes=3, **QUICK).start(
        grid_of(), initial(), num_rounds=2, evaluate_fn=evaluate
    )
    assert [r for r, _ in calls] == [0, 1, 2]
    assert calls[0][1] == {n: a.data for n, a in initial().items()}
    assert calls[2][1] == {n: a.data for n, a in result.arrays.items()}
    assert [r.global_accuracy for r in result.rounds] == [None, 0.2]
    assert set(result.evaluate_metrics_serverapp) == {0, 2}


def test_the_callers_records_are_not_changed(toy: Any, grid_of: Any) -> None:
    train, arrays = ConfigRecord({"my-option": 3, "phase": "mine"}), initial()
    before = dict(train), {n: a.data for n, a in arrays.items()}
    grid, seen = toy()
    Toy().start(grid, ArrayRecord(), num_rounds=2, train_config=train)
    configs = [config for kind, _, config in (e[:3] for e in seen) if kind == "config"]
    assert len(configs) == 16
    assert all(config["my-option"] == 3 for config in configs)
    assert {config["phase"] for config in configs} == {"ask", "tell", "close"}
    evaluate = ConfigRecord({"other": 1})
    real = grid_of()
    FedAvg(fraction_evaluate=1.0, **QUICK).start(
        real, arrays, num_rounds=2, train_config=train, evaluate_config=evaluate
    )
    assert (dict(train), {n: a.data for n, a in arrays.items()}) == before
    assert dict(evaluate) == {"other": 1}
    sent = [m.content.config_records["evaluateins.config"] for m in real.of_type("evaluate")]
    assert all(record["other"] == 1 and "my-option" not in record for record in sent)


def test_the_result_loads_and_does_not_print_its_weights(grid_of: Any) -> None:
    result = FedAvg(**QUICK).start(grid_of(), initial(), num_rounds=1)
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    assert list(result.arrays) == list(Net().state_dict())
    assert "NUMPY" not in str(result)
    assert len(str(result)) < 1000


def test_a_payload_over_the_limit_is_refused_at_the_sender(grid_of: Any, flower_log: list[str]) -> None:
    result = FedHKD(max_payload_bytes=100, **QUICK).start(grid_of(FedHKDClient), initial(), num_rounds=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (0, 3)
    assert {n: a.data for n, a in result.arrays.items()} == {n: a.data for n, a in initial().items()}
    assert "fedhkd.hyper-knowledge" in flower_log[0]
    assert "a smaller feature size D" in flower_log[0]


# ---------------------------------------------------------------------- Flower's own loop


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_flowers_own_start_gives_the_same_result(grid_of: Any, numbers: Any, fraction: float) -> None:
    def run(start: Callable[..., Any]) -> tuple[Any, FedHKD]:
        strategy = FedHKD(
            min_available_nodes=3, min_train_nodes=2, fraction_train=fraction, fraction_evaluate=1.0, seed=3,
            **QUICK,
        )  # fmt: skip
        grid = grid_of(FedHKDClient, reproducible_noise=True)
        return start(strategy, grid, initial(), num_rounds=3), strategy

    ours, our_strategy = run(KDStrategy.start)
    theirs, their_strategy = run(Strategy.start)
    assert not isinstance(theirs, KDResult)
    assert {n: a.data for n, a in ours.arrays.items()} == {n: a.data for n, a in theirs.arrays.items()}
    assert ours.train_metrics_clientapp == theirs.train_metrics_clientapp
    assert ours.evaluate_metrics_clientapp == theirs.evaluate_metrics_clientapp
    assert len(ours.evaluate_metrics_clientapp) == 3
    one, other = our_strategy.state_arrays(), their_strategy.state_arrays()
    assert one.keys() == other.keys() != set()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_flowers_own_start_of_a_method_without_weights(grid_of: Any) -> None:
    ours, theirs = FedProto(min_available_nodes=3, **QUICK), FedProto(min_available_nodes=3, **QUICK)
    ours.start(grid_of(FedProtoClient), ArrayRecord(), num_rounds=2)
    grid = grid_of(FedProtoClient)
    Strategy.start(theirs, grid, ArrayRecord(), num_rounds=2)
    assert len(grid.of_type("get_properties")) == 3
    one, other = ours.state_arrays(), theirs.state_arrays()
    assert one.keys() == other.keys() != set()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_flowers_own_start_survives_errors_and_empty_rounds(grid_of: Any) -> None:
    faults = {i: Fault("raise", frozenset({1})) for i in range(3)}
    faults[1] = Fault("raise")
    grid = grid_of(grid={"faults": faults})
    result = Strategy.start(FedAvg(min_available_nodes=3, **QUICK), grid, initial(), num_rounds=2)
    assert list(result.train_metrics_clientapp) == [2]
    assert {n: a.data for n, a in result.arrays.items()} != {n: a.data for n, a in initial().items()}


def test_flowers_own_start_evaluates_only_at_nodes_that_are_there(grid_of: Any) -> None:
    grid = grid_of()

    def leave(server_round: int, arrays: ArrayRecord) -> None:
        grid.absent = {1} if server_round == 1 else set()

    strategy = FedAvg(fraction_evaluate=1.0, **QUICK)
    Strategy.start(strategy, grid, initial(), num_rounds=2, evaluate_fn=leave)
    asked = [
        grid.partition(m.metadata.dst_node_id) for m in grid.of_type("evaluate") if m.metadata.group_id == "2"
    ]
    assert sorted(asked) == [0, 2]


# ---------------------------------------------------------------------- the mean


def test_the_mean_is_flowers() -> None:
    rng = np.random.default_rng(0)
    names = ["weight", "bn.running_mean", "bn.num_batches_tracked"]
    models = [
        [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=2).astype(np.float32), np.array(c)]
        for c in (5, 8)
    ]
    counts = [10, 30]
    strategy = FedAvg()
    strategy.prepare(ArrayRecord({n: Array(a) for n, a in zip(names, models[0], strict=True)}))
    replies = [Reply(Node(i), models[i], counts[i], {}) for i in range(2)]
    mean = strategy.aggregate_phase("train", 1, replies, None)
    assert mean is not None
    messages = [
        Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({n: Array(a) for n, a in zip(names[:2], models[i], strict=False)}),
                    "metrics": MetricRecord({"num-examples": counts[i]}),
                }
            ),
            dst_node_id=i,
            message_type="train",
        )
        for i in range(2)
    ]
    theirs, _ = FlowerFedAvg().aggregate_train(1, messages)
    assert theirs is not None
    assert list(mean) == names
    for name, column in zip(names[:2], zip(*models, strict=True), strict=False):
        # Flower sums in float32, this library in float64.
        np.testing.assert_allclose(mean[name].numpy(), theirs[name].numpy(), rtol=1e-6)
        np.testing.assert_array_equal(
            mean[name].numpy(), np.average(np.float64(column), axis=0, weights=counts).astype(np.float32)
        )
    counter = mean["bn.num_batches_tracked"].numpy()
    assert (counter.dtype, counter.shape, int(counter)) == (np.dtype("int64"), (), 7)


def test_clients_that_say_they_have_no_samples_are_averaged_evenly() -> None:
    strategy = FedAvg()
    strategy.prepare(ArrayRecord({"w": Array(np.zeros(1, dtype=np.float32))}))
    replies = [Reply(Node(i), [np.array([value], dtype=np.float32)], 0, {}) for i, value in enumerate((1, 3))]
    mean = strategy.aggregate_phase("train", 1, replies, None)
    assert mean is not None
    assert mean["w"].numpy().tolist() == [2.0]


# ---------------------------------------------------------------------- options and checkpoints


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction_train": 0.0}, r"fraction_train must be in \(0, 1\], got 0.0"),
        ({"fraction_train": 1.5}, r"fraction_train must be in \(0, 1\], got 1.5"),
        ({"fraction_evaluate": -0.1}, r"fraction_evaluate must be in \[0, 1\], got -0.1"),
        ({"fraction_train": float("nan")}, "fraction_train must be in"),
        ({"fraction_train": True}, "fraction_train must be in"),
        ({"min_train_nodes": 0}, "min_train_nodes must be in"),
        ({"min_available_nodes": 0}, "min_available_nodes must be in"),
        ({"max_payload_bytes": 0}, "max_payload_bytes must be in"),
        ({"resume": True}, "resume=True needs checkpoint_dir"),
        ({"gama": 0.1}, r"unknown hyper-parameter 'gama' \(did you mean 'gamma'\?\); valid: .*threshold"),
        ({"gamma": -1.0}, "gamma must be >= 0, got -1.0"),
        ({"config": FedAvg().config}, "config must be a FedHKDConfig, got MethodConfig"),
        ({"config": FedHKD().config, "gamma": 1.0}, r"either config or hyper-parameters, got both .*gamma"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FedHKD(**options)


def test_wrong_arguments_of_start_are_refused(toy: Any, grid_of: Any) -> None:
    grid, _ = toy()
    with pytest.raises(ConfigError, match="num_rounds must be in"):
        Toy().start(grid, ArrayRecord(), num_rounds=0)
    with pytest.raises(ConfigError, match="timeout must be in"):
        Toy().start(grid, ArrayRecord(), timeout=0)
    with pytest.raises(
        ConfigError, match=r"FedAvg needs initial_arrays: ArrayRecord\(model.state_dict\(\)\)"
    ):
        FedAvg().start(grid_of(), ArrayRecord())
    assert grid.sent == []


def test_a_checkpoint_of_another_method_or_model_is_refused(grid_of: Any, tmp_path: Any) -> None:
    FedHKD(checkpoint_dir=tmp_path, **QUICK).start(grid_of(FedHKDClient), initial(), num_rounds=1)
    with pytest.raises(ConfigError, match="is a checkpoint of FedHKD, expected one of FedAvg"):
        FedAvg(checkpoint_dir=tmp_path, resume=True).start(grid_of(), initial())
    with pytest.raises(ConfigError, match=r"does not fit initial_arrays: array 'body.weight' has shape"):
        FedHKD(checkpoint_dir=tmp_path, resume=True).start(
            grid_of(FedHKDClient), ArrayRecord(Net(6).state_dict())
        )


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    grid_of: Any, numbers: Any, tmp_path: Any
) -> None:
    plain = FedAvg(**QUICK).start(grid_of(), initial(), num_rounds=2)
    resumed = FedAvg(checkpoint_dir=tmp_path, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert numbers(plain) == numbers(resumed)
    # Nothing is left to do: the arrays of the last round come back.
    done = FedAvg(checkpoint_dir=tmp_path, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert done.rounds == []
    assert {n: a.data for n, a in done.arrays.items()} == {n: a.data for n, a in plain.arrays.items()}


def test_resuming_with_another_seed_warns(grid_of: Any, flower_log: list[str], tmp_path: Any) -> None:
    FedAvg(checkpoint_dir=tmp_path, seed=1, **QUICK).start(grid_of(), initial(), num_rounds=1)
    assert flower_log == []
    FedAvg(checkpoint_dir=tmp_path, seed=2, resume=True, **QUICK).start(grid_of(), initial(), num_rounds=2)
    assert "other hyper-parameters or another seed" in flower_log[0]


def test_the_base_has_no_state_to_load() -> None:
    with pytest.raises(ValueError, match=r"FedAvg has no state of its own, got \['matrix'\]"):
        FedAvg().load_state_arrays({"matrix": np.eye(2)})
