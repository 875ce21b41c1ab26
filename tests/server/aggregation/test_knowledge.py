"""Robust means of knowledge, against scipy, numpy and loops; and in the methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from scipy import stats

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.distillation.teachers import by_rule, ensemble_means, soft_labels
from flwr_kd.server.aggregation import Rule, knowledge_rule, outlying_rows, robust_average
from flwr_kd.strategies.dafkd import teacher_logits
from flwr_kd.strategies.fedgkt.messages import ClientFeatures
from flwr_kd.strategies.fedhkd import Knowledge, aggregate_knowledge
from flwr_kd.strategies.fedproto import aggregate_means
from flwr_kd.testing import CHECKS
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import Federation, numbers, quiet
from flwr_kd.testing.recording import Case
from flwr_kd.wording import Interface, speaking

MEDIAN = Rule("median")
WITH = [name for name, method in registry.methods().items() if method.strategy.averages_knowledge]
WITHOUT = [name for name in registry.methods() if name not in WITH]


RULES = ["median", "trimmed-mean:0.25"]
KINDS = ["fedproto", "fedhkd", "fedmd", "ktpfl", "feddf", "dafkd", "fedgkt"]
"""A method of each kind of knowledge, and of each way in which it is averaged."""
CHECKED = [
    "a-client-fails-raise",
    "garbage-fewer-arrays",
    "garbage-random-payload",
    "all-clients-fail-raise",
    "same-seed-same-numbers",
    "a-resumed-run-equals-an-uninterrupted-one",
    "memory-of-an-honest-reply",
]
"""Checks whose result a rule could change."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- functions


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_the_median_is_numpys(count: int) -> None:
    block = values(count, 3, 7)
    np.testing.assert_allclose(robust_average(block, MEDIAN), np.median(block, axis=0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("count", "share"), [(10, 0.1), (10, 0.2), (10, 0.4), (4, 0.25), (5, 0.2), (3, 0.0)])
def test_the_trimmed_mean_is_scipys_where_whole_values_are_cut(count: int, share: float) -> None:
    block = values(count, 9)
    found = robust_average(block, Rule("trimmed-mean", share=share))
    np.testing.assert_allclose(found, stats.trim_mean(block.numpy(), share, axis=0), rtol=1e-9, atol=1e-12)


def by_hand(column: list[float], weights: list[float], share: float) -> float:
    """Cut the share of the total weight off at each end, value by value."""
    pairs = sorted(zip(column, weights, strict=True))
    total, position, mass, summed = sum(weights), 0.0, 0.0, 0.0
    for value, weight in pairs:
        low, high = position / total, (position + weight) / total
        kept = max(min(high, 1 - share) - max(low, share), 0.0)
        position, mass, summed = position + weight, mass + kept, summed + kept * value
    return summed / mass


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.45])
def test_weights_are_cut_as_by_hand(share: float) -> None:
    block, weights = values(6, 5), values(6, 5, seed=1).abs()
    found = robust_average(block, Rule("trimmed-mean", share=share), weights)
    for d in range(5):
        expected = by_hand(block[:, d].tolist(), weights[:, d].tolist(), share)
        assert float(found[d]) == pytest.approx(expected)


def test_a_vote_without_weight_does_not_count() -> None:
    block = torch.tensor([[1.0], [2.0], [900.0], [3.0]])
    weights = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    assert robust_average(block, MEDIAN, weights).tolist() == pytest.approx([2.0])
    assert robust_average(block, MEDIAN, torch.zeros(4, 1)).tolist() == [0.0]


def test_distributions_stay_distributions_and_other_values_are_left_alone() -> None:
    rows = torch.softmax(values(5, 4, 3), dim=-1)
    average = robust_average(rows, MEDIAN)
    torch.testing.assert_close(average.sum(dim=-1), torch.ones(4, dtype=torch.float64))
    assert (average >= 0).all()
    plain = np.median(rows, axis=0)
    np.testing.assert_allclose(average, plain / plain.sum(axis=-1, keepdims=True), atol=1e-6)
    logits = 3 * values(5, 4, 3)
    np.testing.assert_allclose(robust_average(logits, MEDIAN), np.median(logits, axis=0), atol=1e-6)


@pytest.mark.parametrize("text", ["krum:1", "geometric-median", "trimmed-mean", "", None, "trimmed-mean:0.5"])
def test_other_rules_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="knowledge_aggregation"):
        knowledge_rule(text)


def test_rows_far_from_the_other_clients_are_outlying() -> None:
    clients = [values(20, 6, seed=k) for k in range(4)]
    assert not any(bool(rows.any()) for rows in outlying_rows(clients))
    clients[1][3:] = 65_000
    clients[2][0] = -40
    found = outlying_rows(clients)
    assert [int(rows.sum()) for rows in found] == [0, 17, 1, 0]
    assert bool(found[2][0])
    # Of two clients nobody knows which is wrong.
    assert not any(bool(rows.any()) for rows in outlying_rows(clients[:2]))


# ---------------------------------------------------------------------- prototypes and predictions


def test_prototypes_are_the_medians_over_the_clients_that_have_the_class() -> None:
    means = [values(3, 4, seed=k) for k in range(5)]
    means[2] = means[2] + 1e6
    counts = [torch.tensor([4, 0, 9]), torch.tensor([1, 2, 0]), *[torch.tensor([1000, 3, 0])] * 3]
    found = aggregate_means(means, counts, MEDIAN)
    assert found.counts.tolist() == [3005, 11, 9]
    for j in range(3):
        having = [mean[j].numpy() for mean, count in zip(means, counts, strict=True) if count[j] > 0]
        np.testing.assert_allclose(found.means[j], np.median(having, axis=0), rtol=1e-6, atol=1e-6)
    nobody = aggregate_means(means, [torch.zeros(3, dtype=torch.int64)] * 5, MEDIAN)
    assert nobody.means.abs().max() == 0


def test_hyper_knowledge_has_robust_representations_and_predictions_that_sum_to_one() -> None:
    local = [
        Knowledge(values(3, 4, seed=k), torch.softmax(values(3, 3, seed=k), dim=1), torch.tensor([2, 2, 0]))
        for k in range(5)
    ]
    local = [
        Knowledge(k.representations * k.known[:, None], k.predictions * k.known[:, None], k.counts)
        for k in local
    ]
    lie = Knowledge(local[0].representations - 1e4, local[0].predictions, local[0].counts)
    found = aggregate_knowledge([lie, *local], Rule("trimmed-mean", share=0.25))
    assert found.representations[:2].abs().max() < 3
    assert found.representations[2].abs().max() == 0
    torch.testing.assert_close(found.predictions.sum(1), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))


def test_the_teachers_median_is_that_of_their_probabilities() -> None:
    model = torch.nn.Linear(2, 3, bias=False)
    teachers = [{"weight": values(3, 2, seed=k).float().numpy()} for k in range(5)]
    teachers[4] = {"weight": np.full((3, 2), 1e3, np.float32) * np.float32([[1], [0], [-1]])}
    x = values(7, 2, seed=9).float()
    matching = by_rule(soft_labels(), "median")
    (found,), left_out = ensemble_means(model, teachers, [1, 1, 1, 1, 1000], lambda: [x[:4], x[4:]], matching)
    assert left_out == ()
    each = np.stack([torch.softmax(x @ torch.from_numpy(t["weight"]).T, dim=1).numpy() for t in teachers])
    plain = np.median(each, axis=0)
    np.testing.assert_allclose(found, plain / plain.sum(1, keepdims=True), atol=1e-5)


def test_dafkds_teacher_is_the_weighted_median_of_the_logits() -> None:
    logits = [values(4, 3, seed=k) for k in range(3)]
    weights = torch.tensor([[1.0] * 4, [0.0] * 4, [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(teacher_logits(logits, weights, MEDIAN), logits[0].float())
    even = torch.full((3, 4), 1 / 3, dtype=torch.float64)
    expected = np.median(np.stack(logits), axis=0)
    np.testing.assert_allclose(teacher_logits(logits, even, MEDIAN), expected, atol=1e-5)


# ---------------------------------------------------------------------- methods


def test_the_methods_with_knowledge_are_known() -> None:
    named = {
        "fedproto",
        "fedhkd",
        "fedmd",
        "ktpfl",
        "feddf",
        "fedhead",
        "fedhead-plus",
        "fedhyb",
        "dafkd",
        "fedgkt",
    }
    assert named <= set(WITH)
    assert {"fedavg", "fedprox", "ktpfl-weights", "fedamp", "fedhyb-1"} <= set(WITHOUT)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_method_that_averages_no_knowledge_refuses_a_rule(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r'knowledge_aggregation="mean" expected: .* no knowledge of clients'
    ):
        Federation(name).strategy(knowledge_aggregation="median")
    with (
        speaking(Interface.COMMAND),
        pytest.raises(ConfigError, match="--knowledge-aggregation mean expected"),
    ):
        Federation(name).strategy(knowledge_aggregation="median")


@pytest.mark.parametrize("name", [name for name in WITH if "dafkd" not in name])
def test_a_method_runs_and_is_resumed_with_a_rule(name: str, tmp_path: Any) -> None:
    """DaFKD's clients keep discriminators of their own, which here do not outlive the run."""
    options = {"knowledge_aggregation": "trimmed-mean:0.25"}
    strategy, result = Federation(name).run(rounds=2, **options)
    assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 0)] * 2
    if not strategy.sends_weights:
        return
    Federation(name).run(rounds=1, checkpoint_dir=tmp_path, **options)
    _, resumed = Federation(name).run(rounds=2, checkpoint_dir=tmp_path, resume=True, **options)
    assert numbers(resumed)[-len(result.arrays) :] == numbers(result)[-len(result.arrays) :]


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", KINDS)
def test_the_shared_checks_hold_with_a_rule(name: str, rule: str) -> None:
    case = Case(name, knowledge=rule)
    for check in CHECKED:
        if CHECKS[check].applies(case.method):
            CHECKS[check](case, mutations=30)


@pytest.mark.fuzz
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("check", ["aggregations-of-mutated-replies", "payloads-that-lie"])
def test_mutated_replies_do_no_harm(check: str, name: str, rule: str, mutations: int) -> None:
    case = Case(name, knowledge=rule)
    if CHECKS[check].applies(case.method):
        CHECKS[check](case, mutations=mutations)


def test_one_lying_client_does_not_move_the_prototypes() -> None:
    largest = {}
    for rule in ("mean", "median"):
        federation = Federation("fedproto", 5, attack="payload", attackers={1})
        strategy, _ = federation.run(rounds=1, knowledge_aggregation=rule)
        largest[rule] = float(strategy.prototypes.means.abs().max())
    assert largest["mean"] > 1.5 * largest["median"]


def test_the_consensus_of_fedmd_is_the_median_of_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry.get("fedmd").strategy
    real, seen = kind.targets, []

    def noting(strategy: Any, server_round: int, replies: Any, predictions: Any) -> Any:
        found = real(strategy, server_round, replies, predictions)
        seen.append((predictions, found))
        return found

    monkeypatch.setattr(kind, "targets", noting)
    Federation("fedmd").run(rounds=1, knowledge_aggregation="median")
    ((predictions, found),) = seen
    plain = np.median(predictions, axis=0)
    np.testing.assert_allclose(found[0], plain / plain.sum(1, keepdims=True), atol=1e-5)
    assert torch.equal(found[0], found[3])


@pytest.mark.parametrize("name", ["fedgkt", "feddkc-kkr"])
def test_features_out_of_range_are_left_out_with_a_warning(name: str, flower_log: list[str]) -> None:
    federation = Federation(name, 5, attack="payload", attackers={1})
    with quiet() as lines:
        strategy, result = federation.run(rounds=1, knowledge_aggregation="median")
    found = [line for line in lines if "are far from the other clients', and are left out" in line]
    assert len(found) == 1
    assert "of 25 rows" in found[0]
    assert "(partition 1)" in found[0]
    assert (result.rounds[0].participants, result.rounds[0].failures) == (5, 0)
    honest, _ = Federation(name, 5).run(rounds=1, knowledge_aggregation="median")
    # The honest clients still get logits for all of their samples.
    assert {key: value.shape for key, value in strategy.logits.items() if key != 1} == {
        key: value.shape for key, value in honest.logits.items() if key != 1
    }


@pytest.mark.parametrize("name", ["fedgkt", "feddkc-kkr"])
def test_logits_against_the_labels_teach_nothing(name: str) -> None:
    """What the server learns does not depend on them, while the rows' features and labels count."""

    def run(change: Any) -> tuple[dict[str, np.ndarray], list[str]]:
        def garble(content: RecordDict) -> None:
            if (metrics := content.config_records.get("fitres.metrics")) is not None:
                told = ClientFeatures.from_bytes(metrics["payload"])
                metrics["payload"] = change(told).to_bytes()

        faults = {1: Fault("garbage", garble=garble)}
        with quiet() as lines:
            strategy, _ = Federation(name, 5).run(
                rounds=1, knowledge_aggregation="median", grid={"faults": faults}
            )
        return strategy.state_arrays(), [line for line in lines if "have logits against their labels" in line]

    def wrong(steps: int) -> Any:
        def change(told: ClientFeatures) -> ClientFeatures:
            return replace(told, logits=np.eye(4, dtype=np.float32)[(told.labels + steps) % 4])

        return change

    def other_labels(told: ClientFeatures) -> ClientFeatures:
        moved = replace(told, labels=(told.labels + 1) % 4)
        return wrong(1)(moved)

    (first, lines), (second, _), (third, _), (right, none) = (
        run(change) for change in (wrong(1), wrong(2), other_labels, wrong(0))
    )
    assert none == []
    (line,) = lines
    assert "round 1: 25 of 25 rows of node" in line
    assert "(partition 1)" in line
    assert all(np.array_equal(first[key], second[key]) for key in first)
    for other in (third, right):
        assert any(not np.array_equal(first[key], other[key]) for key in first if key.startswith("server"))


@pytest.mark.parametrize("name", ["fedgkt", "feddkc-skr"])
def test_some_rows_out_of_range_cost_these_rows_only(name: str, flower_log: list[str]) -> None:
    def garble(content: RecordDict) -> None:
        if (metrics := content.config_records.get("fitres.metrics")) is not None:
            told = ClientFeatures.from_bytes(metrics["payload"])
            features = told.features.copy()
            features[[0, 7]] = 500
            metrics["payload"] = replace(told, features=features).to_bytes()

    with quiet() as lines:
        strategy, result = Federation(name, 5).run(
            rounds=2, knowledge_aggregation="median", grid={"faults": {1: Fault("garbage", garble=garble)}}
        )
    assert len([line for line in lines if "2 of 25 rows of node" in line and "are left out" in line]) == 2
    assert [(stats.participants, stats.failures) for stats in result.rounds] == [(5, 0), (5, 0)]
    assert strategy.logits[1].shape == (25, 4)
