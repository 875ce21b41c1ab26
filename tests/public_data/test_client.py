"""Clients with public data: distillation, failures, digests, forms of data and accuracy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import Context, RecordDict
from items import Items
from public_rounds import (
    Own,
    Turned,
    X,
    Y,
    bare,
    digest,
    lone_client,
    lone_context,
    participants,
    rows_of,
)
from safetensors.numpy import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watched import Party, Watched, equal, kept_model, same_models

from flwr_kd.checks import ConfigError
from flwr_kd.client.personal_state import StateError
from flwr_kd.data import ArrayDataset
from flwr_kd.distillation.samples import digest_of
from flwr_kd.learning.batches import Batches
from flwr_kd.models import build_model
from flwr_kd.public_data import client as client_half
from flwr_kd.public_data import server as server_half
from flwr_kd.public_data.client import PublicKnowledgeClient
from flwr_kd.public_data.config import PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    SoftPredictions,
)
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.payload import Payload, PayloadError


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the size of each public set that is digested."""
    actual: list[int] = []

    def noted(samples: Batches) -> str:
        actual.append(len(samples))
        return digest_of(samples)

    for half in (client_half, server_half):
        monkeypatch.setattr(half, "digest_of", noted)
    return actual


class TestDigestIsMadeOnce:
    def test_a_client_and_run(self, digests: list[int]) -> None:
        bare().start(3, kind=Own)
        assert len(digests) == 4

    def test_the_server_s_own(self, digests: list[int]) -> None:
        bare().start(2, kind=Own, public_set=TensorDataset(X))
        assert len(digests) == 5

    def test_again_where_the_state_is_lost(self, digests: list[int]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            if r == 2:
                grid.restart(1)

        result = bare().start(3, kind=Own, grid={"arrive": arrive})
        assert len(digests) == 5
        assert participants(result) == [(4, 0)] * 3

    def test_the_set_is_not_read_for_it_again(self) -> None:
        reads: Counter[int] = Counter()

        class Counting(Items):
            def __getitem__(self, index: int) -> Any:
                reads[index] += 1
                return super().__getitem__(index)

        run = bare(public_samples=4, distill_epochs=1, public=lambda _: Counting(list(X)))
        run.start(2, kind=Own, fraction_train=0.25)
        # Four clients once for the digest; then two rounds in which one predicts and distils 4 samples, and shows
        # its model the first before.
        assert sum(reads.values()) == 4 * len(X) + 2 * (2 * 4 + 1)


def image_party(name: str = "resnet8", **changes: Any) -> Party:
    shape = (3, 8, 8)
    public = TensorDataset(*watched.samples(99, 12, shape))
    run = bare(public=lambda _: public, local_epochs=1, batch_size=8, distill_learning_rate=0.2, **changes)
    run.models = [build_model(name, input_shape=shape, num_classes=3, seed=n) for n in range(2)]
    run.train = [TensorDataset(*watched.samples(n, 16, shape)) for n in range(2)]
    run.test = [TensorDataset(*watched.samples(50 + n, 6, shape)) for n in range(2)]
    return run


class TestDistillation:
    @pytest.mark.parametrize("name", ["resnet8", pytest.param("shufflenet", marks=pytest.mark.long)])
    def test_running_statistics_do_not_move(self, name: str) -> None:
        run = image_party(name)
        assert participants(run.start(2, kind=Turned)) == [(2, 0)] * 2
        for r in (1, 2):
            for n, after in run.grid.of(r, "distill").items():
                before = run.grid.of(r, "train")[n].kept
                moved = {key for key, value in after.kept.items() if not np.array_equal(value, before[key])}
                assert len(moved) > 5
                assert not [key for key in moved if "running" in key or "num_batches" in key]
        # In training they do.
        first, second = (run.grid.of(r, "train")[0].kept for r in (1, 2))
        assert any("running_var" in key and not np.array_equal(first[key], second[key]) for key in first)

    def test_a_single_sample_goes_through_batchnorm(self) -> None:
        run = image_party(public_samples=1)
        assert participants(run.start(1, kind=Turned)) == [(2, 0)]

    def test_nothing_is_dropped_out(self) -> None:
        """Predictions and distillation are in eval mode: twice the same, and without holes."""
        run = bare(local_epochs=1)
        run.models = [
            nn.Sequential(nn.Flatten(), nn.Linear(8, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 3))
            for _ in range(4)
        ]
        run.start(1, kind=Turned)
        targets = run.grid.of(1, "distill")
        for n, call in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(call.kept)
            rows = torch.from_numpy(call.sent()["rows"].copy())
            x = X[rows].double()
            np.testing.assert_allclose(call.came()["predictions"], mirror.predict(x, 2.0), atol=1e-6)
            order = run.draw("distill", 1, n, "public-order")
            mirror.distil(
                x, targets[n].sent()["targets"], 4, 1, order, temperature=2.0, weight=1.0, reduction="sum",
                rate=0.05,
            )  # fmt: skip
            for key, value in mirror.weights().items():
                np.testing.assert_allclose(targets[n].kept[key], value, atol=2e-6)

    def test_labels_are_never_looked_at(self) -> None:
        def refuse(*_: Any) -> Any:
            raise AssertionError("a label was looked at")

        names = ("int", "float", "index", "array", "iter", "len", "bool", "add", "eq", "getitem", "getattr")
        label = type("Untouchable", (), {f"__{name}__": refuse for name in names})()

        def collate(items: list[Any]) -> Any:
            return torch.stack([x for (x,) in items]), label

        def public(_: int) -> Any:
            return DataLoader(TensorDataset(X), batch_size=4, collate_fn=collate)

        watched_run, plain = bare(public=public), bare()
        result = watched_run.start(2, kind=Turned, public_set=public(0))
        assert participants(result) == [(4, 0)] * 2
        plain.start(2, kind=Turned)
        assert same_models(watched_run.grid, plain.grid)

    @pytest.mark.parametrize("temperature", [0.25, 1.0, 10.0, 1000.0])
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_one_s_own_prediction_teaches_nothing(self, temperature: float, reduction: str) -> None:
        run = bare(
            temperature=temperature, reduction=reduction, distill_epochs=3, distill_weight=2.0,
            distill_learning_rate=0.005,
        )  # fmt: skip
        run.start(2, kind=Own)
        for r in (1, 2):
            for n, call in run.grid.of(r, "distill").items():
                for key, value in run.grid.of(r, "train")[n].kept.items():
                    np.testing.assert_allclose(call.kept[key], value, rtol=0, atol=2e-6)

    def test_nor_does_it_where_there_is_batchnorm(self) -> None:
        run = image_party()
        run.start(1, kind=Own)
        for n, call in run.grid.of(1, "distill").items():
            for key, value in run.grid.of(1, "train")[n].kept.items():
                np.testing.assert_allclose(call.kept[key], value, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("changes", [{"distill_epochs": 0}, {"distill_weight": 0.0}])
    def test_without_steps_or_weight_the_model_stays(self, changes: dict[str, Any]) -> None:
        run = bare(**changes)
        result = run.start(2, kind=Turned)
        for r in (1, 2):
            for n, call in run.grid.of(r, "distill").items():
                assert equal(call.kept, run.grid.of(r, "train")[n].kept)
        assert all(set(stats.clients) == {0, 1, 2, 3} for stats in result.rounds)

    def test_the_sum_is_as_many_means_as_a_batch_has_samples(self) -> None:
        """Batches of 4, two of them: the sum at η₂ is the mean at 4 η₂."""
        values = {"public_samples": 8, "public_batch_size": 4}
        runs = [
            bare(reduction=reduction, distill_learning_rate=rate, **values)
            for reduction, rate in (("sum", 0.02), ("mean", 0.08), ("mean", 0.02))
        ]
        for run in runs:
            run.start(1, kind=Turned)
        models = [run.grid.of(1, "distill") for run in runs]
        for n in range(4):
            for key, value in models[0][n].kept.items():
                np.testing.assert_allclose(models[1][n].kept[key], value, atol=1e-6)
            assert any(
                np.abs(models[2][n].kept[key] - value).max() > 1e-4
                for key, value in models[0][n].kept.items()
                if key.endswith("weight")
            )

    def test_more_steps_lead_nearer(self) -> None:
        distances = []
        for epochs in (0, 1, 5, 30):
            run = bare(distill_epochs=epochs, temperature=1.0)
            run.start(1, kind=Turned)
            total = 0.0
            for n, call in run.grid.of(1, "distill").items():
                mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
                mirror.take(call.kept)
                x = X[torch.from_numpy(call.sent()["rows"].copy())].double()
                with torch.no_grad():
                    z = mirror.model.eval()(x)
                total += float(transfer.divergence(torch.from_numpy(call.sent()["targets"].copy()), z, 1.0))
            distances.append(total)
        assert sorted(distances, reverse=True) == distances

    def test_optimizers(self) -> None:
        """Adam's steps are not SGD's, in both phases; each phase begins with a new one."""
        runs = [
            bare(optimizer=name, learning_rate=0.01, distill_learning_rate=0.01) for name in ("adam", "sgd")
        ]
        for run in runs:
            run.start(2, kind=Turned)
        assert not same_models(runs[0].grid, runs[1].grid)
        # A first step of Adam is the learning rate in each direction: R = 1 and one batch.
        run = bare(
            optimizer="adam",
            distill_learning_rate=0.01,
            public_batch_size=99,
            temperature=1.0,
            local_epochs=1,
        )
        run.start(1, kind=Turned)
        for n, call in run.grid.of(1, "distill").items():
            before = run.grid.of(1, "train")[n].kept
            names = [key for key in before if key.endswith((".weight", ".bias"))]
            steps = np.concatenate([np.ravel(call.kept[key] - before[key]) for key in names])
            assert np.abs(steps).max() == pytest.approx(0.01, rel=1e-3)
            assert np.median(np.abs(steps)) == pytest.approx(0.01, rel=1e-2)


class Breaking(PublicKnowledgeClient):
    """Partition 1 gets weights that are not finite, in the distillation of round 1."""

    value: ClassVar[float]

    def distil(self, task: Any, *args: Any) -> None:
        super().distil(task, *args)
        if (task.server_round, self.context.node_config["partition-id"]) == (1, 1):
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(self.value)


class TestFailures:
    @pytest.mark.parametrize("number", [float("inf"), float("nan")])
    def test_one_whose_distillation_diverges(
        self, number: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(Breaking, "value", number, raising=False)
        for folders in (None, [{"state-dir": str(tmp_path / str(n))} for n in range(4)]):
            run = bare()
            run.client = Breaking
            result = run.start(2, kind=Turned, grid={"node_configs": folders})
            failed = run.grid.of(1, "distill")[1]
            assert "FloatingPointError" in failed.error
            assert "the weights are no longer finite: try a smaller distill-learning-rate" in failed.error
            assert participants(result) == [(4, 1), (4, 0)]
            assert {n for n, said in result.rounds[0].clients.items() if "local-accuracy" in said} == {
                0,
                2,
                3,
            }
            assert set(result.rounds[1].clients) == {0, 1, 2, 3}
            # The client continues with its model of before the phase.
            if folders is None:
                assert equal(failed.kept, run.grid.of(1, "train")[1].kept)
            mirror = transfer.Mirror(run.models[1], run.train[1], run.test[1])
            for r in (1, 2):
                order = run.draw("train", r, 1, "order")
                mirror.train(mirror.x, mirror.y, 8, 2, order, rate=0.1)
            x = X[rows_of(run, 2)[0]].double()
            expected = mirror.predict(x, 2.0)
            np.testing.assert_allclose(run.grid.of(2, "train")[1].came()["predictions"], expected, atol=1e-6)

    @pytest.mark.parametrize(("rate", "epochs"), [(1e37, 5), (3e38, 1)])
    def test_all_distillations_diverge(self, rate: float, epochs: int) -> None:
        run = bare(distill_learning_rate=rate, distill_epochs=epochs, temperature=0.1)
        result = run.start(3, kind=Turned)
        failed = [call for call in run.grid.passed if call.error]
        assert len(failed) >= 6
        assert all(call.phase == "distill" and "FloatingPointError" in call.error for call in failed)
        for call in failed:
            assert equal(call.kept, run.grid.of(call.server_round, "train")[call.partition].kept)
        assert [stats.participants for stats in result.rounds] == [4] * 3

    def test_the_learning_rate_that_is_to_blame_is_named(self) -> None:
        run = bare(distill_learning_rate=1e37, distill_epochs=5, temperature=0.1)
        run.start(1, kind=Turned)
        failed = [call.error for call in run.grid.passed if call.error]
        assert failed
        assert all("distill-learning-rate" in call for call in failed)

    def test_a_training_that_diverges_leaves_the_model_of_before_in_its_folder(self, tmp_path: Path) -> None:
        """Flower does the same with ``context.state``, which it only takes from calls that return."""

        class Leaping(PublicKnowledgeClient):
            def train(self, task: Any, *args: Any, **kwargs: Any) -> float:
                loss = super().train(task, *args, **kwargs)
                if (task.server_round, self.context.node_config["partition-id"]) == (2, 1):
                    with torch.no_grad():
                        next(iter(self.model.parameters())).fill_(float("nan"))
                return loss

        run = bare()
        run.client = Leaping
        folders = [{"state-dir": str(tmp_path / str(n))} for n in range(4)]
        result = run.start(3, kind=Turned, grid={"node_configs": folders})
        assert participants(result) == [(4, 0), (3, 1), (4, 0)]

    def test_a_client_that_lost_its_state_between_the_phases_says_so(self) -> None:
        def before(r: int, phase: str, context: Context) -> None:
            if (r, phase, context.node_config["partition-id"]) == (1, "distill", 2):
                context.state = RecordDict()

        run = bare()
        result = run.start(2, kind=Turned, grid={"before": before})
        failed = [call for call in run.grid.passed if call.error]
        assert [(call.server_round, call.phase, call.partition) for call in failed] == [(1, "distill", 2)]
        text = "no model of this round's training is kept here: it was lost, or never trained"
        assert text in failed[0].error
        assert StateError.__name__ in failed[0].error
        assert participants(result) == [(4, 1), (4, 0)]

    def test_no_state_no_matter_which_answer_is_lost(self) -> None:
        faults = {0: Fault("silent", frozenset({1})), 1: Fault("late", frozenset({1}))}
        result = bare().start(2, kind=Turned, grid={"faults": faults}, timeout=0.2)
        assert [stats.participants for stats in result.rounds] == [2, 4]

    def test_targets_must_be_made_by_the_method(self) -> None:
        with pytest.raises(NotImplementedError):
            bare().start(1, kind=PublicKnowledgeStrategy)


class TestClient:
    MINE = digest(TensorDataset(X))

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (PublicRows(np.array([0, 14]), MINE), r"rows must be within 0..13, got 14"),
            (
                PublicRows(np.array([0]), "0" * 64),
                rf"this client's public data differs: digest {MINE[:12]}, the server's is 000000000000",
            ),
            (PublicRows(np.array([0]), ""), r"public data differs"),
            (None, r"the message of phase 'train' has no payload"),
            (PublicSamples(X.numpy()), r"public.rows: expected this message, got 'public.samples'"),
            (
                PublicRowsTargets(np.array([0]), np.eye(3, dtype=np.float32)[:1]),
                r"expected this message, got 'public.rows-targets'",
            ),
        ],
    )
    def test_what_a_server_must_not_ask(self, message: Payload | None, text: str) -> None:
        client, config = lone_client()
        payload = {} if message is None else {"payload": message.to_bytes()}
        with pytest.raises(PayloadError, match=text):
            client.fit([], {**config, "phase": "train", **payload})
        assert kept_model(client.context) == {}

    @pytest.mark.parametrize(
        ("targets", "text"),
        [
            (np.eye(4, dtype=np.float32)[:2], r"'targets' has shape \[2, 4\], expected \[K=2, C=3\]"),
            (np.full((2, 3), np.nan, dtype=np.float32), r"not finite"),
        ],
    )
    def test_targets_it_cannot_learn(self, targets: Any, text: str) -> None:
        client, config = lone_client()
        data = save(
            {"rows": np.array([0b11], dtype=np.uint8), "targets": targets},
            metadata={"schema": PublicRowsTargets.schema, "version": str(PublicRowsTargets.version)},
        )  # fmt: skip
        with pytest.raises(PayloadError, match=text):
            client.fit([], {**config, "phase": "distill", "payload": data})

    def test_distilling_comes_after_training(self) -> None:
        client, config = lone_client()
        message = PublicRowsTargets(np.array([0, 1]), np.eye(3, dtype=np.float32)[:2])
        with pytest.raises(StateError, match=r"no model of this round's training"):
            client.fit([], {**config, "phase": "distill", "payload": message.to_bytes()})

    def test_a_client_without_the_set(self) -> None:
        client, config = lone_client(public=lambda _: None)
        assert "public-digest" not in client.get_properties({})
        assert "num-public-examples" not in client.get_properties({})
        payload = PublicRows(np.array([0]), self.MINE).to_bytes()
        with pytest.raises(PayloadError, match=r"names public samples, but this client has no public_set"):
            client.fit([], {**config, "phase": "train", "payload": payload})

    def test_what_it_says_of_its_set(self) -> None:
        client, _ = lone_client()
        actual = client.get_properties({})
        assert (actual["num-public-examples"], actual["public-digest"]) == (14, self.MINE)

    @pytest.mark.parametrize("phase", ["clients", "server"])
    def test_samples_that_its_model_does_not_take(self, phase: str) -> None:
        """Said before any training, and not by a stack of torch's."""
        x = torch.zeros(5, 1, 3, 3)
        client, config = lone_client(public=lambda _: TensorDataset(x), public_at=phase)
        rows = PublicRows(np.arange(2), digest(TensorDataset(x)))
        message = rows if phase == "clients" else PublicSamples(x[:2].numpy())
        client.train = lambda *_: pytest.fail("it was trained")
        text = r"model does not take public data of shape \[1, 3, 3\]: "
        with pytest.raises(ConfigError, match=text):
            client.fit([], {**config, "phase": "train", "payload": message.to_bytes()})
        assert kept_model(client.context) == {}

    def test_predictions_are_made_in_eval_mode(self) -> None:
        client, config = lone_client(lone_context(2))  # the net with BatchNorm
        rows, values = torch.arange(14), PublicKnowledgeConfig.from_wire(config)
        before = {name: value.clone() for name, value in client.model.state_dict().items()}
        expected = client.predict(client.public_batches, rows, values)
        client.model.train()
        assert torch.equal(client.predict(client.public_batches, rows, values), expected)
        assert not client.model.training
        assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())

    def test_what_is_sent_is_not_changed(self) -> None:
        """Arrays of a payload cannot be written to; a client that tried would fail."""
        client, config = lone_client()
        payload = PublicRows(np.arange(14), self.MINE).to_bytes()
        first = client.fit([], {**config, "phase": "train", "payload": payload})
        assert first[0] == []
        assert first[1] == 17
        predictions = SoftPredictions.from_bytes(first[2]["payload"]).predictions
        message = PublicRowsTargets(np.arange(14), predictions)
        second = client.fit([], {**config, "phase": "distill", "payload": message.to_bytes()})
        assert second[0] == []
        assert set(second[2]) == {"local-accuracy"}


class TestForms:
    @pytest.mark.parametrize("kind", ["items", "inputs", "tensors", "array", "loader", "dicts", "named"])
    def test_they_give_the_same_numbers(self, kind: str) -> None:
        source: Any = {
            "items": Items([(x, "cat") for x in X]),
            "inputs": Items(list(X)),
            "tensors": TensorDataset(X),
            "array": ArrayDataset(X, Y),
            "loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
            "dicts": Items([{"image": x, "label": 7} for x in X]),
            "named": Items([{"picture": x, "id": i} for i, x in enumerate(X)]),
        }[kind]
        plain, run = bare(), bare(public=lambda _: source)
        if kind == "named":
            run.client_options = {"input_key": "picture"}
        plain.start(2, kind=Turned)
        result = run.start(2, kind=Turned)
        assert participants(result) == [(4, 0)] * 2
        assert same_models(run.grid, plain.grid)

    def test_they_are_the_same_set(self) -> None:
        sources = [
            Items([{"image": x} for x in X]),
            DataLoader(TensorDataset(X), batch_size=5),
            Items(list(X)),
            None,
        ]
        run = bare(public=lambda n: sources[n] or TensorDataset(X, Y))
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]

    def test_the_key_is_that_of_the_training_data(self) -> None:
        run = bare(public=lambda _: Items([{"a": x, "b": x * 0} for x in X]))
        for sets in (run.train, run.test):
            for n, source in enumerate(sets):
                x, y = source.tensors
                sets[n] = Items([{"a": x[i], "b": x[i] * 0, "label": int(y[i])} for i in range(len(y))])
        run.client_options = {"input_key": "a"}
        plain = bare()
        plain.start(1, kind=Turned)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert same_models(run.grid, plain.grid)

    def test_a_key_of_its_own(self) -> None:
        run = bare(public=lambda _: Items([{"a": x * 0, "picture": x} for x in X]))
        for sets in (run.train, run.test):
            for n, source in enumerate(sets):
                x, y = source.tensors
                sets[n] = Items([{"a": x[i], "picture": x[i] * 0, "label": int(y[i])} for i in range(len(y))])
        run.client_options = {"input_key": "a", "public_input_key": "picture"}
        plain = bare()
        plain.start(1, kind=Turned)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert same_models(run.grid, plain.grid)

    def test_a_loader_that_drops_its_last_batch(self) -> None:
        """The batches are incomplete in the distillation only; all samples are predicted."""
        source = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
        run = bare(public=lambda _: source)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert run.grid.of(1, "train")[0].came()["predictions"].shape == (10, 3)


class TestAccuracy:
    def test_it_is_of_the_distilled_model_on_the_client_s_own_test_split(self) -> None:
        run = bare(distill_learning_rate=2.0, distill_epochs=3)
        result = run.start(2, kind=Turned)
        differ = 0
        for r, stats in enumerate(result.rounds, start=1):
            actual = {}
            for n in range(4):
                mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
                mirror.take(run.grid.of(r, "train")[n].kept)
                before = mirror.accuracy()
                mirror.take(run.grid.of(r, "distill")[n].kept)
                actual[n] = {"trained-accuracy": before, "local-accuracy": mirror.accuracy()}
                differ += before != mirror.accuracy()
            assert stats.clients == actual
            assert stats.trained_accuracy == np.mean([each["trained-accuracy"] for each in actual.values()])
            assert stats.train_loss is not None
            assert stats.global_accuracy is None
        assert differ >= 3

    def test_top_5_of_many_classes(self) -> None:
        run = bare()
        run.models = [nn.Sequential(nn.Flatten(), nn.Linear(8, 7)) for _ in range(4)]
        result = run.start(1, kind=Turned)
        assert result.rounds[0].local_top5 is not None
        assert result.rounds[0].local_top5 >= (result.rounds[0].local_accuracy or 0)
