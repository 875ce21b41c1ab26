"""FedHEAD's and FedHEAD+'s rounds against the oracle, and their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hierarchy as oracle
import numpy as np
import pytest
import torch
from ensemble_rounds import CLASSES, N_G, N_L, RATE, REFERENCE, SHAPE, data, reference
from ensembles import close
from flwr.app import ArrayRecord, Context, RecordDict
from hierarchy import Linear
from sector_rounds import N_S, SIZES, Run, linear, net, oracle_data
from torch import Tensor
from torch.utils.data import TensorDataset

from flwr_kd import registry
from flwr_kd.client.task import Task
from flwr_kd.strategies.fedhead import (
    FedHEAD,
    FedHEADClient,
    FedHEADConfig,
    FedHEADPlus,
    SectorEnsemble,
)
from flwr_kd.transport.payload import PayloadError


def differ(a: Linear, b: Linear, least: float = 1e-4) -> bool:
    return bool(np.abs(a.W - b.W).max() > least)


class TestMessage:
    @pytest.mark.parametrize(
        "weights", [[], [0.5, 0.6], [1.5, -0.5], [0.2, 0.3], [[1.0]], [float("nan"), 1.0]]
    )
    def test_what_is_no_share_is_refused(self, weights: list[Any]) -> None:
        with pytest.raises(PayloadError, match="'weights'"):
            SectorEnsemble(weights=np.array(weights, dtype=np.float64))

    def test_round_trip(self) -> None:
        message = SectorEnsemble(weights=np.array([0.25, 0.75, 0.0]))
        assert SectorEnsemble.from_bytes(message.to_bytes()) == message

    @pytest.mark.parametrize(
        ("models", "weights", "text"),
        [
            (3, [0.5, 0.25, 0.25], "got 6 arrays, expected 4 models of 2"),
            (3, [1.0], "got 6 arrays, expected 2 models of 2"),
            (2, None, "a leader needs its sector's weights, got none"),
        ],
    )
    def test_a_leader_checks_what_it_gets(self, models: int, weights: list[float] | None, text: str) -> None:
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        client = FedHEADClient(net(), TensorDataset(*data(0, 5)), context=context, device="cpu")
        arrays = [value.numpy() for value in net().state_dict().values()] * models
        payload = None if weights is None else SectorEnsemble(weights=np.array(weights)).to_bytes()
        for answer in (client.phase_distill, client.phase_distill_again):
            with pytest.raises(PayloadError, match=text):
                answer(Task(1, "distill", 0, (), arrays, payload, FedHEADConfig()))


class TestRounds:
    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("leader", ["random", "largest"])
    def test_equal_the_oracle(self, kind: type[FedHEAD], seed: int, leader: str) -> None:
        run = Run(kind, options={"seed": seed}, leader=leader)
        result = run.start(2)
        assert run.sectors == {"east": [0, 2, 4], "west": [1, 5], "south": [3]}
        for server_round in (1, 2):
            leaders = run.leaders[server_round - 1]
            assert all(leaders[sector] in members for sector, members in run.sectors.items())
            done = run.check(server_round, plus=kind is FedHEADPlus)
            assert differ(done.model, done.z)
            assert run.asked("train", server_round) == list(range(6))
            assert sorted(run.asked("distill", server_round)) == sorted(leaders.values())
            assert run.asked("distill-again", server_round) == []
        assert [(r.participants, r.failures) for r in result.rounds] == [(6, 0)] * 2
        close(run.models[2], linear(result.arrays), atol=0)

    @pytest.mark.parametrize("kind", [FedHEAD, FedHEADPlus])
    @pytest.mark.parametrize("sectors", [1, 2, 4, 6])
    def test_random_sectors_equal_the_oracle(self, kind: type[FedHEAD], sectors: int) -> None:
        run = Run(kind, named=None, options={"seed": 4}, sectors=sectors)
        run.start(1)
        sizes = [len(members) for members in run.sectors.values()]
        assert sorted(run.sectors) == list(range(sectors))
        assert max(sizes) - min(sizes) <= 1
        run.check(1, plus=kind is FedHEADPlus)

    def test_one_client_alone(self) -> None:
        run = Run(sizes=(9,), named=["only"])
        run.start(1)
        done = run.check(1)
        # The leader is its own teacher, so its local model is the result.
        close(run.models[1], done.local[0])

    def test_early_stopping_and_held_out_samples_at_the_leaders(self) -> None:
        """A patience of one epoch gives fewer epochs than n_s, and another model than without held-out rows."""
        run = Run(named=None, sizes=(40, 44), validation_share=0.25, patience=1, sector_epochs=50)
        result = run.start(1)
        epochs = result.train_metrics_clientapp[1]["distill-epochs"]
        assert 1 <= epochs <= 50  # type: ignore[operator]
        other = Run(named=None, sizes=(40, 44), sector_epochs=50)
        assert other.start(1).train_metrics_clientapp[1]["distill-epochs"] == 50
        assert differ(run.models[1], other.models[1])

    def test_metrics_are_means_over_the_leaders(self) -> None:
        run = Run()
        metrics = run.start(1).train_metrics_clientapp[1]
        assert metrics["distill-epochs"] == N_S
        clients = oracle_data()
        done = run.check(1)
        losses, trained = [], []
        for sector, leader in run.leaders[0].items():
            x, members = clients[leader].x, run.sectors[sector]
            teachers, sizes = [done.local[k] for k in members], [SIZES[k] for k in members]
            targets = oracle.ensemble(x, teachers, sizes, "probabilities")
            student = oracle.descend(done.z, x, targets, RATE, N_S - 1)
            losses.append(oracle.cross_entropy(x, targets, student))
        assert metrics["distill-loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        for k, (x, y) in clients.items():
            targets = oracle.one_hot(y, CLASSES)
            start = oracle.descend(run.models[0], x, targets, RATE, N_L - 1)
            trained.append(oracle.cross_entropy(x, targets, start) * SIZES[k])
        # Local training's alone: what leaders report of their distillation has no part in it.
        assert metrics["train-loss"] == pytest.approx(sum(trained) / sum(SIZES), abs=1e-5)

    def test_the_learning_rate_of_a_round_is_that_of_its_distillations(self) -> None:
        run = Run(FedHEADPlus, lr_decay=0.5, lr_decay_every=1)
        run.start(2)
        done = oracle.fedhead(
            run.models[1], oracle_data(), run.sectors, run.leaders[1], rate=RATE / 2, n_l=N_L, n_s=N_S
        )
        rows = oracle.samples(reference().numpy(), np.zeros(REFERENCE)).x
        expected = oracle.fedhead_plus(done, rows, rate=RATE / 2, n_g=N_G, average="probabilities")
        close(run.models[2], expected)

    @pytest.mark.long
    def test_leaders_change_with_rounds_and_seeds(self) -> None:
        first, same, other = Run(), Run(), Run(options={"seed": 5})
        for run in (first, same, other):
            run.start(6)
        assert first.leaders == same.leaders != other.leaders
        assert len({leaders["east"] for leaders in first.leaders}) > 1

    def test_leaders_are_drawn_by_their_samples(self) -> None:
        """Over many rounds; the draw itself is tested above."""
        run = Run(sizes=(1, 1, 18), named=["a", "a", "a"], local_epochs=1, sector_epochs=1)
        run.start(40)
        drawn = Counter(leaders["a"] for leaders in run.leaders)
        assert drawn[2] > 28

    def test_the_largest_leads(self) -> None:
        run = Run(leader="largest")
        run.start(3)
        assert run.leaders == [{"east": 2, "west": 1, "south": 3}] * 3

    def test_a_share_of_the_clients(self) -> None:
        run = Run(options={"fraction_train": 0.5})
        run.start(4)
        for server_round in range(1, 5):
            drawn = run.asked("train", server_round)
            assert len(drawn) == 3
            members = {m: [k for k in keys if k in drawn] for m, keys in run.sectors.items()}
            members = {m: keys for m, keys in members.items() if keys}
            assert run.leaders[server_round - 1].keys() == members.keys()
            run.check(server_round, sectors=members)


class TestTraffic:
    def test_bytes_are_the_real_ones(self) -> None:
        run = Run()
        result = run.start(2)
        copy = sum(len(value.data) for value in ArrayRecord(net().state_dict()).values())
        for stats, leaders in zip(result.rounds, run.leaders, strict=True):
            for client in range(6):
                down, up = copy, copy
                for sector, leader in leaders.items():
                    if leader == client:
                        members = run.sectors[sector]
                        weights = np.array(oracle.normalised([SIZES[k] for k in members]))
                        down += (len(members) + 1) * copy + SectorEnsemble(weights=weights).nbytes
                        up += copy
                assert stats.bytes_by_partition[client] == (down, up)
            assert stats.bytes_up == (6 + 3) * copy
            assert stats.bytes_down == sum(down for down, _ in stats.bytes_by_partition.values())

    def test_what_a_leader_gets(self) -> None:
        run = Run()
        run.start(2)
        seen = 0
        for call in run.calls:
            names = ("1.weight", "1.bias")
            assert call.names == names
            if call.phase == "train":
                assert call.payload is None
                close(oracle.linear(*call.arrays), run.models[call.server_round - 1], atol=0)
                continue
            seen += 1
            done = run.check(call.server_round)
            (members,) = (keys for keys in run.sectors.values() if call.partition in keys)
            models = [oracle.linear(*call.arrays[i : i + 2]) for i in range(0, len(call.arrays), 2)]
            assert len(models) == 1 + len(members)
            close(models[0], done.z)
            for k, model in zip(members, models[1:], strict=True):
                close(model, done.local[k])
            assert call.payload is not None
            weights = SectorEnsemble.from_bytes(call.payload, dims={"K": len(members)}).weights
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            np.testing.assert_allclose(weights, oracle.normalised([SIZES[k] for k in members]), atol=1e-12)
        assert seen == 6


class TestLeadersData:
    def test_no_augmentation_and_no_labels(self) -> None:
        """A leader distils on `knowledge_set`; its labels change nothing, nor does the augmentation."""

        def distilled(labels: Callable[[Tensor], Tensor], augment: Any) -> list[np.ndarray]:
            x, y = data(0, 9)
            context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
            client = FedHEADClient(
                net(),
                TensorDataset(torch.zeros(4, *SHAPE), torch.zeros(4, dtype=torch.int64)),
                context=context,
                device="cpu",
                knowledge_set=TensorDataset(x, labels(y)),
                augment=augment,
            )
            state = [value.numpy() for value in net().state_dict().values()]
            teacher = [value + 1 + np.arange(value.shape[-1], dtype=np.float32) for value in state]
            payload = SectorEnsemble(weights=np.ones(1)).to_bytes()
            config = FedHEADConfig(
                optimizer="sgd", weight_decay=0.0, validation_share=0.0, learning_rate=RATE
            )
            answer = client.phase_distill(Task(1, "distill", 0, (), [*state, *teacher], payload, config))
            assert answer.num_examples == 9
            start, goal = oracle.linear(*state), oracle.linear(*teacher)
            rows = oracle.samples(x.numpy(), y.numpy()).x
            targets = oracle.ensemble(rows, [goal], [1], "probabilities")
            close(oracle.linear(*answer.arrays), oracle.descend(start, rows, targets, RATE, 20), atol=1e-5)
            return answer.arrays

        plain = distilled(lambda y: y, None)
        other = distilled(torch.zeros_like, lambda x, _: torch.zeros_like(x))
        assert all(np.array_equal(a, b) for a, b in zip(plain, other, strict=True))

    def test_the_paper_s_values_are_the_defaults(self) -> None:
        """H.1."""
        config = FedHEADConfig()
        assert (config.sectors, config.local_epochs, config.sector_epochs, config.server_epochs) == (
            2,
            20,
            20,
            20,
        )
        assert (config.optimizer, config.learning_rate, config.weight_decay) == ("adam", 1e-3, 1e-4)
        assert (config.batch_size, config.patience, config.leader) == (128, 5, "random")
        assert config.learning_rate_at(50) == 1e-3

    def test_it_is_registered(self) -> None:
        assert registry.get("fedhead").strategy is FedHEAD
        assert registry.get("fedhead-plus").strategy is FedHEADPlus
        assert registry.get("fedhead-plus").public_at == "server"
