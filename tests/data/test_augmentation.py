"""Random views, and padded images."""

from __future__ import annotations

from typing import Any

import hybrid as oracle
import numpy as np
import pytest
import torch
from scipy.stats import kstest

from flwr_kd.data import AUGMENTATIONS, ArrayDataset, Bundle, DataError, augmentation, random_affine


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, side: int, channels: int = 2) -> torch.Tensor:
    """Return images whose pixels are all different and not 0."""
    return torch.arange(1, count * channels * side * side + 1).float().reshape(count, channels, side, side)


def test_names() -> None:
    assert augmentation("none") is None
    assert all(augmentation(name) is not None for name in AUGMENTATIONS if name != "none")
    with pytest.raises(DataError, match="augment must be one of none, crop, crop-flip, not 'mixup'"):
        augmentation("mixup")


@pytest.mark.parametrize(("side", "margin"), [(8, 1), (32, 4), (5, 1)])
@pytest.mark.parametrize("name", ["crop", "crop-flip"])
def test_a_view_is_the_image_moved_and_perhaps_mirrored(name: str, side: int, margin: int) -> None:
    x = images(60, side)
    kept = x.clone()
    views = augmentation(name)(x, generator())  # type: ignore[misc]
    assert torch.equal(x, kept)
    assert views.shape == x.shape
    padded = torch.nn.functional.pad(x, [margin] * 4, mode="replicate")
    moves = set()
    for view, frame in zip(views, padded, strict=True):
        matches = [
            (row, column, mirrored)
            for row in range(2 * margin + 1)
            for column in range(2 * margin + 1)
            for mirrored in (False, True)
            if torch.equal(
                view.flip(-1) if mirrored else view, frame[:, row : row + side, column : column + side]
            )
        ]
        assert len(matches) == 1
        moves.update(matches)
    assert {mirrored for *_, mirrored in moves} == ({False} if name == "crop" else {False, True})
    assert {row for row, *_ in moves} == set(range(2 * margin + 1))
    assert {column for _, column, _ in moves} == set(range(2 * margin + 1))


def test_views_come_from_the_callers_generator_alone() -> None:
    view: Any = augmentation("crop-flip")
    x, before = images(8, 8), torch.get_rng_state()
    assert torch.equal(view(x, generator(1)), view(x, generator(1)))
    assert not torch.equal(view(x, generator(1)), view(x, generator(2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_only_images_can_be_cropped() -> None:
    with pytest.raises(DataError, match=r"only images \[B, K, H, W\] can be cropped, not \[4, 16\]"):
        augmentation("crop")(torch.zeros(4, 16), generator())  # type: ignore[misc]


def test_images_are_padded_with_their_darkest_value() -> None:
    data = ArrayDataset(images(3, 5) - 7, torch.zeros(3, dtype=torch.int64))
    bundle = Bundle("some", data, data.subset([1]), 2, (2, 5, 5)).padded(8)
    assert bundle.input_shape == (2, 8, 8)
    assert bundle.train.x.shape == (3, 2, 8, 8)
    assert bundle.test.x.shape == (1, 2, 8, 8)
    assert torch.equal(bundle.train.x[:, :, 1:6, 1:6], data.x)
    around = bundle.train.x.clone()
    around[:, :, 1:6, 1:6] = -6
    assert (around == -6).all()
    with pytest.raises(DataError, match=r"some of shape \[2, 8, 8\] cannot be padded to images of 7"):
        bundle.padded(7)
    with pytest.raises(DataError, match=r"cannot be padded"):
        Bundle("rows", data, data, 2, (5,)).padded(8)


# ---------------------------------------------------------------------- scaled and rotated


def affine(x: torch.Tensor, seed: int = 0, degrees: float = 0.0, scale: Any = (1.0, 1.0)) -> torch.Tensor:
    return random_affine(x, generator(seed), degrees=degrees, scale=scale)


def coordinates(count: int, height: int, width: int) -> torch.Tensor:
    """Return images [B, 2, H, W] whose values are each pixel's distance down and right of the centre."""
    down = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    right = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    grid = torch.stack(torch.meshgrid(down, right, indexing="ij"))
    return grid.expand(count, -1, -1, -1).clone()


def draws_of(views: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return factors and angles (degrees, counterclockwise) of views of `coordinates`, measured at the centre."""
    factors, angles = [], []
    middle = [size // 2 for size in views.shape[2:]]
    for view in views.numpy():
        # One pixel to the right in the view corresponds to these distances down and right in the image.
        down, right = view[:, middle[0], middle[1]] - view[:, middle[0], middle[1] - 1]
        length = np.hypot(down, right)
        factors.append(1 / length)
        angles.append(np.degrees(np.arctan2(down, right)))
    return np.array(factors), np.array(angles)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (9, 14), (21, 8), (7, 7)])
@pytest.mark.parametrize("scale", [(1.0, 1.0), (0.6, 1.7), (2.0, 2.0), (0.5, 0.5)])
@pytest.mark.parametrize("degrees", [0.0, 20.0, 180.0])
def test_an_affine_view_is_the_image_scaled_and_turned(
    height: int, width: int, scale: tuple[float, float], degrees: float
) -> None:
    count = 6
    picture = torch.rand(count, 3, height, width, generator=generator(5), dtype=torch.float64)
    # Away from the edge, the first two channels give the factor and angle of an image.
    views = affine(torch.cat([coordinates(count, height, width), picture], dim=1), 1, degrees, scale)
    factors, angles = draws_of(views[:, :2])
    assert ((factors > scale[0] - 1e-9) & (factors < scale[1] + 1e-9)).all()
    assert (abs(angles) < degrees + 1e-9).all()
    if degrees or scale == (0.6, 1.7):
        assert len(set(np.round(factors * 1000 + angles, 6))) == count
    for image, view, factor, angle in zip(picture, views, factors, angles, strict=True):
        expected = oracle.affine(image.numpy(), factor, angle)
        np.testing.assert_allclose(view[2:].numpy(), expected, rtol=0, atol=1e-9)


def test_draws_are_uniform() -> None:
    factors, angles = draws_of(affine(coordinates(4000, 6, 6), 3, 40.0, (0.9, 1.5)))
    assert kstest(factors, "uniform", args=(0.9, 0.6)).pvalue > 0.01
    assert kstest(angles, "uniform", args=(-40.0, 80.0)).pvalue > 0.01
    assert abs(np.corrcoef(factors, angles)[0, 1]) < 0.05


@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 9), (1, 6), (1, 1)])
def test_no_change_and_half_a_turn(height: int, width: int) -> None:
    x = torch.rand(3, 2, height, width, generator=generator(5))
    kept = x.clone()
    torch.testing.assert_close(affine(x), x, rtol=0, atol=1e-6)
    assert torch.equal(x, kept)

    def half(*size: Any, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(*size, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", half)
        turned = affine(x, degrees=180.0)
    torch.testing.assert_close(turned, x.flip(-1, -2), rtol=0, atol=1e-5)


def test_pixels_outside_repeat_the_edge() -> None:
    x = images(2, 8)
    views = affine(x, scale=(0.1, 0.1))
    for corner in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
        torch.testing.assert_close(views[:, :, corner[0], corner[1]], x[:, :, corner[0], corner[1]])
    assert (affine(torch.ones(2, 1, 6, 6), 0, 180.0, (0.2, 3.0)) - 1).abs().max() < 1e-6
    assert views.min() >= x.min()


def test_affine_views_come_from_the_callers_generator_alone() -> None:
    x, before = images(8, 8), torch.get_rng_state()
    options: Any = {"degrees": 30.0, "scale": (0.8, 1.2)}
    assert torch.equal(affine(x, 1, **options), affine(x, 1, **options))
    assert not torch.equal(affine(x, 1, **options), affine(x, 2, **options))
    own = generator(1)
    first = random_affine(x, own, **options)
    assert not torch.equal(first, random_affine(x, own, **options))
    assert torch.equal(torch.get_rng_state(), before)
    assert affine(x, **options).dtype == torch.float32


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6), (4,), (2, 1, 2, 3, 4)])
def test_inputs_other_than_images_are_unchanged(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    assert affine(x, 0, 90.0, (0.5, 2.0)) is x


@pytest.mark.parametrize(
    ("degrees", "scale", "text"),
    [
        (-1.0, (1.0, 1.0), r"degrees must be in \[0, 180\], got -1.0"),
        (181.0, (1.0, 1.0), r"degrees must be in \[0, 180\]"),
        (float("nan"), (1.0, 1.0), r"degrees must be in \[0, 180\], got nan"),
        (0.0, (0.0, 1.0), "scale must be two positive finite numbers in order"),
        (0.0, (1.2, 1.1), "scale must be two positive finite numbers in order"),
        (0.0, (1.0, float("inf")), "scale must be two positive finite numbers in order"),
        (0.0, (float("nan"), 1.0), "scale must be two positive finite numbers in order"),
    ],
)
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 4)])
def test_affine_views_out_of_range(shape: Any, degrees: float, scale: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        affine(torch.zeros(shape), 0, degrees, scale)
