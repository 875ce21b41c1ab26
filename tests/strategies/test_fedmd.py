"""FedMD at work: whole rounds against an oracle, the consensus, and the warm-up on labelled public data."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, TensorDataset
from watched import Party, Watched, equal, party, same_models

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.public_data.config import PublicKnowledgeConfig
from flwr_kd.strategies.fedmd import FedMD, FedMDClient, FedMDConfig
from flwr_kd.strategies.fedmd import client as client_module
from flwr_kd.testing.faults import Fault
from flwr_kd.testing.federation import SHAPE


def check(run: Party, **options: Any) -> list[transfer.Mirror]:
    return transfer.replay(run, run.draw, lambda r, keys, s, counts: transfer.consensus(s), **options)


class TestRounds:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"reduction": "mean", "distill_learning_rate": 0.5, "temperature": 1.0},
            {"distill_epochs": 3, "distill_weight": 2.0},
            {"momentum": 0.5, "weight_decay": 0.02, "lr_decay": 0.5, "lr_decay_every": 1},
            {"public_samples": 9, "public_batch_size": 4},
            {"precision": "float16"},
            {"precision": "uint8"},
        ],
        ids=lambda changes: "-".join(changes) or "defaults",
    )
    def test_three_rounds(self, changes: dict[str, Any]) -> None:
        run = party("fedmd", **changes)
        result = run.start(3)
        check(run, precision=changes.get("precision", "float32"))
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 0)] * 3

    def test_some_of_the_clients(self) -> None:
        run = party("fedmd", clients=6)
        run.start(3, fraction_train=0.5)
        check(run)

    def test_the_consensus_is_the_plain_mean_for_everyone(self) -> None:
        """Not weighted by 17, 22, 12 and 27 samples, nor by 1000 of a client that says so."""
        run = party("fedmd")
        run.train[1] = TensorDataset(*watched.samples(1, 300))

        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if n == 3:
                content.metric_records["fitres.num_examples"]["num_examples"] = 10**9

        result = run.start(1, grid={"after": after})
        s = [call.came()["predictions"] for call in run.grid.of(1, "train").values()]
        sent = [call.sent()["targets"] for call in run.grid.of(1, "distill").values()]
        np.testing.assert_allclose(sent[0], np.mean(s, axis=0), atol=1e-6)
        assert all(np.array_equal(call, sent[0]) for call in sent)
        assert np.abs(np.average(s, axis=0, weights=[17, 300, 12, 10**9]) - sent[0]).max() > 0.01
        assert result.rounds[0].failures == 0

    def test_only_those_who_answered_count(self) -> None:
        run = party("fedmd")
        run.start(1, grid={"faults": {2: Fault("raise")}})
        s = [call.came()["predictions"] for n, call in run.grid.of(1, "train").items() if n != 2]
        distilled = run.grid.of(1, "distill")
        assert set(distilled) == {0, 1, 3}
        for call in distilled.values():
            np.testing.assert_allclose(call.sent()["targets"], np.mean(s, axis=0), atol=1e-6)

    def test_it_has_no_state(self) -> None:
        run = party("fedmd")
        run.start(1)
        assert run.strategy.state_arrays() == {}
        with pytest.raises(ValueError, match=r"FedMD has no state of its own, got \['coefficients'\]"):
            run.strategy.load_state_arrays({"coefficients": np.eye(2)})


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note round and partition of each warm-up that trains."""
    actual: list[tuple[int, int]] = []
    current: list[tuple[int, int]] = []
    prepare, fit = FedMDClient.prepare, client_module.fit

    def noted_prepare(self: Any, task: Any) -> None:
        current[:] = [(task.server_round, int(self.context.node_config["partition-id"]))]
        prepare(self, task)

    def noted_fit(*args: Any, **kwargs: Any) -> float:
        actual.extend(current)
        return fit(*args, **kwargs)

    monkeypatch.setattr(FedMDClient, "prepare", noted_prepare)
    monkeypatch.setattr(client_module, "fit", noted_fit)
    return actual


class TestWarmUp:
    @pytest.mark.parametrize("epochs", [1, 3])
    def test_whole_rounds(self, epochs: int) -> None:
        """Before a client's first training, on the public labels, with the rate and the batches of training."""
        run = party("fedmd", warmup_epochs=epochs, lr_decay=0.5, lr_decay_every=1, momentum=0.3)
        run.start(4, fraction_train=0.5)
        first = {n: min(r for r in range(1, 5) if n in run.grid.of(r, "train")) for n in range(4)}
        assert len(set(first.values())) > 1  # one that joins late begins at the rate of its round
        check(run, warmup=epochs)

    def test_once_for_each_client(self, warmed: list[tuple[int, int]]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {2} if r < 3 else set()

        run = party("fedmd", warmup_epochs=2)
        run.start(4, grid={"arrive": arrive}, min_available_nodes=3)
        assert sorted(warmed) == [(1, 0), (1, 1), (1, 3), (3, 2)]

    def test_again_where_the_state_is_lost(self, warmed: list[tuple[int, int]]) -> None:
        """A new strategy starts from new models."""

        def arrive(grid: Watched, r: int) -> None:
            if r == 3:
                grid.restart(1)

        run = party("fedmd", warmup_epochs=1)
        run.start(4, grid={"arrive": arrive})
        assert sorted(warmed) == [(1, 0), (1, 1), (1, 2), (1, 3), (3, 1)]

    def test_a_first_training_that_failed_was_none(self, warmed: list[tuple[int, int]]) -> None:
        run = party("fedmd", warmup_epochs=1)
        run.start(2, grid={"faults": {1: Fault("raise", frozenset({1}))}})
        assert sorted(warmed) == [(1, 0), (1, 2), (1, 3), (2, 1)]

    def test_none_by_default(self, warmed: list[tuple[int, int]]) -> None:
        party("fedmd").start(1)
        assert warmed == []

    def test_the_public_labels_are_what_it_learns(self) -> None:
        """The same inputs with turned labels: the digest is the same, the models are not."""
        x, y = watched.samples(99, watched.PUBLIC)
        runs = []
        for labels in (y, (y + 1) % 3):
            run = party("fedmd", warmup_epochs=3, public=lambda _, labels=labels: TensorDataset(x, labels))
            run.start(1)
            check(run, warmup=3)
            runs.append(run)
        sent = [run.grid.of(1, "train")[0].sent() for run in runs]
        assert equal(*sent)
        assert not same_models(runs[0].grid, runs[1].grid)

    def test_without_it_labels_do_not_count(self) -> None:
        x, y = watched.samples(99, watched.PUBLIC)
        runs = []
        for labels in (y, y - 99):
            run = party("fedmd", public=lambda _, labels=labels: TensorDataset(x, labels))
            run.start(2)
            runs.append(run)
        assert same_models(runs[0].grid, runs[1].grid)

    @pytest.mark.parametrize("wrong", [3, -1])
    def test_labels_beyond_the_classes(self, wrong: int) -> None:
        x, y = watched.samples(99, watched.PUBLIC)
        y[5] = wrong
        run = party("fedmd", warmup_epochs=1, public=lambda _: TensorDataset(x, y))
        result = watched.void(lambda: run.start(2))
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(0, 4)] * 2
        for call in run.grid.passed:
            assert "DatasetError" in call.error
            assert f"label {wrong} is not in 0..2" in call.error

    def test_a_head_of_its_own_leaves_the_models_alone(self, make_model: Any) -> None:
        """The public data have seven classes, the model four: the features learn them, the classifier does not."""
        x, y = (
            torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(3)).double(),
            torch.arange(20) % 7,
        )
        model = make_model().double()
        config = FedMDConfig(
            warmup_epochs=2, warmup_head="own", batch_size=8, learning_rate=0.1, momentum=0.5, local_epochs=1
        )
        context = Context(1, 1, {}, RecordDict(), {})
        own = TensorDataset(x[:4], y[:4] % 4)
        client = FedMDClient(
            copy.deepcopy(model), own, public_set=TensorDataset(x, y), context=context, device="cpu"
        )
        task: Task[FedMDConfig] = Task(1, "train", 5, (), [], None, config)
        client.prepare(task)

        with DrawFrom(task.generator("warm-up-head")):
            head = torch.nn.Linear(model.feature_dim, 7).double()
        order = task.generator("warm-up")
        moved = [*model.extractor.parameters(), *head.parameters()]
        speeds = [torch.zeros_like(p) for p in moved]
        for _ in range(2):
            for rows in transfer.batches(20, 8, order):
                loss = transfer.cross_entropy(head(model.features(x[rows])), y[rows])
                for p, speed, slope in zip(moved, speeds, torch.autograd.grad(loss, moved), strict=True):
                    speed.mul_(0.5).add_(slope)
                    p.data.sub_(0.1 * speed)
        for name, value in model.state_dict().items():
            assert torch.allclose(client.model.state_dict()[name], value, rtol=0, atol=1e-12), name

    def test_a_head_of_its_own_takes_whole_numbers_only(self, make_model: Any) -> None:
        x = torch.randn(6, *SHAPE)
        for label in (-1, 100_000):
            public = TensorDataset(x, torch.tensor([0, 1, 2, 3, 4, label]))
            own = TensorDataset(x, torch.arange(6) % 4)
            context = Context(1, 1, {}, RecordDict(), {})
            client = FedMDClient(make_model(), own, public_set=public, context=context, device="cpu")
            config = FedMDConfig(warmup_epochs=1, warmup_head="own")
            with pytest.raises(DatasetError, match=f"label {label} is not in 0..99999"):
                client.prepare(Task(1, "train", 5, (), [], None, config))

    def test_one_client_whose_labels_are_wrong_is_out_alone(self) -> None:
        x, y = watched.samples(99, watched.PUBLIC)
        run = party("fedmd", warmup_epochs=1, public=lambda n: TensorDataset(x, y + 7 * (n == 1)))
        result = run.start(2)
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(3, 1)] * 2
        assert {call.partition for call in run.grid.passed if call.error} == {1}

    def test_inputs_without_labels(self) -> None:
        x, _ = watched.samples(99, watched.PUBLIC)
        run = party("fedmd", warmup_epochs=1, public=lambda _: TensorDataset(x))
        assert watched.void(lambda: run.start(1)).rounds[0].failures == 4
        assert all("DatasetError" in call.error for call in run.grid.passed)
        run = party("fedmd", public=lambda _: TensorDataset(x))
        assert run.start(1).rounds[0].failures == 0

    def test_dicts_and_loaders_have_labels_too(self) -> None:
        x, y = watched.samples(99, watched.PUBLIC)
        runs = []
        items = [{"a": x[i], "b": int(y[i])} for i in range(len(x))]
        for public in (TensorDataset(x, y), items, DataLoader(TensorDataset(x, y), batch_size=8)):
            run = party("fedmd", warmup_epochs=2, public_batch_size=8, public=lambda _, public=public: public)
            if public is items:
                run.client_options = {"input_key": "a", "label_key": "b"}
            assert run.start(1).rounds[0].failures == 0
            runs.append(run)
        assert same_models(runs[0].grid, runs[1].grid)
        # A loader's batches are its own, here of 8 as those of the config.
        assert same_models(runs[0].grid, runs[2].grid)

    def test_labels_of_another_name(self) -> None:
        """``classes`` and ``public_input_key`` also apply to the warm-up."""
        x, y = watched.samples(99, watched.PUBLIC)
        plain, run = party("fedmd", warmup_epochs=2), party("fedmd", warmup_epochs=2)
        items = [{"a": x[i] * 0, "b": x[i], "label": 10 + int(y[i])} for i in range(len(x))]
        run.public = lambda _: items
        for sets in (run.train, run.test):
            sets[:] = [TensorDataset(source.tensors[0], source.tensors[1] + 10) for source in sets]
        run.client_options = {"classes": [10, 11, 12], "public_input_key": "b"}
        plain.start(2)
        assert run.start(2).rounds[0].failures == 0
        assert same_models(plain.grid, run.grid)

    def test_all_public_samples_are_used_not_only_the_round_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: Counter[int] = Counter()
        shuffled = Batches.shuffled

        def noted(self: Batches, *args: Any) -> Any:
            for x, y in shuffled(self, *args):
                if len(self) == watched.PUBLIC:
                    seen.update(hash(row.numpy().tobytes()) for row in x)
                yield x, y

        monkeypatch.setattr(Batches, "shuffled", noted)
        run = party("fedmd", warmup_epochs=2, public_samples=3)
        run.start(1)
        assert sorted(seen.values()) == [8] * watched.PUBLIC

    def test_labels_are_not_sent(self) -> None:
        text = r"warmup-epochs must be 0 where public-at=server: labels are not sent, got 2"
        with pytest.raises(ConfigError, match=text):
            FedMDConfig(warmup_epochs=2, public_at="server")
        assert FedMDConfig(warmup_epochs=0, public_at="server").public_at == "server"
        with pytest.raises(ConfigError, match=r"warmup-epochs must be >= 0, got -1"):
            FedMDConfig(warmup_epochs=-1)


class TestRegistration:
    def test_registration(self) -> None:
        method = registry.get("fedmd")
        assert (method.strategy, method.client, method.config_class) == (FedMD, FedMDClient, FedMDConfig)
        assert (method.public_at, method.heterogeneous, method.global_model) == ("clients", True, False)
        assert dict(method.fixed) == {}
        assert method.exchanged == "soft predictions on public data"

    def test_the_values_are_those_of_the_comparison(self) -> None:
        """KT-pFL's appendix B.2, "for all the methods"; no warm-up."""
        config = FedMDConfig()
        assert config.warmup_epochs == 0
        plain = PublicKnowledgeConfig()
        assert {
            **plain.to_wire(),
            "warmup-epochs": 0,
            "warmup-head": "model",
            "global-model": "none",
        } == config.to_wire()
        assert (config.temperature, config.distill_weight, config.distill_epochs) == (10, 1, 1)
        assert (config.batch_size, config.public_batch_size, config.public_samples) == (128, 256, 3000)
        assert (config.local_epochs, config.learning_rate, config.distill_learning_rate) == (20, 0.01, 0.01)

    def test_the_mean_keeps_its_digits(self) -> None:
        """A thousand float32 predictions: the mean is theirs to the last bit but one."""
        s = torch.full((1000, 2, 3), 1 / 3) + torch.linspace(0, 1e-3, 1000)[:, None, None]
        actual = FedMD().targets(1, [], s)
        assert actual.dtype == torch.float32
        assert actual.shape == s.shape
        np.testing.assert_allclose(actual[7], s.double().mean(dim=0), rtol=1.2e-7)
