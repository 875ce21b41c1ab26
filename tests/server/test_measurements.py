"""Numbers of a round: means over clients, and evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from flwr_kd.client.task import Answer, Task
from flwr_kd.server.measurements import average, mean_evaluation, summarise
from flwr_kd.server.records import Node, Reply, RoundStats
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from tests.server.federations import QUICK, Net, initial


def test_means_over_clients(grid_of: Any) -> None:
    reported: dict[int, dict[str, Any]] = {}

    class Reporting(FedAvgClient):
        def phase_train(self, task: Task) -> Answer:
            answer = super().phase_train(task)
            reported[int(self.context.node_config["partition-id"])] = {
                "n": answer.num_examples, **answer.metrics, "arrays": answer.arrays
            }  # fmt: skip
            return answer

    result = FedAvg(min_available_nodes=3, **QUICK).start(grid_of(Reporting), initial(), num_rounds=1)
    (stats,) = result.rounds
    counts = [reported[i]["n"] for i in range(3)]
    assert counts == [16, 20, 24]
    assert stats.local_accuracy == pytest.approx(np.mean([reported[i]["local-accuracy"] for i in range(3)]))
    losses = [reported[i]["train-loss"] for i in range(3)]
    assert stats.train_loss == pytest.approx(np.average(losses, weights=counts))
    assert dict(result.train_metrics_clientapp[1]) == {
        "local-accuracy": stats.local_accuracy,
        "train-loss": stats.train_loss,
    }
    for index, array_ in enumerate(result.arrays.values()):
        mean = np.average([reported[i]["arrays"][index] for i in range(3)], axis=0, weights=counts)
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


# ---------------------------------------------------------------------- the means themselves


def reply(key: int, count: int, **metrics: float) -> Reply[Any]:
    return Reply(Node(10 + key, key), [], count, {name.replace("_", "-"): v for name, v in metrics.items()})


def test_a_client_of_several_phases_counts_once() -> None:
    """Its accuracy is the last that it reported, its loss that of its first reply."""
    stats = RoundStats(1)
    replies = [
        reply(0, 10, train_loss=1.0, local_accuracy=0.2),
        reply(1, 30, train_loss=2.0, local_accuracy=0.6, local_top5=0.9),
        reply(0, 10, train_loss=9.0, local_accuracy=0.4),
        reply(1, 30, own=3.0),
        reply(0, 10, own=1.0),
    ]
    metrics = summarise(replies, stats, {"own", "absent"})
    assert stats.local_accuracy == pytest.approx(0.5)
    assert stats.local_top5 == pytest.approx(0.9)
    assert stats.train_loss == pytest.approx((10 * 1.0 + 30 * 2.0) / 40)
    assert stats.clients == {0: {"local-accuracy": 0.4}, 1: {"local-accuracy": 0.6, "local-top5": 0.9}}
    assert metrics is not None
    assert dict(metrics) == {
        "local-accuracy": stats.local_accuracy,
        "local-top5": stats.local_top5,
        "train-loss": stats.train_loss,
        "own": 2.0,
    }


def test_without_metrics_there_is_no_record() -> None:
    stats = RoundStats(1)
    assert summarise([reply(0, 5)], stats) is None
    assert summarise([], stats) is None
    assert (stats.local_accuracy, stats.train_loss, stats.clients) == (None, None, {})


def test_clients_without_samples_count_as_one_in_the_loss() -> None:
    stats = RoundStats(1)
    summarise([reply(0, 0, train_loss=1.0), reply(1, 3, train_loss=5.0)], stats)
    assert stats.train_loss == pytest.approx(4.0)


def test_only_metrics_that_all_clients_have_are_averaged() -> None:
    metrics = mean_evaluation([(1, {"loss": 1.0, "a": 1.0}), (3, {"loss": 2.0, "b": 0.0})])
    assert metrics is not None
    assert dict(metrics) == {"loss": 1.75}
    assert mean_evaluation([]) is None
    assert average([1e308, 1.7e308], [1, 1]) == pytest.approx(1.35e308)
