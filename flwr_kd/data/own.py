"""A client's own data: a folder of images by class, or a csv file, in the form that all clients have agreed on.

Clients of a federation share no files, so that nothing is fitted to their data: labels are numbered by their names
in :class:`DataSpec`, images are normalised by constants, and tables are used without scaling.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_kd.checks import DataError, is_whole_number, plain_number
from flwr_kd.data._base import ArrayDataset, Bundle
from flwr_kd.data._csv import read_table
from flwr_kd.data._image_files import IMAGE_ENDINGS, check_no_link, decoded, image_files
from flwr_kd.data._images import ImageSpec, adapt
from flwr_kd.data.partitioning import split, stratified
from flwr_kd.seeding import derive_seed, numpy_generator
from flwr_kd.text import first_line, unknown_name

__all__ = ["IMAGE_ENDINGS", "DataSpec", "load_own", "load_samples", "load_test"]

_TEST_FRACTION = 0.2
# Constants map [0, 1] to [-1, 1] for all images. Means of a client's images would reveal something of them.
_MEAN = _STD = 0.5
_FORMS = "a folder with one sub-folder of images per class, or a csv file"


@dataclass(frozen=True)
class DataSpec:
    """The form of clients' own data, which all of them share: the labels, and the shape of an input.

    Parameters
    ----------
    classes : tuple of str
        Names of the labels in the order of the model's outputs, at least 2. A client need not have all of them.
    input_shape : tuple of int
        ``(channels, height, width)`` for images, with 1 or 3 channels; ``(columns,)`` for tables.

    Raises
    ------
    DataError
        If a value is not allowed.

    Examples
    --------
    >>> DataSpec.parse("cat, dog", "3x32x32")
    DataSpec(classes=('cat', 'dog'), input_shape=(3, 32, 32))
    """

    classes: tuple[str, ...]
    input_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        names = tuple(_normal(name) for name in self.classes)
        object.__setattr__(self, "classes", names)
        if len(names) < 2 or "" in names or len(set(names)) < len(names):
            raise DataError(f"classes must be at least 2 different names, got {', '.join(map(repr, names))}")
        if not _is_shape(self.input_shape):
            raise DataError(f"input-shape {_SHAPES}, got {list(self.input_shape)}")

    @classmethod
    def parse(cls, classes: str, input_shape: str) -> DataSpec:
        """Read names separated by commas, and sizes separated by "x".

        Raises
        ------
        DataError
            If a value is not allowed.
        """
        return cls(tuple(classes.split(",")), read_shape("input-shape", input_shape))

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.classes)

    @property
    def images(self) -> bool:
        """Whether inputs are images, else table rows."""
        return len(self.input_shape) == 3

    @property
    def shape_text(self) -> str:
        """The shape as :meth:`parse` reads it.

        >>> DataSpec(("0", "1"), (1, 28, 28)).shape_text
        '1x28x28'
        """
        return "x".join(map(str, self.input_shape))

    @property
    def image_spec(self) -> ImageSpec:
        """The form in which images of a known data set are converted to this shape."""
        channels, height, width = self.input_shape
        values = (_MEAN,) * channels, (_STD,) * channels
        return ImageSpec((channels, height, width), self.num_classes, *values)

    def bundle(self) -> Bundle:
        """Return a data set of this form without samples, for what needs no client's data."""
        empty = ArrayDataset(torch.zeros(0, *self.input_shape), torch.zeros(0, dtype=torch.int64))
        name = f"input-shape={self.shape_text} with {self.num_classes} classes"
        return Bundle(name, empty, empty, self.num_classes, self.input_shape)

    def index(self, name: str) -> int | None:
        """Return the number of a label, or None if it is not a class; "3.0" in a table means "3".

        >>> DataSpec(("no", "yes"), (4,)).index("yes")
        1
        """
        name = _normal(name)
        if name in self.classes:
            return self.classes.index(name)
        number = plain_number(name)
        whole = str(int(number)) if number is not None and number.is_integer() else ""
        return self.classes.index(whole) if whole in self.classes else None


def read_shape(name: str, text: str) -> tuple[int, ...]:
    """Read sizes separated by "x": of images or of a table's rows.

    Parameters
    ----------
    name, text : str
        The option and its value.

    Raises
    ------
    DataError
        If they are none.

    Examples
    --------
    >>> read_shape("input-shape", "1x28x28")
    (1, 28, 28)
    """
    sizes = [size.strip() for size in text.lower().split("x")]
    shape = tuple(int(size) for size in sizes if size.isascii() and size.isdigit())
    if len(shape) != len(sizes) or not _is_shape(shape):
        raise DataError(f"{name} {_SHAPES}, got {text!r}")
    return shape


_SHAPES = (
    'must be CHANNELSxHEIGHTxWIDTH with 1 or 3 channels for images, such as "1x28x28", or the number of columns '
    'for tables, such as "16"'
)


def load_own(path: str | Path, spec: DataSpec, *, seed: int = 0) -> tuple[ArrayDataset, ArrayDataset]:
    r"""Load a client's training and test data.

    ===========================================  ==========================================================
    ``path``                                     samples
    ===========================================  ==========================================================
    folder with ``CLASS/…``                      images, one sub-folder per class
    folder with ``train/CLASS/…``                images, with a test part if there is ``test/CLASS/…``
    a file                                       a table, see :func:`flwr_kd.data.load` for its form
    folder with ``train.csv``                    a table, with a test part if there is ``test.csv``
    ===========================================  ==========================================================

    Without a test part, a fifth of the samples is held out for the test, with the class mix of all. The order of
    the samples depends only on the names of the files or the rows of the table.

    A class folder may have folders inside. Files and folders whose names begin with a dot are ignored; any
    other file in a class folder must be an image of at most 50 million pixels. ``train`` and ``test`` are class
    folders if they are names of classes. Symbolic links inside the folder are refused, because a sample may be
    reached twice through them, or without end; ``path`` itself may be one.

    Images are converted to grey (luminance) or colour and resized to the shape, whatever their aspect ratio
    (bilinear, antialiased). They are divided by the largest value of the file's format (255, or 65,535 with
    16 bits) and mapped from [0, 1] to [-1, 1]. Transparency is dropped; orientation tags are ignored. Tables are
    used without scaling: all clients must have the same columns in the same order and on the same scale.

    Parameters
    ----------
    path : str or Path
        A folder or a file.
    spec : DataSpec
        The labels and the shape.
    seed : int
        Determines which samples are held out for the test.

    Returns
    -------
    train, test : ArrayDataset
        float32 inputs and int64 labels in the order of ``spec.classes``. ``test`` may be empty if a client has
        few samples.

    Raises
    ------
    DataError
        If the path does not exist, a label is not a class, or a file cannot be read or does not fit the shape.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "mine.csv")
    ...     _ = file.write_text("age,weight,label\n" + "0.3,0.5,ill\n" * 8 + "0.2,0.6,well\n" * 2)
    ...     train, test = load_own(file, DataSpec(("well", "ill"), (2,)))
    >>> len(train), len(test), test.y.tolist()
    (8, 2, [1, 1])
    """
    train, test = _parts(Path(path), spec)
    if train is None:
        raise DataError(f"{str(path)!r} has a test part, but neither train/ nor train.csv")
    samples = _labelled(train, spec)
    if test is not None:
        return samples, _labelled(test, spec)
    train_rows, test_rows = split(
        samples.y, np.arange(len(samples)), test_fraction=_TEST_FRACTION, seed=derive_seed(seed, "own-test")
    )
    return samples.subset(train_rows), samples.subset(test_rows)


def load_test(path: str | Path, spec: DataSpec) -> ArrayDataset:
    """Load test data in the forms of :func:`load_own`: the test part, or all samples if there are no parts.

    Raises
    ------
    DataError
        As :func:`load_own`.
    """
    train, test = _parts(Path(path), spec)
    if test is None and train != Path(path):
        raise DataError(f"{str(path)!r} has a training part, but neither test/ nor test.csv")
    return _labelled(Path(path) if test is None else test, spec)


def load_samples(
    path: str | Path, spec: DataSpec, *, seed: int = 0, limit: int | None = None
) -> ArrayDataset:
    """Load unlabelled samples: all images in a folder, or a table with or without labels.

    Parameters
    ----------
    path : str or Path
        A folder, which may have folders inside, or a csv file.
    spec : DataSpec
        The shape.
    seed : int
        Determines which samples ``limit`` keeps.
    limit : int, optional
        Largest number of samples to keep.

    Returns
    -------
    ArrayDataset
        Inputs as in :func:`load_own`; each label is -1.

    Raises
    ------
    DataError
        As :func:`load_own`.
    """
    path = Path(path)
    with _readable(path):
        _check_exists(path)
        if path.is_dir():
            _check_images(path, spec)
            files = image_files(path)
            rows = _kept(len(files), limit, seed)
            x = _images([files[row] for row in rows], spec)
        else:
            x = _table(path, spec, labelled=False)[0]
            x = x[_kept(len(x), limit, seed)]
    if not len(x):
        raise DataError(f"{str(path)!r} has no images")
    return ArrayDataset(x, torch.full((len(x),), -1))


# ---------------------------------------------------------------------- folders and files


def _parts(path: Path, spec: DataSpec) -> tuple[Path | None, Path | None]:
    """Return the paths of training and test data; the path itself and None if there are no parts."""
    with _readable(path):
        _check_exists(path)
        if not path.is_dir():
            return path, None
        train, test = (_part(path, name, spec) for name in ("train", "test"))
        if train is None and test is None:
            return path, None
        parts = {part.name for part in (train, test) if part is not None}
        others = [folder.name for folder in _folders(path) if folder.name not in parts]
        if others:
            raise DataError(
                f"{str(path)!r} has {' and '.join(sorted(parts))}, and may have no other folders, got {others[0]!r}"
            )
        return train, test


def _part(path: Path, name: str, spec: DataSpec) -> Path | None:
    folder, table = path / name, path / f"{name}.csv"
    candidates = [folder] if folder.is_dir() and name not in spec.classes else []
    candidates += [table] if table.exists() and not table.is_dir() else []
    for candidate in candidates:
        check_no_link(candidate)
    if len(candidates) > 1:
        raise DataError(f"{str(path)!r} has both {name}/ and {name}.csv; one is expected")
    return candidates[0] if candidates else None


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; expected {_FORMS}")


def _check_images(path: Path, spec: DataSpec) -> None:
    if not spec.images:
        raise DataError(
            f"{str(path)!r} is a folder of images, for which input-shape must be CHANNELSxHEIGHTxWIDTH, got "
            f"{spec.shape_text!r}"
        )


def _labelled(path: Path, spec: DataSpec) -> ArrayDataset:
    with _readable(path):
        x, labels = _by_class(path, spec) if path.is_dir() else _table(path, spec)
    if not len(x):
        raise DataError(f"{str(path)!r} has no images in its class folders")
    return ArrayDataset(x, torch.tensor(labels, dtype=torch.int64))


def _by_class(path: Path, spec: DataSpec) -> tuple[Tensor, list[int]]:
    _check_images(path, spec)
    folders = _folders(path)
    if not folders:
        raise DataError(
            f"{str(path)!r} has no sub-folders; expected one per class: {', '.join(spec.classes[:20])}"
        )
    stray = [file for file in path.iterdir() if file.is_file() and file.suffix.lower() in IMAGE_ENDINGS]
    if stray:
        raise DataError(f"the image {str(min(stray))!r} is in no class folder")
    files: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        name = _normal(folder.name)
        if name not in spec.classes:
            raise DataError(f"folder {str(folder)!r}: {unknown_name('class', name, spec.classes)}")
        images = image_files(folder)
        files += images
        labels += [spec.classes.index(name)] * len(images)
    return _images(files, spec), labels


def _table(path: Path, spec: DataSpec, *, labelled: bool = True) -> tuple[Tensor, list[int]]:
    if spec.images:
        raise DataError(
            f"{str(path)!r} is a table, for which input-shape must be the number of columns without the label, got "
            f"{spec.shape_text!r}"
        )
    (columns,) = spec.input_shape
    table = read_table(path, unlabelled=None if labelled else columns, classes=spec.classes)
    if table.features.shape[1] != columns:
        raise DataError(
            f"{str(path)!r} has {table.features.shape[1]} columns beside the label, input-shape is {columns}"
        )
    with np.errstate(over="ignore"):
        x = torch.from_numpy(table.features.astype(np.float32))
    if not bool(torch.isfinite(x).all()):
        raise DataError(f"{str(path)!r} has numbers beyond the range of float32, ±3.4e38")
    labels = []
    for sample, cell in enumerate(table.labels if labelled else ()):
        label = spec.index(cell)
        if label is None:
            raise DataError(f"{table.where_of(sample)}: {unknown_name('class', cell, spec.classes)}")
        labels.append(label)
    return x, labels


def _folders(path: Path) -> list[Path]:
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for folder in folders:
        check_no_link(folder)
    return folders


def _kept(count: int, limit: int | None, seed: int) -> Sequence[int]:
    if limit is None or limit >= count:
        return range(count)
    one_class = np.zeros(count, dtype=np.int64)
    chosen = stratified(one_class, limit, numpy_generator(seed, "own-limit"))
    rows: list[int] = np.flatnonzero(chosen).tolist()
    return rows


# ---------------------------------------------------------------------- images


def _images(files: Sequence[Path], spec: DataSpec) -> Tensor:
    """Return images ``[N, C, H, W]``, decoded one at a time, since files may be much larger than the inputs."""
    channels, height, width = spec.input_shape
    images = torch.empty(len(files), channels, height, width)
    for row, file in enumerate(files):
        image = adapt(decoded(file)[None], (channels, height, width), pad=False)
        images[row] = (image[0] - _MEAN) / _STD
    return images


# ---------------------------------------------------------------------- names, shapes, errors


def _normal(name: str) -> str:
    """Return a name in a normal form of Unicode, since file systems encode letters such as "ä" differently."""
    return unicodedata.normalize("NFC", name.strip())


def _is_shape(shape: tuple[int, ...]) -> bool:
    sizes = all(is_whole_number(size, 1) for size in shape)
    return sizes and (len(shape) == 1 or (len(shape) == 3 and shape[0] in (1, 3)))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        raise DataError(f"{name!r} cannot be read: {error.strerror or first_line(error)}") from error
