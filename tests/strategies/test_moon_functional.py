"""MOON's loss against an oracle in plain Python, its degenerate cases, and the projection head."""

from __future__ import annotations

import math
from typing import Any

import contrastive as oracle
import pytest
import torch
from tensors import assert_close, both_dtypes, gradient_of, normal
from torch import nn

from flwr_kd.models import FeatureModel, as_feature_model, build_model, count_parameters
from flwr_kd.strategies.moon import contrastive_loss, with_projection


def test_worked_by_hand() -> None:
    z, right_angle = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    # The lengths do not count: cosines 1 and 0, over τ = 1/2.
    assert contrastive_loss(z, 2 * z, [right_angle], 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))
    # Alike to all: one of two, of four.
    assert contrastive_loss(z, z, [z], 0.5).item() == pytest.approx(math.log(2))
    assert contrastive_loss(z, z, [z] * 3, 0.1).item() == pytest.approx(math.log(4))


@both_dtypes
@pytest.mark.parametrize("previous", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 7])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_against_the_oracle(dtype: torch.dtype, previous: int, samples: int, temperature: float) -> None:
    """Also for one sample, and for more than two previous models, each of which counts."""
    z, z_global = (normal(samples, 5, seed=seed, dtype=dtype) for seed in (1, 2))
    others = [normal(samples, 5, seed=10 + i, dtype=dtype) for i in range(previous)]
    expected = oracle.contrastive_loss(
        z.tolist(), z_global.tolist(), [other.tolist() for other in others], temperature
    )
    loss = contrastive_loss(z, z_global, others, temperature)
    assert_close(loss, torch.tensor(expected, dtype=dtype), dtype)
    if previous > 1:
        fewer = contrastive_loss(z, z_global, others[:-1], temperature)
        assert loss > fewer


def test_its_gradient() -> None:
    z, z_global = normal(4, 3, seed=1).requires_grad_(), normal(4, 3, seed=2)
    others = [normal(4, 3, seed=3), normal(4, 3, seed=4)]
    assert torch.autograd.gradcheck(lambda z: contrastive_loss(z, z_global, others, 0.5), z)
    # The others are constants.
    constants = [tensor.clone().requires_grad_() for tensor in (z_global, *others)]
    contrastive_loss(z, constants[0], constants[1:], 0.5).backward()
    assert all(constant.grad is None for constant in constants)


def test_without_a_previous_model_it_is_zero() -> None:
    z = normal(4, 3, seed=1)
    assert contrastive_loss(z, normal(4, 3, seed=2), [], 0.5).item() == 0.0
    assert not gradient_of(lambda z: contrastive_loss(z, normal(4, 3, seed=2), [], 0.5), z).any()


def test_no_samples() -> None:
    assert contrastive_loss(torch.zeros(0, 3), torch.zeros(0, 3), [torch.zeros(0, 3)], 0.5).item() == 0.0


def test_a_representation_of_zeros_has_cosine_and_gradient_zero() -> None:
    z, z_global, other = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)
    z[1] = 1.0
    expected = oracle.contrastive_loss(z.tolist(), z_global.tolist(), [other.tolist()], 0.5)
    assert contrastive_loss(z, z_global, [other], 0.5).item() == pytest.approx(expected)
    gradient = gradient_of(lambda z: contrastive_loss(z, z_global, [other], 0.5), z)
    assert torch.isfinite(gradient).all()
    assert not gradient[0].any()


def test_reduced_precision_is_computed_in_float32() -> None:
    z, z_global, other = (normal(4, 3, seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    loss = contrastive_loss(z, z_global, [other], 0.01)
    assert loss.dtype == torch.float32
    expected = oracle.contrastive_loss(z.tolist(), z_global.tolist(), [other.tolist()], 0.01)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperature(temperature: float) -> None:
    z = torch.ones(1, 2)
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        contrastive_loss(z, z, [z], temperature)


@pytest.mark.parametrize("wrong", ["z", "global", "previous", "vector"])
def test_shapes_are_not_broadcast(wrong: str) -> None:
    tensors: dict[str, Any] = dict.fromkeys(("z", "global", "previous"), torch.ones(2, 3))
    tensors = (
        dict.fromkeys(tensors, torch.ones(3)) if wrong == "vector" else {**tensors, wrong: torch.ones(1, 3)}
    )
    with pytest.raises(ValueError, match=r"same shape \[B, D\]"):
        contrastive_loss(tensors["z"], tensors["global"], [tensors["previous"]], 0.5)


# ---------------------------------------------------------------------- the projection head


def test_a_projection_is_a_part_of_the_model() -> None:
    model = build_model("mlp", input_shape=(1, 4, 4), num_classes=3, seed=0)
    x = normal(5, 1, 4, 4, seed=1, dtype=torch.float32)
    projected: Any = with_projection(model, seed=1, width=7)
    assert isinstance(projected, FeatureModel)
    assert (projected.feature_dim, projected.num_classes) == (7, 3)
    assert projected(x).shape == (5, 3)
    first, _, second = list(projected.extractor)[1:]
    expected = second(torch.relu(first(model.features(x))))
    torch.testing.assert_close(projected.features(x), expected)
    assert count_parameters(projected) - count_parameters(model) == 64 * 64 + 64 + 64 * 7 + 7 + 7 * 3 - 64 * 3


@pytest.mark.parametrize("nested", [False, True])
def test_any_model_that_ends_in_a_linear_gets_one(nested: bool) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model: nn.Module = nn.Sequential(nn.Identity(), net) if nested else net
    before = list(model.state_dict())
    projected = with_projection(model, seed=1)
    whole: Any = as_feature_model(projected)
    assert (whole.feature_dim, whole.num_classes) == (256, 2)
    x = torch.ones(3, 4)
    assert projected(x).shape == (3, 2)
    assert whole.features(x).shape == (3, 256)
    # The features come from layers of the model, which itself does not change; the seed decides the new weights.
    assert list(model.state_dict()) == before
    again, other = with_projection(as_feature_model(model), seed=1), with_projection(model, seed=2)
    assert torch.equal(again(x), projected(x))
    assert not torch.equal(other(x), projected(x))


def test_a_single_layer_gets_one() -> None:
    assert with_projection(nn.Linear(4, 2), seed=0, width=3)(torch.ones(1, 4)).shape == (1, 2)


def test_models_that_cannot_have_one() -> None:
    class Own(nn.Module):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return x

        classify = features

    with pytest.raises(TypeError, match=r"Own has features\(\) and classify\(\) of its own"):
        with_projection(Own(), seed=0)
    with pytest.raises(ValueError, match=r"not in an nn\.Linear"):
        with_projection(nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1)), seed=0)
    with pytest.raises(ValueError, match="width"):
        with_projection(nn.Linear(2, 3), seed=0, width=0)


def test_three_models_have_the_printed_number_of_parameters() -> None:
    """FedHKD's Table 1 prints 3.858 M for MOON on SVHN, and 1.286 M for the others."""
    model = build_model("shufflenet", input_shape=(3, 32, 32), num_classes=10, seed=0)
    assert round(3 * count_parameters(model) / 1e6, 2) == pytest.approx(3.858, abs=0.003)
