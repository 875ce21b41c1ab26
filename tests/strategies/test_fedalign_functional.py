"""FedAlign's singular values and loss, against torch.linalg.svdvals and an oracle in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import spectrum as oracle
import torch
from tensors import assert_close, both_dtypes, gradient_of, normal
from torch import Tensor

from flwr_kd.strategies.fedalign import alignment_loss, largest_singular_values, lipschitz_difference

MAPS = [((3, 4, 4), (5, 4, 4)), ((3, 8, 8), (5, 4, 4)), ((6, 5, 7), (2, 2, 3)), ((4, 1, 1), (9, 1, 1))]
"""Shapes of a block's input and output: with and without downsampling, also by no whole number."""


def matrices(inputs: Tensor, outputs: Tensor) -> Tensor:
    pairs = zip(inputs.double().numpy(), outputs.double().numpy(), strict=True)
    return torch.tensor(np.stack([oracle.transmitting_matrix(a, b) for a, b in pairs]))


def positive(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return maps as they are after a ReLU, whose largest singular value is far from the next."""
    return normal(*shape, seed=seed, dtype=dtype).relu() + 0.1


@both_dtypes
@pytest.mark.parametrize("shapes", MAPS)
@pytest.mark.parametrize("samples", [1, 4])
def test_the_largest_singular_value_is_svds(dtype: torch.dtype, shapes: tuple, samples: int) -> None:  # type: ignore[type-arg]
    inputs, outputs = (positive(samples, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    expected = torch.linalg.svdvals(matrices(inputs, outputs))[:, 0]
    actual = largest_singular_values(inputs, outputs)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=0)
    # The square root of a norm is never above it.
    assert (actual.double() <= expected * (1 + 1e-6)).all()
    many = largest_singular_values(inputs, outputs, iterations=200)
    torch.testing.assert_close(many.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shapes", MAPS)
@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_ten_iterations_against_the_oracle(shapes: tuple, iterations: int) -> None:  # type: ignore[type-arg]
    """For any matrix, also where ten iterations are too few: the number of them is a part of the method."""
    inputs, outputs = (normal(3, *shape, seed=i) for i, shape in enumerate(shapes))
    expected = [oracle.by_power_iterations(g.numpy(), iterations) for g in matrices(inputs, outputs)]
    assert_close(
        largest_singular_values(inputs, outputs, iterations),
        torch.tensor(expected, dtype=torch.float64),
        torch.float64,
    )
    if iterations == 10:
        assert torch.equal(
            largest_singular_values(inputs, outputs), largest_singular_values(inputs, outputs, 10)
        )


def test_vectors_are_maps_of_one_pixel() -> None:
    inputs, outputs = normal(5, 7, seed=1), normal(5, 3, seed=2)
    expected = inputs.norm(dim=1) * outputs.norm(dim=1)
    torch.testing.assert_close(largest_singular_values(inputs, outputs), expected)
    as_maps = largest_singular_values(inputs[:, :, None, None], outputs[:, :, None, None])
    torch.testing.assert_close(as_maps, expected)


def test_gradients_pass_through_the_iterations() -> None:
    inputs, outputs = (
        positive(2, 3, 4, 4, seed=1).requires_grad_(),
        positive(2, 4, 2, 2, seed=2).requires_grad_(),
    )
    assert torch.autograd.gradcheck(largest_singular_values, (inputs, outputs))
    # With many iterations it is that of the singular value itself.
    slope = gradient_of(lambda maps: largest_singular_values(inputs.detach(), maps, 100).sum(), outputs)
    pixels = torch.nn.functional.adaptive_avg_pool2d(inputs.detach(), 2).flatten(2)
    expected = gradient_of(
        lambda maps: torch.linalg.svdvals(pixels @ maps.flatten(2).mT / 4)[:, 0].sum(), outputs
    )
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("zero", ["inputs", "outputs", "both"])
def test_maps_of_zeros_give_zero_and_no_nan(zero: str) -> None:
    inputs, outputs = positive(2, 3, 4, 4, seed=1), positive(2, 4, 4, 4, seed=2)
    if zero != "outputs":
        inputs[0] = 0
    if zero != "inputs":
        outputs[0] = 0
    values = largest_singular_values(inputs, outputs)
    assert values[0] == 0 < values[1]
    slope = gradient_of(lambda maps: largest_singular_values(inputs, maps).sum(), outputs)
    assert torch.isfinite(slope).all()
    assert not slope[0].any()
    assert slope[1].any()


def test_reduced_precision_is_computed_in_float32() -> None:
    inputs, outputs = (positive(2, 8, 4, 4, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    values = largest_singular_values(inputs, outputs)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, largest_singular_values(inputs.float(), outputs.float()))


@pytest.mark.parametrize(
    ("inputs", "outputs"), [((2, 3), (2, 3, 1, 1)), ((2, 3, 4), (2, 3, 4)), ((2, 3), (1, 3)), ((3,), (3,))]
)
def test_neither_maps_nor_vectors(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"maps \[B, C, H, W\] or vectors \[B, D\]"):
        largest_singular_values(torch.ones(inputs), torch.ones(outputs))


def test_the_difference_against_the_oracle() -> None:
    student, teacher = normal(6, seed=1).abs(), normal(6, seed=2).abs()
    student[1] = teacher[2] = 0.0
    expected = oracle.lipschitz_difference(student.tolist(), teacher.tolist())
    assert lipschitz_difference(student, teacher).item() == pytest.approx(expected)
    slope = gradient_of(lambda values: lipschitz_difference(values, teacher), student)
    counted = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(slope, 2 * (student - teacher) * counted.double() / 6)
    constant = teacher.clone().requires_grad_()
    assert not lipschitz_difference(student, constant).requires_grad
    assert lipschitz_difference(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_the_value_is_a_multiple_of_the_cross_entropy_and_the_gradient_is_not() -> None:
    loss, mu = torch.tensor(2.0, dtype=torch.float64), 0.45
    difference = torch.tensor(0.3, dtype=torch.float64)
    assert alignment_loss(loss, difference, mu).item() == pytest.approx(1.45 * 2.0)
    # d/dL of μ · (CE/L) · L, with CE/L constant.
    assert gradient_of(lambda d: alignment_loss(loss, d, mu), difference).item() == pytest.approx(
        mu * 2.0 / 0.3
    )
    assert gradient_of(lambda ce: alignment_loss(ce, difference, mu), loss).item() == 1.0
    assert alignment_loss(loss, difference, 0.0) == loss


@pytest.mark.parametrize("tiny", [0.0, 1e-13, 9e-13])
def test_a_tiny_difference_has_no_term(tiny: float) -> None:
    loss, difference = torch.tensor(2.0, dtype=torch.float64), torch.tensor(tiny, dtype=torch.float64)
    assert alignment_loss(loss, difference, 0.45) == loss
    assert gradient_of(lambda d: alignment_loss(loss, d, 0.45), difference) == 0.0
    above = torch.tensor(2e-12, dtype=torch.float64)
    assert alignment_loss(loss, above, 0.45).item() == pytest.approx(1.45 * 2.0)
    assert math.isfinite(gradient_of(lambda d: alignment_loss(loss, d, 0.45), above).item())
