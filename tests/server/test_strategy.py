"""The interface of a strategy: options, phases, Flower's own loop, the mean of the base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy

from flwr_kd.checks import ConfigError
from flwr_kd.server.records import KDResult, Node, Reply, VoidRoundsError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.strategies.fedavg import FedAvg
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.testing.faults import Fault
from tests.server.federations import QUICK, Net, OnePhase, Toy, drawn, events, initial


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


def test_a_client_that_failed_a_phase_is_left_out_of_the_next(toy: Any) -> None:
    grid, _ = toy(faults={2: Fault("raise", frozenset({1}))})
    strategy = Toy()
    strategy.start(grid, ArrayRecord(), num_rounds=2)
    assert strategy.calls[:3] == [(1, "ask", [0, 1, 3]), (1, "tell", [0]), (1, "close", [0])]
    assert strategy.calls[3:] == [(2, "ask", [0, 1, 2, 3]), (2, "tell", [0, 2]), (2, "close", [0, 2])]


def test_an_unknown_phase_fails_at_the_client_with_a_clear_text(toy: Any, flower_log: list[str]) -> None:
    class Other(Toy):
        phases = ("dance",)

    grid, _ = toy()
    with pytest.raises(VoidRoundsError, match="had 0 usable replies and 4 failures"):
        Other().start(grid, ArrayRecord(), num_rounds=1)
    assert "ToyClient does not know the phase 'dance'" in flower_log[0]


def test_several_phases_need_our_own_start(toy: Any) -> None:
    grid, _ = toy()
    with pytest.raises(RuntimeError, match=r"phases ask, tell, close per round; call its own start\(\)"):
        Toy().configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    with pytest.raises(RuntimeError, match="ask, tell, close"):
        Strategy.start(Toy(), grid, ArrayRecord(), num_rounds=1)


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


def test_the_result_loads_and_does_not_print_its_weights(grid_of: Any) -> None:
    result = FedAvg(**QUICK).start(grid_of(), initial(), num_rounds=1)
    Net().load_state_dict(result.arrays.to_torch_state_dict())
    assert list(result.arrays) == list(Net().state_dict())
    assert "NUMPY" not in str(result)
    assert len(str(result)) < 1000


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


def test_clients_without_samples_are_averaged_evenly() -> None:
    strategy = FedAvg()
    strategy.prepare(ArrayRecord({"w": Array(np.zeros(1, dtype=np.float32))}))
    replies = [Reply(Node(i), [np.array([value], dtype=np.float32)], 0, {}) for i, value in enumerate((1, 3))]
    mean = strategy.aggregate_phase("train", 1, replies, None)
    assert mean is not None
    assert mean["w"].numpy().tolist() == [2.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction_train": 0.0}, r"fraction_train must be in \(0, 1\], got 0.0"),
        ({"fraction_train": 1.5}, r"fraction_train must be in \(0, 1\], got 1.5"),
        ({"fraction_evaluate": -0.1}, r"fraction_evaluate must be in \[0, 1\], got -0.1"),
        ({"fraction_train": float("nan")}, "fraction_train must be in"),
        ({"fraction_train": True}, "fraction_train must be in"),
        ({"min_train_nodes": 0}, "min_train_nodes must be a whole number from 1 to"),
        ({"min_available_nodes": 0}, "min_available_nodes must be a whole number from 1 to"),
        ({"max_payload_bytes": 0}, "max_payload_bytes must be a whole number from 1 to"),
        ({"resume": True}, "resume=True needs checkpoint_dir"),
        (
            {"gama": 0.1},
            r"unknown hyper-parameter or option 'gama' \(did you mean 'gamma'\?\); valid: .*threshold",
        ),
        ({"gamma": -1.0}, "gamma must be >= 0, got -1.0"),
        ({"config": FedAvg().config}, "config must be a FedHKDConfig, got FedAvgConfig"),
        (
            {"config": FedHKD().config, "gamma": 1.0},
            r"either config or hyper-parameters, got config and .*gamma",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FedHKD(**options)


def test_wrong_arguments_of_start_are_refused(toy: Any, grid_of: Any) -> None:
    grid, _ = toy()
    with pytest.raises(ConfigError, match="num_rounds must be a whole number from 1 to"):
        Toy().start(grid, ArrayRecord(), num_rounds=0)
    with pytest.raises(ConfigError, match="timeout must be in"):
        Toy().start(grid, ArrayRecord(), timeout=0)
    with pytest.raises(
        ConfigError, match=r"FedAvg needs initial_arrays: ArrayRecord\(model.state_dict\(\)\)"
    ):
        FedAvg().start(grid_of(), ArrayRecord())
    assert grid.sent == []


def test_the_base_has_no_state_to_load() -> None:
    with pytest.raises(ValueError, match=r"FedAvg has no state of its own, got \['matrix'\]"):
        FedAvg().load_state_arrays({"matrix": np.eye(2)})


@pytest.mark.parametrize(
    ("option", "value"), [("max_void_rounds", 0), ("max_examples", 0), ("max_examples", 2**54)]
)
def test_options_are_checked(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{option} must be a whole number from 1 to .*, got {value}"):
        FedAvg(**{option: value})
