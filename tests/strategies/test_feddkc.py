"""FedDKC's rounds: refinement, its targets and kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from feature_rounds import CLASSES, QUICK, pair, samples, start
from torch import Tensor

from flwr_kd.checks import ConfigError
from flwr_kd.client.task import Task
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.feddkc import FedDKC, FedDKCClient, FedDKCConfig, refine_entropy, refine_peak
from flwr_kd.strategies.fedgkt import (
    FedGKT,
)

KKR: dict[str, Any] = {"target_peak": 0.6}
SKR: dict[str, Any] = {"refinement": "skr", "target_entropy": 1.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_peak": 0.3},
            r"target-peak must be in \(1/C, 1\) = \(0\.333333, 1\) for C = 3 classes, got 0\.3; target_peak=0\.4 "
            "is for 3 classes what the default 0.12 is for 10",
        ),
        (
            {"refinement": "skr", "target_entropy": 1.6},
            r"target-entropy must be in \(0, log2 C\) = \(0, 1\.58496\) bits for C = 3 classes, got 1\.6; "
            r"target_entropy=1\.53 is for 3 classes what the default 3\.2 is for 10",
        ),
    ],
)
def test_a_target_out_of_range_is_refused_before_round_1(settings: dict[str, Any], message: str) -> None:
    trained: list[int] = []

    class Noting(FedDKCClient):
        def objective(self, task: Task) -> Callable[..., Tensor]:
            trained.append(task.server_round)
            return super().objective(task)

    with pytest.raises(HandshakeError, match=message):
        start(FedDKC(**settings, **QUICK), lambda i, c: Noting(pair(i), samples(i), context=c, device="cpu"))
    assert trained == []
    with pytest.raises(ConfigError, match=message):
        FedDKCConfig(**settings).check_classes(3)


def test_only_the_target_in_use_is_checked() -> None:
    FedDKCConfig(refinement="skr", target_peak=0.1, target_entropy=0.5).check_classes(2)
    FedDKCConfig(refinement="kkr", target_entropy=5.0, target_peak=0.6).check_classes(2)


def test_the_defaults_are_for_ten_classes_and_the_hint_fits_fewer() -> None:
    for refinement in ("kkr", "skr"):
        config = FedDKCConfig(refinement=refinement)
        assert (config.target_peak, config.target_entropy) == (0.12, 3.2)
        config.check_classes(10)
        for classes in range(2, 9):
            with pytest.raises(ConfigError) as caught:
                config.check_classes(classes)
            name, value = re.search(r"(target_\w+)=([\d.]+)", str(caught.value)).groups()  # type: ignore[union-attr]
            FedDKCConfig(refinement=refinement, **{name: float(value)}).check_classes(classes)


def test_a_kernel_that_saturates_is_solved_where_it_can_be() -> None:
    """The peak then rises and falls again with 1/t; equation 9's row, by hand with brentq."""
    refined = refine_peak(torch.tensor([[2.0, 0, -1]], dtype=torch.float64), 0.36, kernel=torch.sigmoid)
    np.testing.assert_allclose(refined[0], [0.36, 0.3219, 0.3181], atol=5e-5)


def test_the_smallest_differences_give_probabilities() -> None:
    refined = refine_peak(torch.tensor([[5e-324, 0, 0]], dtype=torch.float64), 0.6)
    np.testing.assert_allclose(refined[0], [0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("kernel", "condition"),
    [
        (lambda x: x**2, "another power of x"),
        (lambda x: 3 * x**0.5, "another power of x"),
        (lambda x: (x > 1).double() + 1, "not continuous at 1 "),
        (lambda x: x + 1 + (x > 7) * 0.5, "not continuous at 7 "),
        (lambda x: torch.where(x > 40, 81 - x, x + 1), "not monotonically increasing"),
        (lambda x: torch.where(x > 3, torch.inf, x), r"not finite everywhere in \(0, 10\]"),
        (lambda x: x.sum(), "tensor of its argument's shape"),
    ],
)
def test_a_kernel_that_breaks_a_condition_is_refused(kernel: Any, condition: str) -> None:
    with pytest.raises(ConfigError, match=condition):
        FedDKC(kernel=kernel)


@pytest.mark.parametrize(
    "kernel",
    [
        torch.exp,
        lambda x: torch.exp(x**2),
        torch.sigmoid,
        lambda x: x**2 + 1,
        lambda x: 3 * x + 0.01,
        lambda x: torch.log1p(x) + 1,
    ],
)
def test_a_kernel_that_keeps_the_conditions_is_taken(kernel: Any) -> None:
    FedDKC(kernel=kernel)


def test_a_kernel_is_checked_at_construction() -> None:
    with pytest.raises(ConfigError, match="direct proportion"):
        FedDKC(kernel=lambda x: 2 * x)
    with pytest.raises(ConfigError, match="a kernel belongs to refinement=kkr"):
        FedDKC(kernel=torch.exp, refinement="skr")


def test_the_server_learns_from_refined_logits() -> None:
    logits = torch.randn(30, CLASSES, generator=torch.Generator().manual_seed(0)) * 3
    kkr, skr = FedDKC(target_peak=0.6), FedDKC(refinement="skr", target_entropy=0.9)
    assert torch.equal(kkr.targets(logits), refine_peak(logits, 0.6))
    assert torch.equal(skr.targets(logits), refine_entropy(logits, 0.9))
    by_kernel = FedDKC(kernel=torch.exp, target_peak=0.6).targets(logits)
    assert not torch.allclose(by_kernel, kkr.targets(logits), atol=0.01)
    torch.testing.assert_close(by_kernel.amax(dim=1), torch.full((30,), 0.6))
    assert torch.equal(FedGKT().targets(logits), torch.softmax(logits, dim=1))


def test_refinement_is_the_only_difference_to_fedgkt() -> None:
    """With the same order and no teacher at the server (β = 0), all three are one method."""
    results = [
        start(kind(beta=0.0, server_order="pooled", **settings, **QUICK), rounds=2).rounds[-1]
        for kind, settings in ((FedGKT, {}), (FedDKC, KKR), (FedDKC, SKR))
    ]
    assert len({stats.train_loss for stats in results}) == 1
    others = [
        start(kind(server_order="pooled", **settings, **QUICK), rounds=2).rounds[-1].train_loss
        for kind, settings in ((FedGKT, {}), (FedDKC, KKR), (FedDKC, SKR))
    ]
    assert len(set(others)) == 3
