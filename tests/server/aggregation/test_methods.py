"""Robust rules in the methods: each that averages models takes them, and the shared checks hold with each rule."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.server import averaging as module
from flwr_kd.server.aggregation import Rule
from flwr_kd.server.records import VoidRoundsError
from flwr_kd.strategies.fedavg import FedAvg
from flwr_kd.strategies.fedproto import FedProto
from flwr_kd.testing import CHECKS
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, numbers
from flwr_kd.testing.recording import Case
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.wording import Interface, speaking

RULES = ["median", "trimmed-mean:0.25", "krum:0", "multi-krum:0:2", "geometric-median", "norm-bound:1.5"]
AVERAGING = [name for name, method in registry.methods().items() if method.strategy.averages_models]
OTHERS = [name for name in registry.methods() if name not in AVERAGING]
CHECKED = [
    "two-rounds-reach-everyone",
    "a-client-fails-raise",
    "garbage-fewer-arrays",
    "all-clients-fail-raise",
    "same-seed-same-numbers",
    "a-resumed-run-equals-an-uninterrupted-one",
    "flowers-own-loop",
    "memory-of-an-honest-reply",
]
"""Checks whose result a rule could change: of runs, faults, resumption, fuzzing and memory."""


def test_the_methods_that_average_are_known() -> None:
    """FedProto, FedMD, KT-pFL, FedGKT and FedDKC send no weights; the others here keep a model per client."""
    assert {"fedavg", "fedhead", "fedhyb", "feddf", "pfeddf", "fedgen", "fedgen-head", "dafkd"} <= set(
        AVERAGING
    )
    assert {"fedproto", "fedmd", "ktpfl", "ktpfl-weights", "fedgkt", "fedamp", "fedfomo", "pfedhn"} <= set(
        OTHERS
    )


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_that_averages_nothing_refuses_a_rule(name: str) -> None:
    federation = Federation(name)
    federation.aggregation = "median"
    with pytest.raises(
        ConfigError,
        match=r'aggregation="mean"( or .*)? expected: .* averages no models of clients, got median',
    ):
        federation.strategy()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in AVERAGING if not name.startswith("fedhead")])
def test_one_malicious_client_of_five_does_little_harm(name: str) -> None:
    """It adds noise of a standard deviation of 100 to its weights: a fifth of that is in the mean."""
    largest = {}
    for rule in ("mean", "median"):
        federation = Federation(name, 5, attack="gaussian:100", attackers={1})
        federation.aggregation = rule
        strategy, result = federation.run(rounds=1)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (5, 0)
        largest[rule] = largest_of(result.arrays, strategy)
    # The generators that FedGen trains against all heads grow with them.
    assert largest["median"] < 16
    assert largest["mean"] > 2 * largest["median"]


def largest_of(arrays: ArrayRecord, strategy: Any) -> float:
    """Return the largest number of the global arrays; without them, of the strategy's state."""
    kept = [array.numpy() for array in arrays.values()] or list(strategy.state_arrays().values())
    return max(float(np.abs(array).max()) for array in kept if array.dtype.kind == "f" and array.size)


@pytest.mark.parametrize("name", ["fedhead", "fedhead-plus"])
def test_a_sectors_mean_is_robust(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a malicious leader distils replaces it, so the mean is looked at before the leader has it."""
    means: list[float] = []
    kind = registry.get(name).strategy
    real = kind.finish_round

    def noting(strategy: Any, server_round: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        assert arrays is not None
        means.append(largest_of(arrays, strategy))
        return real(strategy, server_round, arrays)

    monkeypatch.setattr(kind, "finish_round", noting)
    for rule in ("median", "mean"):
        federation = Federation(name, 5, attack="gaussian:100", attackers={1})
        federation.aggregation = rule
        federation.run(rounds=1, settings=["sectors=1"])
    assert means[0] < 8 < 16 < means[1]


def test_clients_whose_replies_are_dropped_do_not_end_the_rounds_of_the_others() -> None:
    federation = Federation("fedavg", 6, attack="nan", attackers={1})
    federation.aggregation = "multi-krum:1:5"
    _, result = federation.run(rounds=2)
    assert [(stats.participants, stats.void) for stats in result.rounds] == [(5, False)] * 2
    federation = Federation("fedavg", 5, attack="nan", attackers={1})
    federation.aggregation = "multi-krum:1:4"
    with pytest.raises(VoidRoundsError):  # Four are too few to tell one liar from the others.
        federation.run(rounds=1)


@pytest.mark.parametrize("name", ["fedhead", "fedhead-plus"])
def test_a_malicious_leader_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, flower_log: list[str]
) -> None:
    """It leads before all others. What it distils is a whole sector's model."""
    module = importlib.import_module(registry.get(name).strategy.__module__)
    monkeypatch.setattr(module, "draw_leader", lambda counts, rng, *, leader: 1 if len(counts) == 5 else 0)
    largest, second = {}, {}
    for rule in ("mean", "median"):
        flower_log.clear()
        federation = Federation(name, 5, attack="gaussian:100", attackers={1})
        federation.aggregation = rule
        strategy, result = federation.run(rounds=1, settings=["sectors=1"])
        largest[rule] = largest_of(result.arrays, strategy)
        second[rule] = any("leads in place of" in line for line in flower_log)
        assert any("is far off, and left out" in line for line in flower_log) == second[rule]
    assert largest["median"] < 8 < 64 < largest["mean"]
    assert second == {"mean": False, "median": True}


@pytest.mark.parametrize("name", ["pfedhn", "pfedhn-pc"])
def test_long_updates_are_bounded_where_the_server_learns_from_them(name: str) -> None:
    """The steps of a hypernetwork, with a client that reports a change a thousand times as large as its own."""
    largest = {}
    for attack in (None, "scale:1000"):
        for rule in ("mean", "norm-bound:1"):
            federation = Federation(name, 5, attack=attack, attackers={1} if attack else set())
            federation.aggregation = rule
            strategy, _ = federation.run(rounds=1, settings=["server-clip-norm=1000000"])
            largest[attack, rule] = largest_of(ArrayRecord(), strategy)
    plain = largest[None, "mean"]
    assert largest[None, "norm-bound:1"] == pytest.approx(plain, rel=0.01)
    assert largest["scale:1000", "mean"] > 1e5 * plain
    assert largest["scale:1000", "norm-bound:1"] < 20 * plain


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("check", CHECKED)
def test_the_shared_checks_hold_with_each_rule(check: str, rule: str) -> None:
    CHECKS[check](Case("fedavg", aggregation=rule), mutations=30)


@pytest.mark.long
@pytest.mark.parametrize(("name", "rule"), [("fedhkd", "multi-krum:0:2"), ("pfedme", "trimmed-mean:0.25")])
def test_other_methods_can_be_resumed_with_a_rule(name: str, rule: str) -> None:
    CHECKS["a-resumed-run-equals-an-uninterrupted-one"](Case(name, aggregation=rule), mutations=30)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "rule"), [*(("fedavg", rule) for rule in RULES), ("fedhkd", "multi-krum:0:2")]
)
def test_aggregations_of_mutated_replies_do_no_harm(name: str, rule: str, mutations: int) -> None:
    CHECKS["aggregations-of-mutated-replies"](Case(name, aggregation=rule), mutations=mutations)


def test_the_rule_is_applied_to_what_the_clients_sent(federation: Any) -> None:
    """A strategy that notes the replies: the new arrays are numpy's median of them."""
    sent: list[list[np.ndarray]] = []

    class Noting(FedAvg):
        def aggregate_phase(self, phase: str, server_round: int, replies: Any, arrays: Any) -> Any:
            kept = list(replies)
            sent.extend([np.array(array) for array in reply.arrays] for reply in kept)
            return super().aggregate_phase(phase, server_round, kept, arrays)

    fed = federation("fedavg")
    strategy = Noting(fed.strategy().config, aggregation="median", min_available_nodes=4)
    result = strategy.start(InlineGrid(fed.app(), 4), fed.initial(), num_rounds=1)
    for index, array in enumerate(result.arrays.to_numpy_ndarrays()):
        np.testing.assert_allclose(
            array, np.median(np.stack([model[index] for model in sent]), axis=0), rtol=1e-6
        )


def test_an_update_is_clipped_from_the_rounds_global_model(federation: Any) -> None:
    """With a tiny bound the model stays where it was: the reference is the model that was sent, not zero."""
    fed = federation("fedavg")
    fed.aggregation = "norm-bound:1e-9"
    _, result = fed.run(rounds=2)
    for name, array in fed.initial().items():
        np.testing.assert_allclose(result.arrays[name].numpy(), array.numpy(), atol=1e-6)


def test_a_rule_needs_its_number_of_clients() -> None:
    with pytest.raises(ConfigError, match=r'aggregation="krum:1" needs at least 5 clients .*, got 4'):
        FedAvg(aggregation="krum:1", min_available_nodes=4)
    with (
        speaking(Interface.COMMAND),
        pytest.raises(ConfigError, match="--aggregation mean expected: FedProto"),
    ):
        FedProto(aggregation="krum:1", min_available_nodes=9)
    assert FedAvg(aggregation="krum:1", min_available_nodes=5, min_train_nodes=2).min_train_nodes == 5
    assert FedAvg(aggregation="median").min_train_nodes == 1
    assert FedAvg().rule == Rule()


def test_a_round_with_too_few_replies_for_the_rule_is_void(federation: Any) -> None:
    fed = federation("fedavg", clients=5)
    fed.aggregation = "krum:1"
    _, result = fed.run(rounds=2, grid={"faults": {0: Fault("raise", frozenset({1}))}})
    assert [(stats.void, stats.participants) for stats in result.rounds] == [(True, 4), (False, 5)]


def test_models_that_wait_for_a_rule_are_in_the_folder_of_checkpoints(
    federation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no memory for models, the numbers are the same, and no file stays."""
    fed = federation("fedavg")
    fed.aggregation = "trimmed-mean:0.25"
    expected = numbers(fed.run()[1])
    small = functools.partial(module.new_mean, memory=0)
    monkeypatch.setattr(module, "new_mean", small)
    assert numbers(fed.run(checkpoint_dir=tmp_path)[1]) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]
