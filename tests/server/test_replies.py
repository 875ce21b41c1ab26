"""Replies that cannot be used cost their own contribution only, and no memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.client.task import Answer, Task
from flwr_kd.server.records import Node, Reply, VoidRoundsError
from flwr_kd.server.replies import Replies, TooFewReplies
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient, Prototypes
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.delivery import lifetime
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import PayloadError
from tests.server.federations import QUICK, Net, Note, OnePhase, Toy, Watched, claiming, initial, size_of


def test_a_reply_that_the_method_refuses_is_dropped(toy: Any, flower_log: list[str]) -> None:
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


def test_unexpected_arrays_or_payloads_are_dropped(toy: Any, flower_log: list[str]) -> None:
    def uninvited(content: RecordDict) -> None:
        content["fitres.parameters"] = ArrayRecord([np.zeros(3)])

    grid, _ = toy(faults={1: Fault("garbage", garble=uninvited)})
    strategy = Toy()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert strategy.calls[0] == (1, "ask", [0, 2, 3])
    assert "expected none in phase 'ask'" in flower_log[0]


@pytest.mark.parametrize("value", [5.0, -0.1])
def test_an_impossible_accuracy_is_dropped(grid_of: Any, value: float, flower_log: list[str]) -> None:
    class Boaster(FedAvgClient):
        def phase_train(self, task: Task) -> Answer:
            answer = super().phase_train(task)
            if self.context.node_config["partition-id"] == 1:
                answer.metrics["local-accuracy"] = value
            return answer

    result = FedAvg(min_available_nodes=3, **QUICK).start(grid_of(Boaster), initial(), num_rounds=1)
    assert (result.rounds[0].participants, result.rounds[0].failures) == (2, 1)
    # Its own measurement, after the last round, is possible.
    assert (sorted(result.rounds[0].clients), result.rounds[0].received) == ([0, 1, 2], [1])
    assert any(f"'local-accuracy' must be in [0, 1], got {value}" in line for line in flower_log)


def test_knowledge_is_not_held_while_the_next_reply_is_fetched(make_blobs: Callable[..., Any]) -> None:
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
    assert "(partition 2) failed: it did not reply in time, or its reply was lost" in line


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
    with pytest.raises(VoidRoundsError):
        OnePhase(min_available_nodes=1).start(Failing(base._app, 1), ArrayRecord(), num_rounds=1)
    shown = [line for line in flower_log if "CUDA" in line]
    assert len(shown) == 1
    assert shown[0].endswith("failed: RuntimeError: CUDA out of memory")
    assert "ray::" not in "".join(flower_log)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_node_that_does_not_reply_costs_the_timeout_only(
    toy: Any, flower_log: list[str], workers: int
) -> None:
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
    assert "(partition 1) did not reply in time" in flower_log[0]
    # They live on while the others' answers are fetched: 200 seconds, and two for each.
    assert {m.metadata.ttl for m in grid.sent} == {timeout + 200 + 4 * 2}


def test_a_late_reply_does_not_count_in_the_next_round(toy: Any) -> None:
    grid, _ = toy(faults={1: Fault("late", frozenset({1}))})
    strategy = OnePhase()
    result = strategy.start(grid, ArrayRecord(), num_rounds=2, timeout=0.3)
    assert strategy.calls == [(1, "ask", [0, 2, 3]), (2, "ask", [0, 1, 2, 3])]
    assert [r.failures for r in result.rounds] == [1, 0]


@pytest.mark.parametrize("first", [0, 3])
def test_a_client_that_does_not_reply_does_not_cost_the_other_replies(first: int, federation: Any) -> None:
    """Wherever it stands in the order: theirs live until they are fetched."""
    faults = {first: Fault("silent", frozenset({1}))}
    _, result = federation("fedavg").run(rounds=2, grid={"faults": faults}, timeout=1.0)
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    assert lifetime(100.0, 50) == 100 + 200 + 2 * 50


def test_a_reply_whose_time_to_live_is_over_is_gone(federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before rests on: the grid treats messages as a SuperLink does."""
    # The grid's clock stops while nodes work, the server's does not: at the same time they would race.
    monkeypatch.setattr("flwr_kd.server.messages.lifetime", lambda timeout, count: timeout / 2)
    faults = {0: Fault("silent", frozenset({1}))}
    # Round 2 has to be over before its messages expire.
    _, result = federation("fedavg").run(rounds=2, grid={"faults": faults}, timeout=3.0)
    assert [(r.participants, r.failures) for r in result.rounds] == [(0, 4), (4, 0)]


@pytest.mark.parametrize(
    ("given", "counted", "why"),
    [(None, 25, "it said 25 in the handshake"), (24, 24, "the bound is max_examples=24")],
)
def test_the_weight_that_a_client_claims_is_capped(
    given: int | None, counted: int, why: str, federation: Any, flower_log: list[str]
) -> None:
    fed = federation("fedavg", clients=3)
    models: list[list[np.ndarray]] = []

    class Noting(FedAvg):
        def aggregate_phase(self, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
            kept = list(replies)
            models.extend([np.array(a) for a in reply.arrays] for reply in kept)
            weights.extend(reply.num_examples for reply in kept)
            return super().aggregate_phase(phase, server_round, kept, arrays)

    weights: list[int] = []
    strategy = Noting(max_examples=given, min_available_nodes=3, **QUICK)
    grid = InlineGrid(fed.app(), 3, faults={1: claiming(2**53)})
    result = strategy.start(grid, fed.initial(), num_rounds=2)
    honest = 26 if given is None else 24
    assert weights == [24, counted, honest] * 2
    last = [np.average(np.float64(c), axis=0, weights=weights[:3]) for c in zip(*models[3:], strict=True)]
    for found, expected in zip(result.arrays.to_numpy_ndarrays(), last, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    line, *more = flower_log
    assert f"(partition 1) claims {2**53} samples, and counts as {counted}: {why}" in line
    # The third client has 26 samples, more than the option says that any has.
    assert len(more) == (given is not None)


def test_a_lie_in_the_handshake_weighs_no_more_than_ten_medians(
    federation: Any, make_model: Any, make_blobs: Any
) -> None:
    """Three clients of 24, 10^12 and 26 samples: the second counts as 260, also for the classes that it knows."""
    fed = federation("fedproto", clients=3)

    class Liar(FedProtoClient):
        def get_properties(self, config: Any) -> Any:
            return {**super().get_properties(config), "num-examples": 10**12}

        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, _, metrics = super().fit(parameters, config)
            sent = Prototypes.from_bytes(metrics["payload"])
            lie = replace(sent, counts=np.full_like(sent.counts, 10**9))
            return arrays, 10**12, {**metrics, "payload": lie.to_bytes()}

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] != 1:
            return fed.client_fn(context)
        return Liar(make_model(), make_blobs(25, 1), make_blobs(8, 101), context=context).to_client()

    strategy = fed.strategy()
    strategy.start(InlineGrid(ClientApp(client_fn=client_fn), 3), ArrayRecord(), num_rounds=1)
    assert strategy.max_examples == 260
    assert strategy.prototypes.counts.tolist() == [260 + 6 + n for n in (7, 7, 6, 6)]


@pytest.mark.parametrize("name", ["fedproto", "fedhkd"])
def test_class_counts_are_capped(name: str, federation: Any) -> None:
    strategy, _ = federation(name).run(max_examples=2, rounds=1)
    counts = {k: v for k, v in strategy.state_arrays().items() if "counts" in k}
    (found,) = counts.values()
    # Each of the four clients has six or seven samples of each class; FedHKD does not share all of them.
    assert found.max() == 8
    assert name == "fedhkd" or found.tolist() == [8, 8, 8, 8]


def test_a_payload_cannot_be_larger_than_what_the_classes_need() -> None:
    node = Node(1, num_classes=10, feature_shape=(64,))
    hkd = registry.get("fedhkd").strategy()
    assert hkd.payload_limit("train", node) == 10 * (8 + 64 * 4 + 10 * 4 + 8)
    assert registry.get("fedhkd").strategy(max_payload_bytes=100).payload_limit("train", node) == 100
    proto = FedProto()
    assert proto.payload_limit("train", node) == 10 * (8 + 64 * 4 + 8)
    with pytest.raises(PayloadError, match=r"3000000 bytes is more than max_payload_bytes = 2720"):
        proto.reply_payloads["train"].from_bytes(
            b"x" * 3_000_000, max_bytes=proto.payload_limit("train", node)
        )


@pytest.mark.parametrize("again", [True, False], ids=["error", "nothing"])
def test_what_flower_cannot_decode_costs_its_own_contribution(
    again: bool, federation: Any, flower_log: list[str]
) -> None:
    """A client's bytes are decoded inside ``pull_messages``; what that raises must not end the run, nor hold it up.

    As a SuperLink does, the grid hands out each answer once.
    """

    class Undecodable(InlineGrid):
        lost: ClassVar[dict[str, Message]] = {}

        def pull_messages(self, message_ids: Any) -> Any:
            for message_id in message_ids:
                if message_id in self.lost:
                    return [self.lost[message_id]]
            came = list(super().pull_messages(message_ids))
            for reply in came:
                node = self.contexts[reply.metadata.src_node_id].node_config["partition-id"]
                if node == 2 and reply.metadata.message_type == "train":
                    if again:
                        sent = self.sent[reply.metadata.reply_to_message_id]
                        self.lost[sent.metadata.message_id] = Message(Error(3, "gone"), reply_to=sent)
                    raise ValueError("Invalid header\nof an object")
            return came

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            self.sent = dict(zip(ids, messages, strict=True))
            return ids

    fed = federation("fedavg")
    strategy: KDStrategy = fed.strategy()
    # After an error nothing waits for the timeout, which is longer than a test may take.
    result = strategy.start(
        Undecodable(fed.app(), 4), fed.initial(), num_rounds=2, timeout=3600.0 if again else 2.0
    )
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1)] * 2
    assert len(flower_log) == 2
    if again:
        assert all("is dropped: it cannot be fetched: Invalid header" in line for line in flower_log)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedhkd"])
def test_a_mean_holds_no_more_for_more_clients(name: str, make_blobs: Any) -> None:
    """In models; the client that is at work and Flower's copies of its answer are among them."""
    method = registry.get(name)

    class Echo(method.client):  # type: ignore[misc, name-defined]
        def phase_train(self, task: Any) -> Any:
            self.load(task)
            return Answer(self.arrays(task.names), self.knowledge(task), num_examples=12)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, 20_000), torch.nn.Linear(20_000, 4)
        )

    def client_fn(context: Context) -> Any:
        return Echo(model(), make_blobs(12, 0), context=context, device="cpu").to_client()

    def peak(clients: int, kind: Any) -> float:
        grid = InlineGrid(ClientApp(client_fn=client_fn), clients)
        initial = ArrayRecord(model().state_dict())
        strategy = kind(method.config(["batch-size=8"]), min_available_nodes=clients)
        gc.collect()
        tracemalloc.start()
        try:
            result = strategy.start(grid, initial, num_rounds=1)
            highest = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert result.rounds[0].participants == clients
        return highest / sum(len(array.data) for array in initial.values())

    class HoldsAll(method.strategy):  # type: ignore[misc, name-defined]
        def aggregate_phase(self, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
            return super().aggregate_phase(phase, server_round, list(replies), arrays)

    few, many = peak(2, method.strategy), peak(16, method.strategy)
    assert many < few + 1.5 < 15
    # As it would be if all were held.
    assert peak(16, HoldsAll) > 16


@pytest.mark.parametrize("name", ["fedproto", "fedhkd"])
def test_knowledge_beyond_the_limit_is_refused(name: str, federation: Any, flower_log: list[str]) -> None:
    """Squares of it would be infinite at every client in the next round."""
    fed = federation(name)
    kind = fed.strategy().reply_payloads["train"]
    field = {"fedproto": "prototypes", "fedhkd": "representations"}[name]

    def garble(content: RecordDict) -> None:
        record = content.config_records["fitres.metrics"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "check", lambda self: None)
            message = kind.from_bytes(record["payload"])
            values = np.full_like(getattr(message, field), 1e30)
            record["payload"] = replace(message, **{field: values}).to_bytes()

    faults = {1: Fault("garbage", frozenset({1}), garble)}
    _, result = fed.run(rounds=2, grid={"faults": faults})
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 1), (4, 0)]
    (line,) = [line for line in flower_log if "is dropped" in line]
    assert f"field '{field}' must be within ±65504, got 1e+30" in line


# ---------------------------------------------------------------------- the object itself


def delivered(count: int) -> list[tuple[Any, Any]]:
    """Return pairs of a number in place of a message, and nothing that arrived."""
    return [(number, None) for number in range(count)]


def accepting(*usable: int) -> Callable[[Any, Any], Reply[Any] | None]:
    """Accept the replies to some messages."""
    arrays = [np.zeros(2)]
    return lambda number, arrived: Reply(Node(number), arrays, 5, {}) if number in usable else None


def ids(replies: Iterable[Reply[Any]]) -> list[int]:
    return [reply.node.node_id for reply in replies]


def test_a_look_at_the_first_reply_does_not_use_it_up() -> None:
    replies = Replies(delivered(4), accepting(1, 3))
    assert replies.look()
    assert replies.look()
    assert replies.asked == 2
    assert ids(replies) == [1, 3]
    assert (replies.asked, ids(replies.used)) == (4, [1, 3])
    assert all(reply.arrays == [] and reply.payload is None for reply in replies.used)
    assert next(replies, None) is None


def test_replies_are_read_only_when_they_are_asked_for() -> None:
    read: list[int] = []

    def check(number: Any, arrived: Any) -> Reply[Any]:
        read.append(number)
        return Reply(Node(number), [], 1, {})

    replies: Replies[Any] = Replies(delivered(3), check)
    assert replies.look()
    assert read == [0]
    assert next(replies).node.node_id == 0
    assert read == [0]
    replies.drain()
    assert read == [0, 1, 2]
    assert len(replies.used) == 3


def test_too_few_replies_end_the_iteration_in_an_exception() -> None:
    replies = Replies(delivered(4), accepting(0, 2), least=3)
    assert replies.look()
    assert next(replies).node.node_id == 0
    with pytest.raises(TooFewReplies):
        list(replies)
    with pytest.raises(TooFewReplies):
        replies.drain()
    assert ids(replies.used) == [0, 2]
    with pytest.raises(TooFewReplies):
        Replies(delivered(2), accepting(), least=1).look()
    with pytest.raises(TooFewReplies):
        Replies([], accepting(), least=1).look()


def test_no_replies_are_enough_where_none_are_needed() -> None:
    replies = Replies(delivered(2), accepting())
    assert not replies.look()
    assert (replies.asked, list(replies)) == (2, [])
