"""The conditional generator: shapes, seeds, distribution of the outputs, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flwr_kd.models import ConditionalGenerator, build_generator

SHAPES = [(1, 4, 4), (3, 32, 32), (3, 5, 7), (1, 1, 1), (2, 3, 1), (16,), (12, 5), (2, 3, 4, 5)]


def build(shape: tuple[int, ...] = (3, 5, 7), **changes: Any) -> ConditionalGenerator:
    options: dict[str, Any] = {"num_classes": 3, "latent_dim": 6, "seed": 0} | changes
    return build_generator(shape, **options)


def noise(count: int, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("classes", [2, 10])
def test_samples_have_the_shape(shape: tuple[int, ...], classes: int) -> None:
    generator = build(shape, num_classes=classes)
    assert (generator.latent_dim, generator.num_classes) == (6, classes)
    labels = torch.arange(8) % classes
    for mode in (True, False):
        x = generator.train(mode)(noise(8), labels)
        assert x.shape == (8, *shape)
        assert x.dtype == torch.float32
        assert torch.isfinite(x).all()
    assert generator(noise(1), labels[:1]).shape == (1, *shape)


@pytest.mark.parametrize("shape", [(3, 5, 7), (20,)])
def test_outputs_are_normalised_per_channel(shape: tuple[int, ...]) -> None:
    x = build(shape).train()(noise(64), torch.arange(64) % 3).transpose(0, 1).flatten(1)
    assert x.mean(dim=1).abs().max() < 1e-4
    torch.testing.assert_close(x.var(dim=1, unbiased=False), torch.ones(shape[0]), rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(3, 5, 7), (20,)])
def test_the_class_and_the_noise_count(shape: tuple[int, ...]) -> None:
    generator = build(shape).eval()
    z = noise(4)
    one, other = (generator(z, torch.full((4,), label)) for label in (0, 2))
    assert not torch.allclose(one, other, atol=1e-3)
    assert not torch.allclose(one[0], one[1], atol=1e-3)
    # In eval mode no sample depends on the others.
    torch.testing.assert_close(generator(z[1:2], torch.tensor([2])), other[1:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5, 7), (20,)])
def test_weights_depend_on_the_seed_alone(shape: tuple[int, ...]) -> None:
    before = torch.get_rng_state()
    first = build(shape).state_dict()
    torch.rand(3)
    again = build(shape).state_dict()
    torch.set_rng_state(before)
    other = build(shape, seed=2**63 - 1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == list(again) == list(other)
    assert all(torch.equal(first[name], again[name]) for name in first)
    weights = [name for name in first if name.endswith("weight") and first[name].ndim > 1]
    assert weights
    assert not any(torch.equal(first[name], other[name]) for name in weights)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_classes": 1}, ValueError, "num_classes must be a whole number from 2, got 1"),
        ({"latent_dim": 0}, ValueError, "latent_dim must be a whole number from 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"seed": 2**63}, ValueError, "seed must be"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number from 0"),
        ({"latent_dim": "6"}, TypeError, "latent_dim must be a whole number from 1"),
        ({"shape": (0, 4, 4)}, ValueError, "input_shape"),
        ({"shape": (1.5, 4)}, TypeError, "input_shape"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build(**changes)
