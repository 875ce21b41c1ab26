"""Noise from the operating system, on a lattice."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
from scipy import stats

from flwr_kd.checks import ConfigError
from flwr_kd.privacy import noise_std
from flwr_kd.secret_noise import (
    LARGEST_SIGMA,
    _discrete_gaussian,
    _thresholds,
    lattice_noise,
    steps_per_sensitivity,
)


@pytest.mark.parametrize("scale", [0.3, 3.0, 1500.5])
def test_the_thresholds_are_those_of_the_discrete_gaussian(scale: float) -> None:
    """Against sums in floating point, which are exact to about 1e-15 when small terms are added first."""
    table = _thresholds(scale)
    reach = math.ceil(12 * scale) + 3
    weights = [math.exp(-(k**2) / (2 * scale**2)) for k in range(reach)]
    total = weights[0] + 2 * math.fsum(weights[1:])
    for m in {1, 2, len(table) // 2, len(table)} - {0}:
        tail = 2 * math.fsum(weights[m:]) / total
        assert int(table[len(table) - m]) / 2**63 == pytest.approx(tail, rel=1e-12, abs=2**-62)
    # What lies beyond the table has less than one chance in 2^63.
    assert 2 * math.fsum(weights[len(table) + 1 :]) / total < 2**-62


def test_the_draws_have_the_probabilities_of_the_discrete_gaussian() -> None:
    drawn = _discrete_gaussian(2.0, 200_000)
    weights = np.exp(-(np.arange(-6, 7) ** 2) / 8)
    observed = np.array([(drawn == k).sum() for k in range(-6, 7)])
    # What lies beyond ±6 is 0.1 %.
    expected = weights / np.exp(-(np.arange(-40, 41) ** 2) / 8).sum() * len(drawn)
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4
    assert observed.sum() == pytest.approx(expected.sum(), rel=1e-3)


@pytest.mark.parametrize("sigma", [0.1, 7.0, 300.0])
def test_the_noise_has_the_size_of_the_mechanism(sigma: float) -> None:
    """Within a step's worth of the continuous Gaussian: the factor is 1 + 1/m, and rounding adds a uniform step."""
    values = np.random.default_rng(0).normal(size=(2, 20_000))
    counts = np.array([3, 50])
    noisy = lattice_noise(values, 2 * 3.0 / counts, sigma)
    factor = 1 + 1 / steps_per_sensitivity(sigma)
    assert factor < 1.07
    for row, count in enumerate(counts):
        std = noise_std(float(count), 3.0, sigma) * factor
        assert (noisy - values)[row].std() == pytest.approx(std, rel=4 / math.sqrt(2 * 20_000))
        assert stats.kstest((noisy - values)[row] / std, "norm").pvalue > 1e-4


def test_what_can_be_sent_does_not_depend_on_the_value() -> None:
    """Every output is a whole number of steps, times the step: neighbours have the same outputs, bit for bit."""
    step = 2.0 / steps_per_sensitivity(40.0)
    for value in (0.0, 1 / 3, np.nextafter(1 / 3, 1), 2.9):
        noisy = lattice_noise(np.full((1, 3000), value), np.array([2.0]), 40.0)
        assert (noisy == np.rint(noisy / step) * step).all()


def test_rounding_moves_neighbours_apart_by_no_more_steps_than_the_sensitivity_has() -> None:
    rng = np.random.default_rng(1)
    for sigma in (0.7, 7.0, 77.0):
        steps = steps_per_sensitivity(sigma)
        x = rng.uniform(-3, 3, 100_000)
        moved = np.abs(np.rint(x / (0.5 / steps)) - np.rint((x + 0.5) / (0.5 / steps)))
        # And by one more, because these numbers are themselves rounded: the noise is scaled for that.
        assert moved.max() <= steps + 1


def test_each_element_takes_64_bits_of_the_systems_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = secrets.token_bytes

    def noting(count: int) -> bytes:
        asked.append(count)
        return real(count)

    monkeypatch.setattr(secrets, "token_bytes", noting)
    lattice_noise(np.zeros((3, 7)), np.ones(3), 7.0)
    assert asked == [3 * 7 * 8]


def test_high_and_low_bits_of_the_source_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that takes 32 bits would give 5 and 5 + 2^32 the same noise."""

    def noise(number: int) -> float:
        monkeypatch.setattr(secrets, "token_bytes", lambda count: number.to_bytes(8, "little"))
        return float(lattice_noise(np.zeros((1, 1)), np.ones(1), 7.0)[0, 0])

    assert len({noise(number) for number in (4, 5, 5 + 2**32, 5 + 2**62, 5 + 2**63)}) == 5


def test_no_noise_is_no_change() -> None:
    values = np.array([[0.1, 0.2]])
    assert lattice_noise(values, np.ones(1), 0.0) is values


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, 2 * LARGEST_SIGMA])
def test_a_sigma_out_of_range_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="sigma"):
        lattice_noise(np.zeros((1, 1)), np.ones(1), sigma)
