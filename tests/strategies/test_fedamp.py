"""FedAMP: its weights and rounds against the oracle, and that what public code gets wrong is not here."""

from __future__ import annotations

import copy
import doctest
from pathlib import Path
from typing import Any

import attentive as oracle
import numpy as np
import pytest
import torch
import watched
from flwr.app import ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from watched import Party, party

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.strategies.fedamp import FedAMP, FedAMPConfig, cosine_attention, distance_attention
from flwr_kd.strategies.fedamp.functional import bandwidth
from flwr_kd.testing.federation import Federation, numbers

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
TRAINING: dict[str, Any] = {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.1}


def amp(**config: Any) -> Party:
    return party("fedamp", alike=True, **{**TRAINING, **config})


def initial(seed: int = 7) -> ArrayRecord:
    return ArrayRecord(watched.net(2, seed=seed).state_dict())


NAMES = list(initial())


def parameters(arrays: list[np.ndarray]) -> list[float]:
    """Return a model's parameters as one list, without running statistics."""
    pairs = zip(NAMES, arrays, strict=True)
    chosen = [array.ravel() for name, array in pairs if not name.endswith(STATISTICS)]
    return np.concatenate(chosen).astype(np.float64).tolist()  # type: ignore[no-any-return]


def models(seed: int, count: int, size: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size))


def test_the_oracles_own_cases() -> None:
    results = doctest.testmod(oracle)
    assert results.attempted == 2
    assert results.failed == 0


class TestAttention:
    @given(st.integers(2, 7), st.sampled_from([0.0, 1.0, 25.0]), st.integers(0, 1000))
    def test_cosine(self, count: int, scale: float, seed: int) -> None:
        points = models(seed, count)
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        weights, scaled = cosine_attention(unit @ unit.T, scale)
        np.testing.assert_allclose(weights, oracle.cosine_rows(points.tolist(), scale), rtol=1e-9)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_allclose(weights.diagonal(), 1 / count)
        assert not scaled.any()

    @given(st.integers(2, 7), st.sampled_from([0.0, 0.5, 2.0, 1e4]), st.integers(0, 1000))
    def test_distance(self, count: int, alpha: float, seed: int) -> None:
        points = models(seed, count)
        squares = ((points[:, None] - points[None]) ** 2).sum(axis=2)
        weights, scaled = distance_attention(squares, alpha)
        expected, number = oracle.distance_rows(points.tolist(), alpha)
        np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)
        assert (weights >= 0).all()
        assert scaled.sum() == number
        assert number == (count if alpha == 1e4 else 0 if alpha == 0 else number)
        if not alpha:
            assert (weights.diagonal() >= 1 / count - 1e-12).all()

    def test_public_defaults_have_a_large_negative_weight_of_the_own_model(self) -> None:
        """σ = 25 and α = 1e4, unscaled, on models as near as they are; here it is at least 0."""
        points = 0.1 * models(0, 3)
        squares = ((points[:, None] - points[None]) ** 2).sum(axis=2)
        bare = 1e4 / 25 * np.exp(-squares / 25)
        assert 1 - (bare.sum(axis=1) - bare.diagonal()).max() < -500
        weights, scaled = distance_attention(squares, 1e4)
        assert weights.min() >= 0
        assert scaled.all()

    def test_the_bandwidth_is_the_median(self) -> None:
        points = models(3, 6)
        squares = ((points[:, None] - points[None]) ** 2).sum(axis=2)
        assert bandwidth(squares) == np.median([squares[i, j] for j in range(6) for i in range(j)])

    def test_equal_and_infinitely_far_models(self) -> None:
        np.testing.assert_allclose(distance_attention(np.zeros((3, 3))).weights, 1 / 3)
        assert bandwidth(np.zeros((3, 3))) == 1
        far = np.array([[0, 0, np.inf], [0, 0, np.inf], [np.inf, np.inf, 0]])
        assert distance_attention(far).weights[2].tolist() == [0, 0, 1]
        # Four of five models are equal: the median is 0, and is not divided by.
        squares = np.zeros((5, 5))
        squares[4, :4] = squares[:4, 4] = 4.0
        weights = distance_attention(squares).weights
        assert bandwidth(squares) == 4
        np.testing.assert_allclose(weights.sum(axis=1), 1)

    @pytest.mark.parametrize("attention", [cosine_attention, distance_attention])
    def test_one_client_alone(self, attention: Any) -> None:
        assert attention(np.eye(1) * 0, 1.0).weights.tolist() == [[1.0]]

    def test_what_is_given_does_not_change(self) -> None:
        squares = np.ones((3, 3))
        cosine_attention(squares, 1.0), distance_attention(squares, 9.0)
        assert (squares == 1).all()


class TestRounds:
    @pytest.mark.parametrize("fraction", [1.0, 0.5])
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"cosine_scale": 3.0},
            {"attention": "distance"},
            {"attention": "distance", "attention_alpha": 0.5},
        ],
        ids=["cosine", "scale", "distance", "alpha"],
    )
    def test_a_client_is_sent_its_mixture(self, changes: dict[str, Any], fraction: float) -> None:
        """Of all last models, of those never drawn the initial one; with its own running statistics."""
        run, start = amp(**changes), [value.numpy() for value in initial().values()]
        run.start(4, initial=initial(), fraction_train=fraction, model_memory=900)
        last = dict.fromkeys(range(4), start)
        scaled = []
        for r in range(1, 5):
            points = [parameters(last[n]) for n in range(4)]
            config = run.strategy.config
            if config.attention == "cosine":
                rows = oracle.cosine_rows(points, config.cosine_scale)
            elif r == 1:
                rows = [[0.25] * 4] * 4
            else:
                distinct = len({tuple(point) for point in points})
                if distinct < 4:
                    continue
                rows, number = oracle.distance_rows(points, config.attention_alpha)
                scaled.append(number)
            for n, call in run.grid.of(r, "train").items():
                mixed = np.tensordot(rows[n], np.array(points), axes=1)
                np.testing.assert_allclose(parameters(call.down_arrays), mixed, rtol=1e-5, atol=1e-6)
                for name, mine, own in zip(NAMES, call.down_arrays, last[n], strict=True):
                    if name.endswith(STATISTICS):
                        np.testing.assert_array_equal(mine, own)
            last |= {n: call.up_arrays for n, call in run.grid.of(r, "train").items()}
        assert len(run.grid.passed) == 16 * fraction
        if "attention_alpha" in changes and fraction == 1:
            assert max(scaled) > 0

    def test_scaled_rows_are_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        run = amp(attention="distance", attention_alpha=1e4)
        with caplog.at_level("INFO", logger="flwr"):
            run.start(2, initial=initial())
        assert run.strategy.attention.scaled.tolist() == [True] * 4
        assert run.strategy.clients == [0, 1, 2, 3]
        assert run.strategy.attention.weights.diagonal().tolist() == [0] * 4

    @pytest.mark.parametrize(("alpha", "rounds"), [(1e4, 1), (2.0, 2)])
    def test_training_is_descent_on_the_loss_and_the_distance(self, alpha: float, rounds: int) -> None:
        """From u_i, with λ/α in the gradient, α decayed each round; the oracle has no term, but its gradient."""
        run = amp(alpha=alpha, proximal_lambda=3.0, alpha_decay=0.5, alpha_decay_every=1)
        run.start(rounds, initial=initial())
        for n, call in run.grid.of(rounds, "train").items():
            model = copy.deepcopy(run.models[n])
            arrays = dict(zip(NAMES, map(torch.from_numpy, call.down_arrays), strict=True))
            model.load_state_dict(arrays)
            x, y = run.train[n].tensors
            order = run.draw("train", rounds, n, "order")
            batches = []
            for _ in range(2):
                chunks = list(torch.split(torch.randperm(len(y), generator=order), 8))
                if len(chunks[-1]) == 1:
                    chunks[-2:] = [torch.cat(chunks[-2:])]
                batches += [(x[chunk], y[chunk]) for chunk in chunks]
            expected = oracle.trained(model, batches, rate=0.1, mu=3.0 / (alpha * 0.5 ** (rounds - 1)))
            for name, mine in zip(NAMES, call.up_arrays, strict=True):
                np.testing.assert_allclose(mine, expected[name], rtol=1e-4, atol=1e-5)

    def test_lambda_changes_the_trained_model(self) -> None:
        """In a public copy the penalty is made of detached data: λ changes nothing, to the last bit."""
        runs = {}
        for value in (0.0, 1.0, 100.0):
            run = amp(proximal_lambda=value, alpha=10.0)
            run.start(1, initial=initial())
            call = run.grid.of(1, "train")[0]
            away = np.subtract(parameters(call.up_arrays), parameters(call.down_arrays))
            runs[value] = float(np.linalg.norm(away))
        assert runs[0.0] > 1.01 * runs[1.0] > 1.01 * runs[100.0] > 0

    def test_it_is_not_local_training(self) -> None:
        run = amp()
        run.start(2, initial=initial())
        for n, call in run.grid.of(2, "train").items():
            own = parameters(run.grid.of(1, "train")[n].up_arrays)
            assert np.abs(np.subtract(parameters(call.down_arrays), own)).max() > 1e-3

    def test_similar_clients_have_more_of_each_other(self) -> None:
        """Two of four clients have the other two's labels shifted."""
        run = amp(local_epochs=20)
        for n in (1, 3):
            x, y = run.train[n].tensors
            run.train[n] = torch.utils.data.TensorDataset(x, (y + 1) % watched.CLASSES)
        run.start(3, initial=initial())
        weights = run.strategy.attention.weights
        assert weights[0, 2] > max(weights[0, 1], weights[0, 3])
        assert weights[3, 1] > max(weights[3, 0], weights[3, 2])

    def test_without_initial_arrays_clients_count_once_they_have_replied(self) -> None:
        run = amp()
        run.start(3, fraction_train=0.5)
        first = run.grid.of(1, "train")
        assert not any(call.down_arrays for call in first.values())
        for n, call in run.grid.of(2, "train").items():
            assert bool(call.down_arrays) == (n in first)
        assert set(run.strategy.models.keys) == {call.partition for call in run.grid.passed}


class TestMeasured:
    def test_it_is_the_trained_model(self) -> None:
        """After training in each round; after the last round, the own last model of those that were not drawn."""
        run = amp()
        result = run.start(3, initial=initial(), fraction_train=0.5)
        last: dict[int, list[np.ndarray]] = {}
        for r, stats in enumerate(result.rounds, start=1):
            last |= {n: call.up_arrays for n, call in run.grid.of(r, "train").items()}
            drawn = run.grid.of(r, "train")
            for n, reported in stats.clients.items():
                model = copy.deepcopy(run.models[n])
                arrays = last.get(n, [value.numpy() for value in initial().values()])
                model.load_state_dict(dict(zip(NAMES, map(torch.from_numpy, arrays), strict=True)))
                x, y = run.test[n].tensors
                right = (model.eval()(x).argmax(dim=1) == y).float().mean()
                assert reported["local-accuracy"] == pytest.approx(float(right), abs=1e-6)
            assert set(stats.clients) == (set(range(4)) if r == 3 else set(drawn))
        stats = result.rounds[-1]
        others = set(range(4)) - set(run.grid.of(3, "train"))
        assert set(stats.stored) == others & set(last)
        assert set(stats.received) == others - set(last)


class TestState:
    @pytest.mark.parametrize("memory", [0, 2**20])
    def test_a_resumed_run_equals_an_uninterrupted_one(self, memory: int, tmp_path: Path) -> None:
        """To the last bit, with models in files or in memory; its clients keep nothing."""
        for attention in ("cosine", "distance"):
            fed, folder = Federation("fedamp"), tmp_path / attention
            options: dict[str, Any] = {"settings": [f"attention={attention}"], "fraction_train": 0.5}
            whole, expected = fed.run(rounds=4, **options)
            fed.run(rounds=2, checkpoint_dir=folder, model_memory=memory, **options)
            rest, result = fed.run(
                rounds=4, checkpoint_dir=folder, resume=True, model_memory=memory, **options
            )
            assert numbers(result) == numbers(expected)[2:]
            one, other = whole.state_arrays(), rest.state_arrays()
            assert one.keys() == other.keys()
            assert all(one[name].tobytes() == other[name].tobytes() for name in one)
            assert [path.name for path in folder.iterdir()] == ["checkpoint.safetensors"]

    def test_another_state_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no state of its own"):
            FedAMP().load_state_arrays({"matrix": np.eye(2)})
        with pytest.raises(ValueError, match="not of one architecture"):
            FedAMP().load_state_arrays({"models/0/w": np.zeros(2), "models/1/w": np.zeros(3)})

    def test_memory_must_be_a_number_of_bytes(self) -> None:
        with pytest.raises(ConfigError, match="model_memory must be a whole number"):
            FedAMP(model_memory=-1)


def test_heur_fedamp_is_the_default_with_its_attention_fixed() -> None:
    assert registry.get("heur-fedamp").config() == FedAMPConfig() == registry.get("fedamp").config()
    with pytest.raises(ConfigError, match="attention is fixed at cosine by this method"):
        registry.get("heur-fedamp").config(["attention=distance"])


def test_alpha_scales_the_proximal_term_only() -> None:
    config = FedAMPConfig()
    assert [config.proximal_mu_at(r) for r in (1, 30, 31, 61)] == pytest.approx([1e-4, 1e-4, 1e-3, 1e-2])
    assert config.learning_rate_at(31) == config.learning_rate * 0.5**3
