"""Loss landscapes and maps of features agree with plain NumPy and do not change the model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flwr_kd.data import DataError
from flwr_kd.models import as_feature_model, build_model
from flwr_kd.plotting.measurements import (
    embed,
    features_of,
    filter_normalised_direction,
    loss_along,
    sample_of_classes,
)

SHAPE = (1, 8, 8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def a_model(name: str = "resnet8") -> nn.Module:
    """Return a model whose BatchNorm has seen data, in training mode."""
    model = build_model(name, input_shape=SHAPE, num_classes=4, seed=0)
    model.train()
    with torch.no_grad():
        model(torch.randn(32, *SHAPE, generator=generator(5)))
    return model


def some_data(size: int = 30) -> tuple[Tensor, Tensor]:
    g = generator(1)
    return torch.randn(size, *SHAPE, generator=g), torch.randint(0, 4, (size,), generator=g)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Compute the mean in float64, by its definition."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(labels)), labels] - np.log(np.exp(logits).sum(axis=1))
    return float(-chosen.mean())


# ---------------------------------------------------------------------- directions


def test_each_filter_is_as_long_as_the_models_own() -> None:
    state = a_model().state_dict()
    direction = filter_normalised_direction(state, generator())
    assert list(direction) == list(state)
    several = 0
    for name, weight in state.items():
        drawn_weight = direction[name]
        assert (drawn_weight.shape, drawn_weight.dtype) == (weight.shape, weight.dtype)
        if weight.ndim < 2:
            assert not drawn_weight.any(), name
            continue
        several += 1
        for own, drawn in zip(weight.numpy(), drawn_weight.numpy(), strict=True):
            length = np.sqrt((own.astype(np.float64) ** 2).sum())
            assert np.sqrt((drawn.astype(np.float64) ** 2).sum()) == pytest.approx(length, rel=1e-5)
            assert length > 0
    assert several > 5


def test_a_direction_is_the_draw_scaled_filter_by_filter() -> None:
    state = {"a": torch.full((3, 2, 2), 2.0), "bias": torch.ones(3), "b": torch.ones(2, 5)}
    direction = filter_normalised_direction(state, generator(7))
    g = generator(7)
    for name in ("a", "b"):
        drawn = torch.randn(state[name].shape, generator=g).numpy()
        for own, raw, scaled in zip(state[name].numpy(), drawn, direction[name].numpy(), strict=True):
            np.testing.assert_allclose(
                scaled, raw * np.linalg.norm(own.ravel()) / np.linalg.norm(raw.ravel()), rtol=1e-5
            )


def test_a_zero_filter_buffers_and_integers_do_not_move() -> None:
    state = {
        "w": torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        "table": torch.ones(2, 2),
        "ids": torch.ones(2, 2, dtype=torch.int64),
        "count": torch.tensor(3),
        "half": torch.ones(2, 2, dtype=torch.float16),
    }
    direction = filter_normalised_direction(state, generator(), parameters={"w", "ids", "half"})
    assert direction["w"][0].norm() == pytest.approx(5**0.5)
    for name in ("table", "ids", "count"):
        assert not direction[name].any()
        assert direction[name].dtype == state[name].dtype
    assert not direction["w"][1].any()
    assert direction["half"].dtype == torch.float16
    assert torch.isfinite(direction["half"]).all()


def test_a_direction_depends_on_its_generator_alone() -> None:
    state = a_model("mlp").state_dict()
    torch.manual_seed(0)
    first = filter_normalised_direction(state, generator(3))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    again = filter_normalised_direction(state, generator(3))
    assert torch.equal(torch.random.get_rng_state(), before)
    other = filter_normalised_direction(state, generator(4))
    assert all(torch.equal(first[name], again[name]) for name in state)
    assert not all(torch.equal(first[name], other[name]) for name in state)


# ---------------------------------------------------------------------- loss along directions


@pytest.mark.parametrize("name", ["mlp", "resnet8"])
def test_losses_are_those_of_a_model_with_these_weights(name: str) -> None:
    model, (x, y) = a_model(name), some_data()
    state = model.state_dict()
    directions = [filter_normalised_direction(state, generator(seed)) for seed in (0, 1)]
    losses = loss_along(model, state, directions, [-0.5, 0.0, 1.0], x, y, batch_size=7)
    assert losses.shape == (2, 3)
    for row, direction in enumerate(directions):
        for column, magnitude in enumerate((-0.5, 0.0, 1.0)):
            moved = copy.deepcopy(model).eval()
            with torch.no_grad():
                for key, weight in moved.state_dict().items():
                    if weight.is_floating_point():
                        weight += magnitude * direction[key]
                logits = moved(x).numpy()
            assert losses[row, column] == pytest.approx(cross_entropy(logits, y.numpy()), rel=1e-4)
    assert losses[0, 1] == losses[1, 1]
    np.testing.assert_allclose(losses, loss_along(model, state, directions, [-0.5, 0, 1], x, y), rtol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model, (x, y) = a_model(), some_data()
    frozen = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    frozen.eval()
    before = copy.deepcopy(model.state_dict())
    other = {name: value + 1 for name, value in before.items()}
    direction = filter_normalised_direction(other, generator())
    loss_along(model, other, [direction], [0.0, 1.0], x, y)
    features_of(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not frozen.training
    assert all(m.training for m in model.modules() if m is not frozen)
    with pytest.raises(RuntimeError):
        loss_along(model, other, [direction], [1.0], x[:, :, :, :0], y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrapped_model_is_moved_and_restored() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4)).train()
    wrapped, (x, y) = as_feature_model(net), some_data()
    state = wrapped.state_dict()
    direction = filter_normalised_direction(state, generator())
    losses = loss_along(wrapped, state, [direction], [0.0, 1.0], x, y)
    np.testing.assert_array_equal(losses, loss_along(net, state, [direction], [0.0, 1.0], x, y))
    assert losses[0, 0] != losses[0, 1]
    assert net.training
    assert all(module.training for module in net.modules())


def test_a_loss_that_is_not_finite_stays_so() -> None:
    model, (x, y) = a_model("mlp"), some_data()
    state = model.state_dict()
    direction = filter_normalised_direction(state, generator())
    losses = loss_along(model, state, [direction], [0.0, 1e38], x, y)
    assert np.isfinite(losses[0, 0])
    assert not np.isfinite(losses[0, 1])


def test_what_loss_along_refuses() -> None:
    model, (x, y) = a_model("mlp"), some_data()
    state = model.state_dict()
    with pytest.raises(DataError, match="at least 1, not 0 and 0"):
        loss_along(model, state, [], [0.0], x[:0], y[:0])
    with pytest.raises(DataError, match="batch_size"):
        loss_along(model, state, [], [0.0], x, y, batch_size=0)
    with pytest.raises(ValueError, match="directions name nope"):
        loss_along(model, state, [{"nope": torch.zeros(1)}], [0.0], x, y)
    assert loss_along(model, state, [], [0.0], x, y).shape == (0, 1)


# ---------------------------------------------------------------------- samples, features, t-SNE


def test_a_sample_has_as_many_of_each_class() -> None:
    labels = np.repeat([0, 1, 2, 5, 7], [40, 40, 40, 40, 3])
    rows = sample_of_classes(labels, 4, 42, np.random.default_rng(1))
    assert len(set(rows.tolist())) == len(rows)
    assert rows.tolist() == sorted(rows.tolist())
    values, counts = np.unique(labels[rows], return_counts=True)
    assert len(values) == 4
    assert all(
        count in (10, 11) or (value == 7 and count == 3) for value, count in zip(values, counts, strict=True)
    )
    again = sample_of_classes(torch.from_numpy(labels), 4, 42, np.random.default_rng(1))
    np.testing.assert_array_equal(rows, again)
    drawn = {
        tuple(np.unique(labels[sample_of_classes(labels, 2, 4, np.random.default_rng(s))])) for s in range(9)
    }
    assert len(drawn) > 2
    assert len(sample_of_classes(labels, 5, 10**6, np.random.default_rng(0))) == len(labels)


@pytest.mark.parametrize(
    ("classes", "size", "text"),
    [
        (3, 10, "classes must be at most the number that occurs, 2, not 3"),
        (0, 10, "classes must be a whole number from 1, got 0"),
        (2, 1, "samples must be at least the number of classes, 2, not 1"),
    ],
)
def test_what_a_sample_refuses(classes: int, size: int, text: str) -> None:
    with pytest.raises(DataError, match=text):
        sample_of_classes([0, 4, 0, 4], classes, size, np.random.default_rng(0))


def test_features_are_what_enters_the_last_layer() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.9), nn.Linear(8, 4)).train()
    x, _ = some_data()
    features = features_of(net, x, batch_size=7)
    expected = np.maximum(
        x.flatten(1).numpy() @ net[1].weight.detach().numpy().T + net[1].bias.detach().numpy(), 0
    )
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, atol=1e-5)
    with pytest.raises(DataError, match="at least one sample"):
        features_of(net, x[:0])


def test_tsne_keeps_blobs_apart_and_is_deterministic() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 30)
    features = 20 * np.eye(3, 6)[labels] + rng.normal(size=(90, 6))
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    points = embed(features, seed=3)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert points.shape == (90, 2)
    centres = np.stack([points[labels == label].mean(axis=0) for label in range(3)])
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, labels)
    np.testing.assert_array_equal(points, embed(features, seed=3))


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (4, 1), (5, 2)])
def test_tsne_of_few_samples_or_features(shape: tuple[int, int]) -> None:
    points = embed(np.random.default_rng(0).normal(size=shape), seed=0)
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all()


def test_what_tsne_refuses() -> None:
    with pytest.raises(DataError, match=r"shape \[N, D\], not \[3\]"):
        embed(np.zeros(3), seed=0)
    with pytest.raises(DataError, match=r"not \[0, 3\]"):
        embed(np.zeros((0, 3)), seed=0)
    with pytest.raises(DataError, match="features must be finite"):
        embed(np.array([[1.0, np.nan], [0.0, 1.0]]), seed=0)
