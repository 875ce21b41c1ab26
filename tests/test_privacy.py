"""The Gaussian mechanism against the paper, another accountant, and the definition."""

from __future__ import annotations

import math
import sys

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flwr_kd import privacy
from flwr_kd.checks import ConfigError

SIGMAS = st.floats(0.05, 1e3)
DELTAS = st.floats(1e-12, 0.5)


def exact_delta(epsilon: float, shift: float) -> float:
    """Compute δ of N(0, 1) against N(shift, 1) from the definition: the integral of (p - e^ε q)+."""
    edge = shift / 2 + epsilon / shift  # where the log density ratio of the shifted one is ε
    return float(stats.norm.sf(edge - shift) - math.exp(epsilon) * stats.norm.sf(edge))


def test_paper_numbers():
    assert privacy.gaussian_sigma(0.5, 0.01) == pytest.approx(6.215, abs=5e-4)
    assert privacy.mean_sensitivity(256, 3) == 6 / 256
    assert privacy.noise_std(256, 3, 7) ** 2 == pytest.approx(0.0269, abs=5e-5)
    assert privacy.gaussian_epsilon(7, 0.01) < 0.5


@given(SIGMAS, DELTAS)
def test_epsilon_inverts_sigma(sigma, delta):
    assert privacy.gaussian_sigma(privacy.gaussian_epsilon(sigma, delta), delta) == pytest.approx(sigma)


@given(st.floats(0.01, 0.99), st.floats(1e-10, 0.1))
def test_classical_bound_is_sound_below_one(epsilon, delta):
    sigma = privacy.gaussian_sigma(epsilon, delta)
    assert privacy.composed_epsilon(sigma, 1, delta) <= epsilon


def test_classical_bound_is_not_sound_in_general():
    sigma = privacy.gaussian_sigma(50.0, 1e-5)
    assert privacy.composed_epsilon(sigma, 1, 1e-5) > 50.0
    assert not privacy.budget(sigma=sigma, rounds=1, delta=1e-5, dimensions=1).paper_bound_holds


@pytest.mark.parametrize("sigma", [0.4, 1.0, 7.0])
@pytest.mark.parametrize(("rounds", "dimensions", "classes"), [(1, 1, 1), (5, 1, 1), (1, 16, 1), (3, 4, 2)])
def test_composed_epsilon_meets_the_definition(sigma, rounds, dimensions, classes):
    delta = 1e-3
    epsilon = privacy.composed_epsilon(sigma, rounds, delta, dimensions=dimensions, classes=classes)
    # The releases are one draw of a spherical Gaussian, shifted in each of its coordinates by 1 / sigma.
    shift = float(np.linalg.norm(np.full(rounds * dimensions * classes, 1 / sigma)))
    assert exact_delta(epsilon, shift) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("sigma", "rounds", "dimensions"), [(7.0, 20, 4), (5.0, 10, 1)])
def test_composed_epsilon_agrees_with_an_accountant(sigma, rounds, dimensions):
    """PLD composes numerically and is nearly exact; RDP is an upper bound."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(sigma / math.sqrt(dimensions)), rounds
    )
    pld = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-3)
    rdp = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-3)
    ours = privacy.composed_epsilon(sigma, rounds, 1e-3, dimensions=dimensions)
    assert ours == pytest.approx(pld, rel=1e-3)
    assert ours <= rdp


def test_one_replaced_sample_moves_the_vector_by_its_stated_sensitivity():
    """Data can reach the worst case in the module's docstring: √D·2ζ/N."""
    count, dimensions, bound, sigma = 8, 25, 3.0, 2.0
    before = np.full((count, dimensions), bound)
    after = before.copy()
    after[0] = -bound
    moved = np.linalg.norm(before.mean(axis=0) - after.mean(axis=0))
    assert moved == pytest.approx(math.sqrt(dimensions) * privacy.mean_sensitivity(count, bound))
    multiplier = privacy.noise_std(count, bound, sigma) / moved
    assert privacy.composed_epsilon(multiplier, 1, 1e-3) == pytest.approx(
        privacy.composed_epsilon(sigma, 1, 1e-3, dimensions=dimensions)
    )


@settings(max_examples=50)
@given(st.data())
def test_lemma_1_bounds_every_removal(data):
    """Adding or removing one sample moves a mean by at most 2ζ/N, N of the larger set."""
    values = data.draw(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
    moved = abs(np.mean(values) - np.mean(values[:-1]))
    assert moved <= privacy.mean_sensitivity(len(values), 3) + 1e-12


@given(SIGMAS, DELTAS, st.integers(1, 200), st.integers(1, 512), st.integers(1, 2))
@settings(max_examples=50)
def test_each_line_of_the_budget_is_weaker_than_the_one_before(sigma, delta, rounds, dimensions, classes):
    budget = privacy.budget(sigma=sigma, rounds=rounds, delta=delta, dimensions=dimensions, classes=classes)
    # The search for epsilon has a tolerance of 1e-12, or of the rounding of large values.
    slack = 1e-9 * (1 + budget.total_epsilon)
    assert 0 <= budget.element_epsilon <= budget.vector_epsilon + slack
    assert budget.vector_epsilon <= budget.total_epsilon + slack
    assert budget.noise_std is None


def test_budget_names_each_release():
    budget = privacy.budget(sigma=0.5, rounds=1, delta=0.01, dimensions=1, classes=2, count=4, bound=1.0)
    assert budget.noise_std == privacy.noise_std(4, 1.0, 0.5) == 0.25
    labels, values = zip(*budget.rows(), strict=True)
    assert "epsilon, 1 element, 2 classes, 1 round" in labels
    assert labels[0] == "noise per element, 4 samples, bound 1"
    assert "claims nothing" in values[1]
    assert any("soft predictions" in line for line in budget.not_covered)
    assert any("weights" in line for line in budget.not_covered)
    assert any("clipping" in line for line in budget.assumptions)


def test_extremes_of_noise():
    assert privacy.composed_epsilon(1e9, 1, 0.01) == 0
    assert privacy.composed_epsilon(1e-9, 1, 0.01) == math.inf
    assert privacy.composed_epsilon(2e-6, 1, 0.01) > 1e10
    assert privacy.noise_std(3, 1.0, 0) == 0


def test_noise_std_takes_an_array_of_counts():
    counts = np.array([[1, 2], [4, 8]])
    noise = privacy.noise_std(counts, 3.0, 7.0)
    assert noise.dtype == np.float64
    np.testing.assert_allclose(noise, [[42, 21], [10.5, 5.25]])
    assert isinstance(privacy.noise_std(2, 3.0, 7.0), float)
    assert privacy.noise_std(np.array([], dtype=np.int64), 3.0, 7.0).shape == (0,)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_values_that_must_be_positive(value):
    for name, call in {
        "epsilon": lambda: privacy.gaussian_sigma(value, 0.01),
        "sigma": lambda: privacy.gaussian_epsilon(value, 0.01),
        "bound": lambda: privacy.mean_sensitivity(1, value),
    }.items():
        with pytest.raises(ConfigError, match=rf"{name} must be a finite number above 0, got {value}"):
            call()
    with pytest.raises(ConfigError, match="sigma must be a finite number above 0"):
        privacy.composed_epsilon(value, 1, 0.01)
    with pytest.raises(ConfigError, match="bound must be"):
        privacy.budget(sigma=1, rounds=1, delta=0.01, dimensions=1, bound=value)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_delta_must_be_a_probability_inside(delta):
    for call in (
        lambda: privacy.gaussian_sigma(0.5, delta),
        lambda: privacy.gaussian_epsilon(7, delta),
        lambda: privacy.composed_epsilon(7, 1, delta),
    ):
        with pytest.raises(ConfigError, match=rf"delta must be in \(0, 1\), got {delta}"):
            call()


@pytest.mark.parametrize("name", ["rounds", "dimensions", "classes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_numbers_of_releases_must_be_whole(name, value):
    arguments = {"sigma": 7.0, "rounds": 1, "delta": 0.01, name: value}
    with pytest.raises(ConfigError, match=rf"{name} must be a whole number from 1, got {value}"):
        privacy.composed_epsilon(**arguments)


def test_bad_counts_and_noise():
    with pytest.raises(ConfigError, match=r"count must be finite and >= 1, got 0\.0"):
        privacy.mean_sensitivity(np.array([3, 0]), 3.0)
    with pytest.raises(ConfigError, match="count must be finite and >= 1, got nan"):
        privacy.noise_std(math.nan, 3.0, 7.0)
    with pytest.raises(ConfigError, match="sigma must be a finite number from 0, got -1"):
        privacy.noise_std(1, 3.0, -1)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'flwr-kd\[privacy\]'"):
        privacy.composed_epsilon(7, 1, 0.01)
    assert privacy.gaussian_epsilon(7, 0.01) > 0
