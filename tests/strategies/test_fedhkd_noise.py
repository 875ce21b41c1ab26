"""FedHKD's noise on representations and on predictions."""

from __future__ import annotations

import math
from typing import Any

import knowledge as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from tensors import (
    both_dtypes,
    generator,
    normal,
    probabilities,
    random_labels,
)
from torch import Tensor

from flwr_kd.strategies.fedhkd import (
    Knowledge,
    add_noise,
    aggregate_knowledge,
    local_knowledge,
    noise_predictions,
)

repeatable = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def _random_client(seed: int) -> Knowledge:
    return local_knowledge(
        normal(12, 3, seed=seed, scale=3.0),
        normal(12, 4, seed=seed + 1),
        random_labels(12, 4, seed + 2),
        num_classes=4,
        threshold=0.25,
        temperature=0.5,
        clip=3.0,
    )


def _assert_same(a: Knowledge, b: Knowledge) -> None:
    torch.testing.assert_close(a.representations, b.representations, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(a.predictions, b.predictions, rtol=1e-12, atol=1e-13)
    assert torch.equal(a.counts, b.counts)


class TestAddNoise:
    WIDTH = 40_000

    def _knowledge(self, counts: list[int], width: int = WIDTH) -> Knowledge:
        known = torch.tensor(counts) > 0
        return Knowledge(
            torch.linspace(-3, 3, width, dtype=torch.float64).repeat(len(counts), 1) * known[:, None],
            probabilities(len(counts), len(counts), seed=1) * known[:, None],
            torch.tensor(counts),
        )

    def test_distribution(self) -> None:
        # (7) and (8): per element N(0, (2 ζ σ / N_i^j)²), so a class with few samples gets more noise.
        clean = self._knowledge([1, 0, 10, 250])
        noisy = add_noise(clean, sigma=7.0, clip=3.0, generator=generator(5))
        for j, count in ((0, 1), (2, 10), (3, 250)):
            std = oracle.noise_std(count, sigma=7.0, clip=3.0)
            assert std == pytest.approx(42 / count)
            noise = noisy.representations[j] - clean.representations[j]
            assert abs(noise.mean().item()) < 4 * std / math.sqrt(self.WIDTH)
            assert noise.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * self.WIDTH))
            assert kstest(noise.numpy() / std, "norm").pvalue > 0.001

    def test_secret_noise_has_the_same_distribution(self) -> None:
        clean = self._knowledge([1, 0, 250])
        noisy = add_noise(clean, sigma=7.0, clip=3.0, generator=None)
        assert noisy.representations.dtype == torch.float64
        for j, count in ((0, 1), (2, 250)):
            std = oracle.noise_std(count, sigma=7.0, clip=3.0)
            noise = noisy.representations[j] - clean.representations[j]
            assert noise.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * self.WIDTH) + 0.002)
            assert kstest(noise.numpy() / std, "norm").pvalue > 0.0001
        assert noisy.representations[1].abs().max() == 0
        rows = noise_predictions(clean, sigma=7.0, generator=None).predictions
        torch.testing.assert_close(rows.sum(1), clean.known.double())

    def test_elements_are_independent(self) -> None:
        # Not one draw per class, nor the same draws for every class.
        clean = self._knowledge([4, 4])
        noise = (
            add_noise(clean, sigma=7.0, clip=3.0, generator=generator(6)).representations
            - clean.representations
        )
        bound = 4 / math.sqrt(self.WIDTH)
        assert abs(torch.corrcoef(noise)[0, 1].item()) < bound
        assert abs(torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))[0, 1].item()) < bound

    def test_unknown_classes_stay_zero_and_the_rest_is_untouched(self) -> None:
        clean = self._knowledge([2, 0, 3], width=50)
        before = clean.representations.clone()
        noisy = add_noise(clean, sigma=7.0, clip=3.0, generator=generator(7))
        assert torch.equal(clean.representations, before)
        assert noisy.representations[1].tolist() == [0.0] * 50
        assert (noisy.representations[[0, 2]] != before[[0, 2]]).all()
        assert torch.equal(noisy.predictions, clean.predictions)
        assert torch.equal(noisy.counts, clean.counts)

    def test_generator_decides_the_draw(self) -> None:
        clean = self._knowledge([2, 5], width=20)

        def draw(generator: torch.Generator) -> Tensor:
            return add_noise(clean, sigma=7.0, clip=3.0, generator=generator).representations

        shared = generator(8)
        first = draw(shared)
        assert torch.equal(first, draw(generator(8)))
        assert not torch.equal(first, draw(shared))
        assert not torch.equal(first, draw(generator(9)))

    def test_global_generator_is_not_used(self) -> None:
        state = torch.get_rng_state()
        add_noise(self._knowledge([2], width=20), sigma=7.0, clip=3.0, generator=generator(8))
        assert torch.equal(torch.get_rng_state(), state)

    @both_dtypes
    def test_sigma_zero_is_the_identity(self, dtype: torch.dtype) -> None:
        clean = self._knowledge([2, 0], width=20)
        clean = Knowledge(clean.representations.to(dtype), clean.predictions.to(dtype), clean.counts)
        noisy = add_noise(clean, sigma=0.0, clip=3.0, generator=generator(1))
        assert torch.equal(noisy.representations, clean.representations)
        assert noisy.representations.dtype == dtype
        assert torch.equal(noisy.predictions, clean.predictions)
        assert torch.equal(noisy.counts, clean.counts)

    @both_dtypes
    def test_keeps_the_dtype(self, dtype: torch.dtype) -> None:
        clean = self._knowledge([2], width=20)
        clean = Knowledge(clean.representations.to(dtype), clean.predictions.to(dtype), clean.counts)
        assert add_noise(clean, sigma=7.0, clip=3.0, generator=generator(1)).representations.dtype == dtype

    def test_noise_is_averaged_out_over_clients(self) -> None:
        # (10): Σ p_i χ_i has the variance σ² Σ p_i² S_i². As p_i S_i = 2 ζ / N^j for every client, the
        # standard deviation is 2 ζ σ √m / N^j. (The text below (10) prints the variance without the p_i².)
        counts = [3, 10, 40, 100]
        shared = generator(10)
        clean = [self._knowledge([n]) for n in counts]
        noisy = [add_noise(knowledge, sigma=7.0, clip=3.0, generator=shared) for knowledge in clean]
        error = aggregate_knowledge(noisy).representations - aggregate_knowledge(clean).representations
        expected = 2 * 3.0 * 7.0 * math.sqrt(len(counts)) / sum(counts)
        assert error.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * self.WIDTH))
        assert abs(error.mean().item()) < 4 * expected / math.sqrt(self.WIDTH)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("sigma", -1.0),
            ("sigma", math.nan),
            ("sigma", math.inf),
            ("clip", 0.0),
            ("clip", -3.0),
            ("clip", math.nan),
            ("clip", math.inf),
        ],
    )
    def test_bad_options(self, field: str, value: float) -> None:
        options = {"sigma": 7.0, "clip": 3.0} | {field: value}
        # The noise's own name for ζ is the bound.
        with pytest.raises(ValueError, match=r"clip|bound" if field == "clip" else field):
            add_noise(self._knowledge([2], width=3), generator=generator(1), **options)


class TestNoisePredictions:
    def test_distribution(self) -> None:
        # Noise that never reaches a negative element: with uniform p the division by the row's sum takes the
        # noise's mean off it, so C independent elements of variance s² keep the variance s² (1 - 1/C).
        classes, count, sigma = 200, 1000, 0.1
        clean = Knowledge(
            torch.zeros(classes, 3, dtype=torch.float64),
            torch.full((classes, classes), 1 / classes, dtype=torch.float64),
            torch.full((classes,), count),
        )
        noisy = noise_predictions(clean, sigma=sigma, generator=generator(1))
        noise = noisy.predictions - clean.predictions
        expected = sigma / count * math.sqrt(1 - 1 / classes)
        # 1 % for the second order of the division.
        assert noise.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * classes**2) + 0.01)
        assert kstest(noise.flatten().numpy() / expected, "norm").pvalue > 0.001

    @both_dtypes
    @repeatable
    @given(
        seed=seeds, classes=st.integers(1, 6), sigma=st.sampled_from([0.01, 1.0, 7.0, 1e4]), data=st.data()
    )
    def test_rows_stay_distributions(
        self, dtype: torch.dtype, seed: int, classes: int, sigma: float, data: Any
    ) -> None:
        counts = torch.tensor(data.draw(st.lists(st.integers(0, 50), min_size=classes, max_size=classes)))
        rows = probabilities(classes, classes, seed=seed, dtype=dtype) * (counts > 0)[:, None]
        clean = Knowledge(normal(classes, 2, seed=seed, dtype=dtype) * (counts > 0)[:, None], rows, counts)
        noisy = noise_predictions(clean, sigma=sigma, generator=generator(seed))
        assert noisy.predictions.dtype == dtype
        assert (noisy.predictions >= 0).all()
        torch.testing.assert_close(noisy.predictions.sum(1), (counts > 0).to(dtype))
        assert torch.equal(noisy.representations, clean.representations)
        assert torch.equal(noisy.counts, counts)

    def test_a_row_without_a_positive_element_becomes_uniform(self) -> None:
        # So much noise that both elements of a row are negative in one row of four.
        clean = Knowledge(torch.zeros(2, 1), torch.full((2, 2), 0.5), torch.tensor([1, 1]))
        rows = torch.cat(
            [
                noise_predictions(clean, sigma=1e6, generator=generator(seed)).predictions
                for seed in range(200)
            ]
        )
        uniform = (rows == 0.5).all(1).double().mean().item()
        assert uniform == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 400))

    def test_sigma_zero_is_the_identity(self) -> None:
        clean = _random_client(1)
        assert not clean.known.all()
        assert clean.known.any()
        _assert_same(noise_predictions(clean, sigma=0.0, generator=generator(1)), clean)

    def test_generator_decides_the_draw(self) -> None:
        clean = _random_client(1)
        shared = generator(8)
        first = noise_predictions(clean, sigma=1.0, generator=shared).predictions
        again = noise_predictions(clean, sigma=1.0, generator=shared).predictions
        same = noise_predictions(clean, sigma=1.0, generator=generator(8)).predictions
        assert torch.equal(first, same)
        assert not torch.equal(first, again)

    @pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf])
    def test_bad_sigma(self, sigma: float) -> None:
        clean = _random_client(1)
        with pytest.raises(ValueError, match="sigma"):
            noise_predictions(clean, sigma=sigma, generator=generator(1))
