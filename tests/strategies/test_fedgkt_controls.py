"""FedGKT's and FedDKC's controls: what server and clients learn from without knowledge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from feature_rounds import CLASSES, CLIENTS, QUICK, pair, samples, start
from flwr.app import Context
from torch import Tensor, nn

from flwr_kd.client.task import Task
from flwr_kd.models import build_predictor, count_parameters
from flwr_kd.server.records import Reply
from flwr_kd.strategies.feddkc import FedDKC
from flwr_kd.strategies.fedgkt import ClientFeatures, FedGKT, FedGKTClient
from flwr_kd.strategies.fedgkt.functional import FeatureRows

Teachers = dict[tuple[int, int], Tensor]


def clients_teachers(**settings: Any) -> Teachers:
    """Return by round and client what the clients learn from."""
    found: Teachers = {}

    class Curious(FedGKTClient):
        def objective(self, task: Task) -> Callable[..., Tensor]:
            teacher = self.teacher(task)
            assert teacher is not None
            found[task.server_round, int(self.context.node_config["partition-id"])] = teacher
            return super().objective(task)

    def make(index: int, context: Context) -> FedGKTClient:
        return Curious(pair(index), samples(index), context=context, device="cpu")

    start(FedGKT(learning_rate=0.5, **settings, **QUICK), make, rounds=2)
    return found


def servers_targets(
    kind: type[FedGKT], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return, by training of the server, what it learns from, and that without a control."""
    learned: list[Tensor] = []
    own: list[Tensor] = []
    build = FeatureRows.__init__

    def noting(
        self: FeatureRows, features: Any, labels: Any, teachers: Sequence[Tensor], **sizes: Any
    ) -> None:
        learned.extend(teachers)
        build(self, features, labels, teachers, **sizes)

    class Noting(kind):  # type: ignore[misc, valid-type]
        def train_predictor(self, replies: Sequence[Reply[ClientFeatures]], *args: Any) -> None:
            own.extend(self.targets(torch.from_numpy(reply.payload.logits.copy())) for reply in replies)
            super().train_predictor(replies, *args)

    monkeypatch.setattr(FeatureRows, "__init__", noting)
    start(Noting(**settings, **QUICK), rounds=2)
    assert len(learned) == len(own) == 2 * CLIENTS
    return learned, own


def test_a_uniform_teacher_teaches_clients_nothing() -> None:
    for teacher in clients_teachers(client_knowledge="uniform").values():
        torch.testing.assert_close(teacher, torch.full_like(teacher, 1 / CLASSES))


def test_permuted_teachers_are_those_of_other_samples() -> None:
    own, permuted = clients_teachers(), clients_teachers(client_knowledge="permuted")
    assert own.keys() == permuted.keys()
    by_round = defaultdict(int)
    for (server_round, client), teacher in permuted.items():
        mine = own[server_round, client]
        if server_round == 1:
            assert torch.equal(teacher, mine)
            continue
        by_round[server_round] += 1
        # Round 1 is the same in both, so that the server knows the same.
        assert not (teacher == mine).all(dim=1).any()
        torch.testing.assert_close(teacher.sort(dim=0).values, mine.sort(dim=0).values)
    assert by_round == {2: CLIENTS}


@pytest.mark.parametrize("kind", [FedGKT, FedDKC])
@pytest.mark.parametrize("order", ["pooled", "client-by-client"])
def test_the_server_learns_from_what_is_chosen(
    kind: type[FedGKT], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"server_order": order}
    if kind is FedDKC:
        settings["target_peak"] = 0.5
    learned, own = servers_targets(kind, monkeypatch, **settings)
    assert all(torch.equal(one, other) for one, other in zip(learned, own, strict=True))
    learned, own = servers_targets(kind, monkeypatch, server_knowledge="uniform", **settings)
    assert all(torch.equal(one, torch.full_like(one, 1 / CLASSES)) for one in learned)
    learned, own = servers_targets(kind, monkeypatch, server_knowledge="permuted", **settings)
    for one, other in zip(learned, own, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one.sort(dim=0).values, other.sort(dim=0).values)


def test_with_a_uniform_teacher_refinement_makes_no_difference() -> None:
    results = [
        start(kind(server_order="pooled", server_knowledge="uniform", **settings, **QUICK))
        .rounds[-1]
        .train_loss
        for kind, settings in (
            (FedGKT, {}),
            (FedDKC, {"target_peak": 0.5}),
            (FedDKC, {"refinement": "skr", "target_entropy": 1.0}),
        )
    ]
    assert len(set(results)) == 1
    own = start(FedGKT(server_order="pooled", **QUICK)).rounds[-1].train_loss
    assert own not in results


@pytest.mark.parametrize(("kind", "blocks"), [("bottleneck", 6), ("basic", 9)])
def test_the_servers_model_is_the_one_that_is_chosen(kind: str, blocks: int) -> None:
    extractor = nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.ConstantPad2d((0, 3, 0, 7), 0), nn.Conv2d(1, 16, 1)
    )

    def make(index: int, context: Context) -> FedGKTClient:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
        return FedGKTClient((extractor, head), samples(index), context=context, device="cpu")

    strategy = FedGKT(predictor=kind, **QUICK)
    start(strategy, make, rounds=1)
    assert strategy.server_model is not None
    assert len(strategy.server_model) == blocks + 3
    expected = build_predictor((16, 8, 8), num_classes=CLASSES, seed=0, kind=kind)
    assert count_parameters(strategy.server_model) == count_parameters(expected)
