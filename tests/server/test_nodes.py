"""Handshakes: which clients are accepted, which are waited for, and which are asked again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp

from flwr_kd.data import ArrayDataset
from flwr_kd.models import build_model
from flwr_kd.server.records import HandshakeError, Node, Reply, RoundStats
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import METHODS, QUICK, Coming, Net, OnePhase, Toy, ToyClient, events, initial


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
def test_a_malformed_handshake_is_refused(grid_of: Any, name: str, value: Any) -> None:
    class Malformed(FedAvgClient):
        def properties(self) -> dict[str, Any]:
            return {name: value} if self.context.node_config["partition-id"] == 1 else {}

    with pytest.raises(HandshakeError, match=name):
        FedAvg(min_available_nodes=3).start(grid_of(Malformed), initial(), num_rounds=1)


def test_one_client_does_not_decide_what_the_others_must_be(grid_of: Any) -> None:
    """The first in the order of partitions has other features; it is the one that is refused."""
    grid = grid_of(FedProtoClient, model=lambda index: Net(7 if index == 0 else 5))
    result = FedProto(min_available_nodes=2, **QUICK).start(grid, ArrayRecord(), num_rounds=1)
    assert set(result.rounds[0].bytes_by_partition) == {1, 2}


@pytest.mark.parametrize("name", ["fedhkd", "fedproto", "fedgkt", "ktpfl"])
def test_without_a_majority_nobody_is_right(name: str, federation: Any, flower_log: list[str]) -> None:
    """One of two clients claims 7 classes: the error names both. With a third client, the majority decides."""
    fed = federation(name, clients=3)

    def client_fn(context: Context) -> Any:
        client = fed.client_fn(context)
        if context.node_config["partition-id"] == 0:
            client.numpy_client.properties = lambda ours=client.numpy_client.properties: {
                **ours(),
                "num-classes": 7,
            }
        return client

    grid = InlineGrid(ClientApp(client_fn=client_fn), 2)
    first, second = grid.contexts
    sides = rf"node {first} \(partition 0\): 7 classes.*node {second} \(partition 1\): 4 classes"
    text = rf"0 clients fit, 2 are needed; .*{sides}"
    with pytest.raises(HandshakeError, match=text):
        fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=1, timeout=30.0)
    result = fed.strategy(min_available_nodes=2).start(
        InlineGrid(ClientApp(client_fn=client_fn), 3), fed.initial(), num_rounds=1, timeout=30.0
    )
    assert set(result.rounds[0].bytes_by_partition) == {1, 2}


def test_a_partition_that_two_clients_claim_is_an_error_where_both_are_needed(federation: Any) -> None:
    fed = federation("fedavg", clients=3)
    grid = InlineGrid(fed.app(), 3, node_configs=[{}, {}, {"partition-id": 0}])
    first, _, third = grid.contexts
    with pytest.raises(
        HandshakeError,
        match=rf"2 clients fit, 3 are needed; .*(node {first}.*node {third}|node {third}.*node {first}) does",
    ):
        fed.strategy().start(grid, fed.initial(), num_rounds=1, timeout=3600)


def test_a_partition_belongs_to_one_client(flower_log: list[str], make_blobs: Callable[..., Any]) -> None:
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


def test_waiting_for_nodes_ends(toy: Any) -> None:
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
    # A node that comes back repeats its handshake.
    assert len(grid.of_type("get_properties")) == 5


def nodes_that_raise(error: Exception) -> tuple[InlineGrid, list[int]]:
    """Return two nodes whose client_fn raises, and the list to which each call adds its node's id."""
    calls: list[int] = []

    def client_fn(context: Context) -> Any:
        calls.append(context.node_id)
        raise error

    return InlineGrid(ClientApp(client_fn=client_fn), num_nodes=2), calls


def test_clients_that_cannot_be_built_end_the_waiting(flower_log: list[str]) -> None:
    """Such as by a mistake in client_fn: nobody should have to wait an hour to read of it."""
    grid, calls = nodes_that_raise(ValueError("no such column: price"))
    # Long before the timeout, which is longer than a test may take.
    with pytest.raises(HandshakeError, match=r"0 clients fit, 2 are needed; .*no such column: price"):
        FedAvg(min_available_nodes=2).start(grid, initial(), num_rounds=1, timeout=3600)
    # An error of this kind stays until the client is changed.
    assert set(Counter(calls).values()) == {1}
    assert [line.split(" is ")[1] for line in flower_log] == [
        "refused: its client failed: ValueError: no such column: price"
    ] * 2


def test_errors_that_may_pass_are_asked_about_three_times_before_the_waiting_ends() -> None:
    grid, calls = nodes_that_raise(RuntimeError("CUDA out of memory"))
    with pytest.raises(HandshakeError, match=r"0 clients fit, 2 are needed; .*CUDA out of memory"):
        FedAvg(min_available_nodes=2).start(grid, initial(), num_rounds=1, timeout=3600)
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


def test_without_a_partition_id_the_node_id_counts(toy: Any) -> None:
    grid, _ = toy(clients=3)

    class Anonymous(OnePhase):
        def accept_node(self, node: Node) -> str | None:
            object.__setattr__(node, "partition_id", None)
            return None

        def check_reply(self, phase: str, reply: Reply) -> None:
            """It is not known whose note it is."""

    result = Anonymous().start(grid, ArrayRecord(), num_rounds=1)
    assert set(result.rounds[0].bytes_by_partition) == set(grid.contexts)


def test_a_round_waits_for_nodes_that_come_back(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedavg", clients=3)
    # Asked once before round 1, once per round, and again while waiting.
    grid = Coming(fed.app(), 3, since={}, gone=lambda partition, asked: partition < 2 and 3 <= asked <= 6)
    result = fed.strategy(min_train_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [(r.participants, r.void) for r in result.rounds] == [(3, False)] * 3
    assert grid.asked > 6
    assert any("1 clients are there, a round needs 2: waiting" in line for line in flower_log)


@pytest.mark.parametrize("name", ["fedhead", "fedhead-plus"])
def test_fedhead_goes_on_with_fewer_clients_than_sectors(name: str, federation: Any) -> None:
    """Sectors are those of the clients that were there when the run began."""
    fed = federation(name, clients=2)
    grid = Coming(fed.app(), 2, since={}, gone=lambda partition, asked: partition == 1 and asked == 2)
    result = fed.strategy("sectors=2").start(grid, fed.initial(), num_rounds=2, timeout=30.0)
    assert [r.participants for r in result.rounds] == [1, 2]


@pytest.mark.parametrize("name", METHODS)
def test_a_misfit_that_arrives_first_neither_ends_the_run_nor_defines_it(
    name: str, federation: Any, flower_log: list[str]
) -> None:
    """Its model has other classes, features and arrays; three that fit come later."""
    fed = federation(name)
    odd = build_model("lenet", input_shape=(1, 4, 4), num_classes=7, seed=0, feature_dim=5)
    method = fed.method

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 0:
            data = ArrayDataset(torch.zeros(14, 1, 4, 4), torch.arange(14) % 7)
            public = {"public_set": data} if method.public_at == "clients" else {}
            client = method.client(
                odd, data, context=context, device="cpu", **method.client_options, **public
            )
            return client.to_client()
        return fed.client_fn(context)

    grid = Coming(ClientApp(client_fn=client_fn), 4, since={1: 2, 2: 4, 3: 6}, gone=lambda *_: False)
    result = fed.strategy(min_available_nodes=3).start(grid, fed.initial(), num_rounds=1, timeout=60.0)
    assert result.rounds[0].participants == 3
    assert set(result.rounds[0].bytes_by_partition) == {1, 2, 3}
    (line,) = [line for line in flower_log if "is refused" in line]
    (misfit,) = [i for i, c in grid.contexts.items() if c.node_config["partition-id"] == 0]
    assert line.startswith(f"node {misfit} is refused")


def test_a_node_that_joins_late_takes_part_from_the_next_round(federation: Any) -> None:
    fed = federation("fedhkd", clients=3)
    grid = Coming(fed.app(), 3, since={2: 2}, gone=lambda *_: False)
    strategy = fed.strategy(min_available_nodes=2)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [sorted(r.bytes_by_partition) for r in result.rounds] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert [r.participants for r in result.rounds] == [2, 3, 3]


def test_a_node_that_fails_the_handshake_is_logged_once(
    federation: Any, flower_log: list[str], make_model: Any, make_blobs: Any
) -> None:
    calls: list[int] = []

    def client_fn(context: Context) -> Any:
        if context.node_config["partition-id"] == 1:
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("the data is not mounted yet")
        return FedAvgClient(make_model(), make_blobs(16, 0), context=context, device="cpu").to_client()

    grid = InlineGrid(ClientApp(client_fn=client_fn), 2)
    result = FedAvg(min_available_nodes=2, **QUICK).start(
        grid, ArrayRecord(make_model().state_dict()), num_rounds=1, timeout=30.0
    )
    assert result.rounds[0].participants == 2
    (line,) = flower_log
    assert "did not complete the handshake, and is asked again" in line
    assert "the data is not mounted yet" in line


def test_a_node_that_was_fixed_is_accepted_later(federation: Any, flower_log: list[str]) -> None:
    """Refused for its model, away for a round, and back under the same id, as a SuperNode with a key is."""
    fed = federation("fedavg", clients=3)
    fed.models = ["mlp", "mlp", "lenet"]
    grid = Coming(fed.app(), 3, since={}, gone=lambda partition, asked: partition == 2 and asked == 3)

    def mend(stats: Any) -> None:
        fed.models = ["mlp", "mlp", "mlp"]

    strategy = fed.strategy(min_available_nodes=2, on_round=mend)
    result = strategy.start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [r.participants for r in result.rounds] == [2, 2, 3]
    assert sum("is refused" in line for line in flower_log) == 1


def test_another_node_with_the_same_partition_is_logged(federation: Any, flower_log: list[str]) -> None:
    fed = federation("fedavg", clients=3)
    claims = [{}, {}, {"partition-id": 1}]
    first, second, third = InlineGrid(fed.app(), 3).contexts
    away = {first: lambda asked: False, second: lambda asked: asked >= 3, third: lambda asked: asked < 3}

    class Replaced(InlineGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            return [i for i in self.contexts if not away[i](self.asked)]

    grid = Replaced(fed.app(), 3, node_configs=claims)
    result = fed.strategy(min_available_nodes=2).start(grid, fed.initial(), num_rounds=3, timeout=30.0)
    assert [sorted(r.bytes_by_partition) for r in result.rounds] == [[0, 1]] * 3
    (line,) = flower_log
    assert f"node {third} (partition 1) comes in place of node {second}" in line


def test_a_handshake_has_a_bound(federation: Any, flower_log: list[str]) -> None:
    class Endless(FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            names = json.dumps(["x" * 20] * 300_000)
            return {**super().get_properties(config), "arrays": f"[{names}, {names}, {names}]"}

    fed = federation("fedavg")
    ours = fed.client_fn

    def client_fn(context: Context) -> Any:
        client = ours(context)
        if context.node_config["partition-id"] == 1:
            client.numpy_client.__class__ = Endless
        return client

    result = fed.strategy(min_available_nodes=3).start(
        InlineGrid(ClientApp(client_fn=client_fn), 4), fed.initial(), num_rounds=1
    )
    assert result.rounds[0].participants == 3
    (line,) = flower_log
    assert "is refused: 'arrays' has 21600006 characters, more than 4000000" in line
