"""FedFomo: weights by hand, rounds against the oracle, and that what public code gets wrong is not here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import first_order as oracle
import numpy as np
import pytest
import torch
import watched
from flwr.app import ArrayRecord, Context, RecordDict
from torch.utils.data import TensorDataset
from watched import Party, party

from flwr_kd import privacy, registry
from flwr_kd.client.task import Task
from flwr_kd.seeding import derive_seed, torch_generator
from flwr_kd.strategies.fedfomo import (
    AffinityMatrix,
    FedFomo,
    FedFomoClient,
    FedFomoConfig,
    draw_models,
    helpfulness,
    mixture_weights,
)
from flwr_kd.testing.federation import Federation, numbers

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
LARGEST = float(np.finfo(np.float32).max)


def fomo(**config: Any) -> Party:
    return party("fedfomo", alike=True, **{"local_epochs": 2, "batch_size": 8, **config})


def initial(seed: int = 7) -> ArrayRecord:
    return ArrayRecord(watched.net(2, seed=seed).state_dict())


NAMES = list(initial())


def named(arrays: Any) -> dict[str, Any]:
    return dict(zip(NAMES, arrays, strict=True))


def models_in(arrays: list[Any]) -> list[dict[str, Any]]:
    return [named(arrays[i : i + len(NAMES)]) for i in range(0, len(arrays), len(NAMES))]


def kept(context: Context, name: str = "") -> dict[str, Any]:
    key = "flwr-kd.personal" + (f".{name}" if name else "")
    return {n: value.numpy().copy() for n, value in context.state.array_records[key].items()}


def validation_of(run: Party, n: int, share: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the validation and of the training, from the seeds: `share` of an order drawn once."""
    size = watched.SIZES[n]
    seed = derive_seed(run.strategy.seed, "client", n)
    order = torch.randperm(size, generator=torch_generator(seed, "validation"))
    count = int(size * share + 0.5)
    return order[:count].sort().values, order[count:].sort().values


class TestWeights:
    def test_by_hand(self) -> None:
        """Losses 1, 1.5 and 3 against 2, at distances 2, 0.25 and 4."""
        deltas = helpfulness(2.0, [1.0, 1.5, 3.0], [2.0, 0.25, 4.0])
        assert deltas == [0.5, 2.0, -0.25]
        assert mixture_weights(deltas) == [0.2, 0.8, 0.0]

    def test_at_distance_0_it_is_0(self) -> None:
        assert helpfulness(2.0, [2.0, 1.0], [0.0, 0.0]) == [0.0, 0.0]

    def test_all_may_be_0(self) -> None:
        assert mixture_weights([-1.0, 0.0, -math.inf]) == [0.0] * 3
        assert mixture_weights([]) == []

    def test_what_is_not_finite_is_harmful(self) -> None:
        assert helpfulness(2.0, [math.inf, math.nan, 1.0, 6.0], [1.0, 1.0, math.inf, 1.0]) == [-4, -4, -4, -4]
        assert helpfulness(math.nan, [1.0], [1.0]) == [0.0]
        assert helpfulness(2.0, [1.0, 3.0], [1e-300, 1e-300]) == [LARGEST, -LARGEST]

    def test_sums_of_the_largest_are_weights(self) -> None:
        assert mixture_weights([LARGEST, LARGEST]) == [0.5, 0.5]


class TestAffinities:
    def test_signed_over_the_sum_of_magnitudes(self) -> None:
        matrix = AffinityMatrix()
        matrix.admit([5, 2])
        matrix.admit([3, 2])
        assert matrix.clients == [2, 3, 5]
        matrix.add(3, [5, 2], np.float32([3.0, -1.0]))
        assert matrix.values.tolist() == [[0, 0, 0], [-0.25, 0, 0.75], [0, 0, 0]]
        matrix.add(3, [2], np.float32([0.5]))
        assert matrix.of(3, [5, 2]).tolist() == [0.75, 0.75]
        matrix.admit([4])
        assert matrix.of(3, [5, 4, 2]).tolist() == [0.75, 0, 0.75]

    def test_all_0_changes_nothing(self) -> None:
        matrix = AffinityMatrix([1, 2])
        matrix.add(1, [2], np.float32([0.0]))
        matrix.add(1, [], np.float32([]))
        assert (matrix.values == 0).all()

    def test_the_largest_numbers_stay_finite(self) -> None:
        matrix = AffinityMatrix([1, 2, 3])
        matrix.add(1, [2, 3], np.float32([LARGEST, -LARGEST]))
        assert matrix.of(1, [2, 3]).tolist() == [0.5, -0.5]


class TestDraw:
    def test_without_epsilon_the_largest_affinities(self) -> None:
        scores = np.array([0.1, -0.4, 0.9, 0.3, 0.2])
        for seed in range(20):
            assert draw_models(scores, 3, 0.0, np.random.default_rng(seed)) == [2, 3, 4]

    def test_ties_by_seed(self) -> None:
        drawn = {tuple(draw_models(np.zeros(4), 2, 0.0, np.random.default_rng(seed))) for seed in range(200)}
        assert len(drawn) == 12
        again = [draw_models(np.zeros(4), 2, 0.0, np.random.default_rng(3)) for _ in range(2)]
        assert again[0] == again[1]

    @pytest.mark.parametrize(("epsilon", "share"), [(0.3, 0.3 * 3 / 4), (1.0, 3 / 4)])
    def test_epsilon_is_the_share_that_is_drawn_at_random(self, epsilon: float, share: float) -> None:
        """The best of four is not the first one drawn in ε · 3/4 of the cases."""
        scores, rng = np.array([0.0, 3.0, 1.0, 2.0]), np.random.default_rng(0)
        other = np.mean([draw_models(scores, 1, epsilon, rng) != [1] for _ in range(4000)])
        assert other == pytest.approx(share, abs=0.03)

    @pytest.mark.parametrize("count", [1, 3, 9])
    def test_fewer_than_m_are_all_sent(self, count: int) -> None:
        """Public code fails there."""
        for epsilon in (0.0, 0.5):
            drawn = draw_models(np.arange(3.0), count, epsilon, np.random.default_rng(1))
            assert len(set(drawn)) == len(drawn) == min(count, 3)
        assert draw_models(np.zeros(0), count, 0.5, np.random.default_rng(1)) == []


class TestRounds:
    @pytest.mark.parametrize(
        "changes", [{}, {"unhelped": "own", "learning_rate": 3.0}], ids=["defaults", "far"]
    )
    def test_against_the_oracle(self, changes: dict[str, Any]) -> None:
        """Four rounds: θ_prev, θ, mixtures and P. Candidates have their own buffers, mixtures the client's."""
        begun: dict[tuple[int, int], dict[str, Any]] = {}
        ended: dict[tuple[int, int], dict[str, Any]] = {}

        class Noting(FedFomoClient):
            def train(self, task: Task[FedFomoConfig], *args: Any, **kwargs: Any) -> float:
                n = int(self.context.node_config["partition-id"])
                begun[task.server_round, n] = named(self.arrays(NAMES))
                loss = super().train(task, *args, **kwargs)
                ended[task.server_round, n] = named(self.arrays(NAMES))
                return loss

        run = fomo(models=2, **changes)
        run.client = Noting
        run.start(4, initial=initial())
        affinities, mixed_some, not_helped = np.zeros((4, 4)), 0, 0
        for r in range(1, 5):
            uploaded = {n: call.up_arrays for n, call in run.grid.of(r - 1, "train").items()}
            for n, call in run.grid.of(r, "train").items():
                values = call.came()["values"]
                if r == 1:
                    # The first time: the initial model, no mixture, no affinities.
                    (first,) = models_in(call.down_arrays)
                    for name, value in begun[1, n].items():
                        np.testing.assert_array_equal(value, initial()[name].numpy())
                        np.testing.assert_array_equal(value, first[name])
                    assert values.shape == (0,)
                    continue
                others = [
                    next(k for k, arrays in uploaded.items() if np.array_equal(arrays[0], model[NAMES[0]]))
                    for model in models_in(call.down_arrays)
                ]
                assert len(set(others)) == 2
                assert n not in others
                previous, own = begun[r - 1, n], ended[r - 1, n]
                candidates = [own, *(named(uploaded[k]) for k in others)]
                x, y = run.train[n].tensors
                rows, _ = validation_of(run, n)
                deltas = oracle.deltas(run.models[n], previous, candidates, x[rows], y[rows])
                np.testing.assert_allclose(values, deltas[1:], rtol=1e-3, atol=1e-5)
                affinities[n, others] += values.astype(np.float64) / np.abs(values.astype(np.float64)).sum()
                helped = max(deltas) > 0
                if helped or run.strategy.config.unhelped == "previous":
                    expected = oracle.mixture(run.models[n], previous, own, candidates, deltas)
                else:
                    expected = own
                not_helped += not helped
                mixed_some += sum(delta > 0 for delta in deltas) > 1
                for name in NAMES:
                    np.testing.assert_allclose(begun[r, n][name], expected[name], rtol=2e-3, atol=2e-5)
                    if name.endswith(STATISTICS):
                        np.testing.assert_array_equal(begun[r, n][name], own[name])
        np.testing.assert_allclose(run.matrices[-1]["affinities"], affinities, atol=1e-6)
        assert mixed_some
        for n in range(4):
            context = run.grid.context(n)
            for name in NAMES:
                np.testing.assert_array_equal(kept(context, "previous")[name], begun[4, n][name])
                np.testing.assert_array_equal(kept(context)[name], ended[4, n][name])

    def test_all_weights_0_begin_where_the_last_training_began(self) -> None:
        """A rate that only harms: from θ_prev, with θ's buffers, or by the option from θ."""
        for unhelped in ("previous", "own"):
            client = client_of(0, unhelped=unhelped)
            previous, own = harmful(client)
            client.mix(client.task_for([]), client.parts(client.task_for([]))[1])
            for name, value in client.model.state_dict().items():
                from_own = unhelped == "own" or name.endswith(STATISTICS)
                assert torch.equal(value, (own if from_own else previous)[name]), name

    def test_others_models_change_nothing_but_where_training_begins(self) -> None:
        """The own model is among the candidates: without it local training would be lost."""
        run = fomo()
        run.start(3, initial=initial())
        for n in range(4):
            previous = kept(run.grid.context(n), "previous")
            own = kept(run.grid.context(n))
            assert any(not np.array_equal(previous[name], own[name]) for name in NAMES)

    def test_min_of_m_and_the_others_that_have_replied_are_sent(self) -> None:
        counts: dict[int, list[int]] = {}
        for models in (1, 2, 9):
            run = fomo(models=models)
            run.start(8, initial=initial(), fraction_train=0.5)
            seen: set[int] = set()
            for r in range(1, 9):
                for n, call in run.grid.of(r, "train").items():
                    others = len(seen - {n}) if n in seen else 0
                    count = len(call.down_arrays) // len(NAMES)
                    # Before its first reply a client is sent the initial model.
                    assert count == (min(models, others) if n in seen and others else n not in seen)
                    assert len(call.came()["values"]) == (min(models, others) if n in seen else 0)
                    counts.setdefault(models, []).append(count)
                seen |= set(run.grid.of(r, "train"))
        assert max(counts[9]) == 3

    def test_absent_clients_models_are_sent(self) -> None:
        run = fomo(models=3)
        run.start(5, initial=initial(), fraction_train=0.5)
        last: dict[int, Any] = {}
        from_absent = 0
        for r in range(1, 6):
            calls = run.grid.of(r, "train")
            for n, call in calls.items():
                if n in last:
                    for model in models_in(call.down_arrays):
                        whose = [k for k, a in last.items() if np.array_equal(a[0], model[NAMES[0]])]
                        assert len(whose) == 1
                        from_absent += whose[0] not in run.grid.of(r - 1, "train")
            last |= {n: call.up_arrays for n, call in calls.items()}
        assert from_absent

    def test_a_client_that_lost_its_state_begins_anew(self, flower_log: list[str]) -> None:
        def before(r: int, phase: str, context: Context) -> None:
            if (r, context.node_config["partition-id"]) == (3, 2):
                context.state = RecordDict()

        run = fomo()
        result = run.start(4, initial=initial(), grid={"before": before})
        assert [(s.participants, s.failures) for s in result.rounds] == [(4, 0)] * 4
        assert (run.grid.of(3, "train")[2].came()["values"] == 0).all()
        assert any("has lost its personal model" in line for line in flower_log)


class TestValidation:
    def test_it_is_drawn_once_by_the_seed_and_never_trained_on(self) -> None:
        """Public code takes the last 20 % in file order."""
        trained: dict[int, set[float]] = {}
        weighed: dict[int, list[Any]] = {}

        class Noting(FedFomoClient):
            def objective(self, task: Any) -> Any:
                loss, n = super().objective(task), int(self.context.node_config["partition-id"])

                def noting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                    trained.setdefault(n, set()).update(x.flatten(1).sum(dim=1).tolist())
                    return loss(x, y)

                return noting

            def _validation_loss(self, task: Any, rows: torch.Tensor) -> torch.Tensor:
                weighed.setdefault(int(self.context.node_config["partition-id"]), []).append(rows.tolist())
                return super()._validation_loss(task, rows)

        run = fomo(validation_share=0.3)
        run.client = Noting
        run.start(3, initial=initial())
        for n in range(4):
            rows, rest = validation_of(run, n, 0.3)
            assert all(seen == rows.tolist() for seen in weighed[n])
            assert rows.tolist() != list(range(len(rest), watched.SIZES[n]))
            sums = run.train[n].tensors[0].flatten(1).sum(dim=1)
            assert trained[n] == set(sums[rest].tolist())
            assert not trained[n] & set(sums[rows].tolist())

    def test_it_is_another_one_with_another_seed(self) -> None:
        run = fomo()
        run.start(1, initial=initial(), seed=0)
        first = validation_of(run, 3)[0].tolist()
        run.start(1, initial=initial(), seed=1)
        assert validation_of(run, 3)[0].tolist() != first

    def test_clients_report_what_they_train_on(self) -> None:
        counts: list[int] = []

        class Noting(FedFomoClient):
            def phase_train(self, task: Any) -> Any:
                answer = super().phase_train(task)
                counts.append(answer.num_examples)
                return answer

        run = fomo()
        run.client = Noting
        run.start(1, initial=initial())
        assert sorted(counts) == sorted(size - int(size * 0.2 + 0.5) for size in watched.SIZES)

    def test_a_client_without_validation_samples_goes_on_from_its_own_model(self) -> None:
        run = fomo()
        x, y = run.train[1].tensors
        run.train[1] = TensorDataset(x[:2], y[:2])
        result = run.start(3, initial=initial())
        assert [s.failures for s in result.rounds] == [0, 0, 0]
        second, third = (run.grid.of(r, "train")[1] for r in (2, 3))
        assert (third.came()["values"] == 0).all()
        for name, value in kept(run.grid.context(1), "previous").items():
            np.testing.assert_array_equal(value, named(second.up_arrays)[name])


class TestState:
    @pytest.mark.parametrize("memory", [0, 2**20])
    def test_a_resumed_run_equals_an_uninterrupted_one(self, memory: int, tmp_path: Path) -> None:
        """To the last bit, with clients that have a state-dir."""

        def grid(name: str) -> dict[str, Any]:
            return {"node_configs": [{"state-dir": str(tmp_path / name)}] * 4}

        fed, folder = Federation("fedfomo"), tmp_path / "checkpoint"
        options: dict[str, Any] = {"settings": ["models=2"], "fraction_train": 0.75}
        whole, expected = fed.run(rounds=5, grid=grid("whole"), **options)
        kinds = {"checkpoint_dir": folder, "model_memory": memory, "grid": grid("parts"), **options}
        fed.run(rounds=3, **kinds)
        rest, result = fed.run(rounds=5, resume=True, **kinds)
        assert numbers(result) == numbers(expected)[3:]
        one, other = whole.state_arrays(), rest.state_arrays()
        assert one.keys() == other.keys()
        assert "affinities" in one
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)

    @pytest.mark.parametrize(
        "state",
        [
            {"models/0/w": np.zeros(2)},
            {"models/0/w": np.zeros(2), "affinities": np.zeros((2, 2))},
            {"models/0/w": np.zeros(2), "affinities": np.full((1, 1), np.nan)},
            {"models/0/w": np.zeros(2), "affinities": np.zeros((1, 1)), "more": np.zeros(1)},
        ],
    )
    def test_another_state_is_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="affinities"):
            FedFomo().load_state_arrays(state)

    def test_both_models_count_against_the_bound(self) -> None:
        client = client_of(0)
        size = sum(t.numel() * t.element_size() for t in client.model.state_dict().values())
        assert client.kept_bytes() == 2 * size


def test_it_is_said_that_others_get_the_models() -> None:
    method = registry.get("fedfomo")
    assert "**its weights, as they are, to other clients**" in method.reaches_others
    page = Path(__file__).resolve().parents[2] / "strategies" / "fedfomo" / "README.md"
    assert "**Other clients get a client's model as it is**" in page.read_text(encoding="utf-8")
    assert any("FedFomo" in text for text in privacy.NOT_COVERED)


class Bare(FedFomoClient):
    settings: dict[str, Any]

    def task_for(self, arrays: list[Any]) -> Task[FedFomoConfig]:
        config = FedFomoConfig(**self.settings)
        return Task(2, "train", 1, tuple(NAMES), arrays, None, config, client_seed=5)


def client_of(n: int, **settings: Any) -> Bare:
    run = fomo()
    context = Context(run_id=1, node_id=1, node_config={"partition-id": n}, state=RecordDict(), run_config={})
    client = Bare(copy.deepcopy(run.models[n]), run.train[n], run.test[n], context=context, device="cpu")
    client.settings = settings
    return client


def harmful(client: Bare) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Let a client keep a model, and one to which a rate far too large has led from there."""
    client.state.at("run", 1, known=1, saved=0)
    previous = {name: value.clone() for name, value in client.model.state_dict().items()}
    own = {name: value.clone() for name, value in previous.items()}
    own["2.running_mean"] += 1
    own["2.num_batches_tracked"] += 3
    _, y = client.train_batches.dataset.tensors
    # Large logits of classes that are rare among the labels.
    own["4.bias"] -= 100 * torch.nn.functional.one_hot(y, watched.CLASSES).sum(0)
    client.state.save(previous, "previous")
    client.state.save(own)
    return previous, own
