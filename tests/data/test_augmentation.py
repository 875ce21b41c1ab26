"""Random views, and images that are padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flwr_kd.data import AUGMENTATIONS, ArrayDataset, Bundle, DataError, augmentation


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, side: int, channels: int = 2) -> torch.Tensor:
    """Return images whose pixels are all different, and none 0."""
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
        found = [
            (row, column, mirrored)
            for row in range(2 * margin + 1)
            for column in range(2 * margin + 1)
            for mirrored in (False, True)
            if torch.equal(
                view.flip(-1) if mirrored else view, frame[:, row : row + side, column : column + side]
            )
        ]
        assert len(found) == 1
        moves.update(found)
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
