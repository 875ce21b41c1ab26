"""Types and helpers that all of :mod:`flwr_kd.data` shares: data sets, checks of labels, optional imports."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from flwr_kd.checks import DataError

IntArray: TypeAlias = npt.NDArray[np.int64]
AnyArray: TypeAlias = npt.NDArray[Any]


class ArrayDataset(Dataset[tuple[Tensor, Tensor]]):
    """A data set in memory: one tensor of inputs and one of labels.

    Parameters
    ----------
    x : Tensor
        Inputs, float32, or int64 for token ids, ``[N, ...]``.
    y : Tensor
        Labels, int64, ``[N]``.

    Raises
    ------
    DataError
        For another dtype, labels that are not one-dimensional, or different lengths.

    Examples
    --------
    >>> import torch
    >>> data = ArrayDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    >>> len(data), data[1], data.subset([2, 0]).y
    (3, (tensor([0., 0.]), tensor(1)), tensor([1, 0]))
    """

    items_are_rows_of_tensors: ClassVar[bool] = True
    """Whether item i is row i of :attr:`tensors`, so that whole batches can be indexed at once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.dtype not in (torch.float32, torch.int64) or x.ndim < 1:
            raise DataError(f"x must be float32 or int64 with shape [N, ...], not {x.dtype} {list(x.shape)}")
        if y.dtype != torch.int64 or y.ndim != 1:
            raise DataError(f"y must be int64 with shape [N], not {y.dtype} {list(y.shape)}")
        if len(x) != len(y):
            raise DataError(f"x and y must have the same length, not {len(x)} and {len(y)}")
        self.x = x
        self.y = y

    def __init_subclass__(cls) -> None:
        # A subclass may change what an item is, unless it sets the attribute itself.
        cls.items_are_rows_of_tensors = cls.__dict__.get("items_are_rows_of_tensors", False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs ``[N, ...]`` and labels ``[N]``."""
        return self.x, self.y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def subset(self, indices: Sequence[int] | AnyArray | Tensor) -> ArrayDataset:
        """Return the samples at ``indices``, in that order, as a new data set (a copy).

        Parameters
        ----------
        indices : sequence of int, ndarray or Tensor
            Positions, ``[n]``; may be empty. Masks are not accepted.

        Raises
        ------
        DataError
            If a position is not a whole number or lies outside ``0 .. len(self) - 1``.
        """
        rows = torch.from_numpy(as_indices(indices, len(self), "indices"))
        return self.like(*(tensor[rows] for tensor in self.tensors))

    def to(self, device: torch.device) -> ArrayDataset:
        """Return the samples on a device; the data set itself if they are there already."""
        return self if self.x.device == device else self.like(*(tensor.to(device) for tensor in self.tensors))

    def like(self, x: Tensor, labels: Tensor) -> ArrayDataset:
        """Return a data set of this kind with other :attr:`tensors`."""
        return ArrayDataset(x, labels)


class MultiLabelDataset(ArrayDataset):
    """A data set in memory whose samples have several labels each.

    Its ``y`` is the first label of each sample, by which data sets are divided; what is learned is ``labels``.

    Parameters
    ----------
    x : Tensor
        As :class:`ArrayDataset` takes them.
    labels : Tensor
        ``[N, C]`` of 0 and 1.

    Raises
    ------
    DataError
        For another dtype or shape, or another value.

    Examples
    --------
    >>> data = MultiLabelDataset(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 0, 0]]))
    >>> data.y, data.subset([0])[0][1]
    (tensor([1, 0]), tensor([0., 1., 1.]))
    """

    items_are_rows_of_tensors = True
    multi_label: ClassVar[bool] = True
    """By which a client recognises it."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        if labels.ndim != 2 or not bool(((labels == 0) | (labels == 1)).all()):
            raise DataError(
                f"labels must be 0 or 1, with shape [N, C], not {labels.dtype} {list(labels.shape)}"
            )
        super().__init__(x, labels.argmax(dim=1))
        self.labels = labels.to(torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs ``[N, ...]`` and labels ``[N, C]``."""
        return self.x, self.labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.labels[index]

    def like(self, x: Tensor, labels: Tensor) -> MultiLabelDataset:
        """Return a data set of this kind with other :attr:`tensors`."""
        return MultiLabelDataset(x, labels)


@dataclass(frozen=True)
class Bundle:
    """A loaded data set.

    Attributes
    ----------
    name : str
        The name by which it was loaded.
    train : ArrayDataset
        The part that is divided among the clients.
    test : ArrayDataset
        The common test set. No client trains on it.
    num_classes : int
        Labels are ``0 .. num_classes - 1``; a class need not occur.
    input_shape : tuple of int
        Shape of one input: ``(C, H, W)`` for images, ``(F,)`` for texts and tables, ``(L,)`` for token ids.
    vocabulary : int
        Number of token ids, including those of padding and unknown words; 0 if inputs are not token ids.
    columns : mapping of str to ndarray
        What else is known of each training sample, ``[N]``, for partitions ``natural:COLUMN``.
    class_names : tuple of str
        In the order of the labels; empty if the data does not name its classes.
    inputs : tuple of str
        Names of a table's columns that are inputs; empty if the data does not name them.
    """

    name: str
    train: ArrayDataset
    test: ArrayDataset
    num_classes: int
    input_shape: tuple[int, ...]
    vocabulary: int = 0
    columns: Mapping[str, AnyArray] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def multi_label(self) -> bool:
        """Whether samples have several labels each."""
        return isinstance(self.train, MultiLabelDataset)

    def with_training(self, rows: AnyArray) -> Bundle:
        """Return the data set with some of the training samples, by their positions ``[n]``."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, train=self.train.subset(rows), columns=columns)

    def padded(self, side: int) -> Bundle:
        """Return the data set with images padded to this side, with the smallest value of the training images.

        Raises
        ------
        DataError
            If it has no images, or they are larger.
        """
        if len(self.input_shape) != 3 or max(self.input_shape[1:]) > side:
            raise DataError(
                f"{self.name} of shape {list(self.input_shape)} cannot be padded to images of {side}"
            )
        height, width = (side - size for size in self.input_shape[1:])
        margins = (width // 2, width - width // 2, height // 2, height - height // 2)
        darkest = float(self.train.x.min()) if len(self.train) else 0.0
        train, test = (
            part.like(pad(part.x, margins, value=darkest), part.tensors[1])
            for part in (self.train, self.test)
        )
        return replace(self, train=train, test=test, input_shape=(self.input_shape[0], side, side))


def require(module: str, extra: str = "simulation") -> Any:
    """Import an optional module; raise DataError with the extra that installs it if this fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(module.partition(".")[0], str(error), extra) from error


def missing_package(package: str, why: str, extra: str) -> DataError:
    """Return the error for an optional package that cannot be imported, with the extra that installs it."""
    return DataError(
        f"this needs the package {package!r}, which cannot be imported ({why}): pip install 'flwr-kd[{extra}]'"
    )


def as_labels(labels: AnyArray | Tensor | Sequence[int], name: str = "labels") -> IntArray:
    """Return labels as an int64 array ``[N]`` of numbers from 0."""
    array = _integers(labels, name)
    if array.size and array.min() < 0:
        raise DataError(f"{name} must not be negative, but there is {array.min()}")
    return array


def as_indices(indices: AnyArray | Tensor | Sequence[int], length: int, name: str) -> IntArray:
    """Return indices as an int64 array ``[n]`` of positions below ``length``."""
    array = _integers(indices, name)
    bad = array[(array < 0) | (array >= length)]
    if bad.size:
        raise DataError(f"{name} must lie in 0 .. {length - 1}, but there is {bad[0]}")
    return array


def _integers(values: AnyArray | Tensor | Sequence[int], name: str) -> IntArray:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{name} must have shape [N], not {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"{name} must be whole numbers, not {array.dtype}")
    return array.astype(np.int64)
