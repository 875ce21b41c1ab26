"""The budget of updates, against dp-accounting called directly and the closed form of a Gaussian release."""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from flwr_kd.checks import ConfigError
from flwr_kd.update_privacy import sgd_budget, update_budget


def delta_of(epsilon: float, multiplier: float) -> float:
    """Return δ of one Gaussian release (Balle and Wang, 2018, theorem 5), with sensitivity 1."""
    mu = 1 / multiplier
    left, right = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
    return float(left - math.exp(epsilon) * right)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (2.0, 10), (5.0, 200)])
def test_epsilon_is_the_closed_form(noise: float, releases: int) -> None:
    budget = update_budget(noise=noise, releases=releases, delta=1e-5)
    for epsilon, multiplier in (
        (budget.release_epsilon, noise),
        (budget.absent_epsilon, noise / math.sqrt(releases)),
        (budget.replaced_epsilon, noise / 2 / math.sqrt(releases)),
    ):
        assert delta_of(epsilon, multiplier) == pytest.approx(1e-5, rel=1e-4)


def test_epsilon_is_that_of_the_accountants() -> None:
    budget = update_budget(noise=4.0, releases=20, delta=1e-6)
    for epsilon, noise in ((budget.absent_epsilon, 4.0), (budget.replaced_epsilon, 2.0)):
        event = SelfComposedDpEvent(GaussianDpEvent(noise), 20)
        exact = PLDAccountant().compose(event).get_epsilon(1e-6)
        assert epsilon == pytest.approx(exact, rel=1e-3)
        # Rényi accounting gives an upper bound.
        bound = RdpAccountant().compose(event).get_epsilon(1e-6)
        assert epsilon < bound < 1.5 * epsilon


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("noise", {"noise": 0.0}),
        ("releases", {"releases": 0}),
        ("delta", {"delta": 1.0}),
        ("clip", {"clip": 0.0}),
    ],
)
def test_wrong_values_are_named(name: str, values: dict[str, float]) -> None:
    valid = {"noise": 1.0, "releases": 1, "delta": 1e-5, "clip": 1.0}
    with pytest.raises(ConfigError, match=name):
        update_budget(**{**valid, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [1, 30])
def test_an_epoch_of_dp_sgd_is_one_release(epochs: int) -> None:
    budget = sgd_budget(noise=3.0, epochs=epochs, delta=1e-5)
    for epsilon, noise in ((budget.absent_epsilon, 3.0), (budget.replaced_epsilon, 1.5)):
        assert delta_of(epsilon, noise / math.sqrt(epochs)) == pytest.approx(1e-5, rel=1e-4)
    assert budget.poisson_epsilon is None


def test_poisson_sampling_is_that_of_dp_accounting_and_named_as_not_used() -> None:
    budget = sgd_budget(noise=1.5, epochs=4, delta=1e-5, rate=0.1)
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), 40)
    exact = PLDAccountant().compose(event).get_epsilon(1e-5)
    assert budget.poisson_epsilon is not None
    assert exact <= budget.poisson_epsilon < 1.3 * exact
    assert budget.poisson_epsilon < budget.absent_epsilon
    assert any(label.startswith("not this: 4 epochs with Poisson sampling") for label, _ in budget.rows())


@pytest.mark.parametrize(("name", "value"), [("noise", 0.0), ("epochs", 0), ("delta", 0.0), ("rate", 1.5)])
def test_wrong_values_of_dp_sgd_are_named(name: str, value: float) -> None:
    valid = {"noise": 1.0, "epochs": 1, "delta": 1e-5, "rate": 0.5}
    with pytest.raises(ConfigError, match=name):
        sgd_budget(**{**valid, name: value})  # type: ignore[arg-type]
