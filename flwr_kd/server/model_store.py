"""A model per client at the server, of any number of clients: in memory up to a bound, beyond it in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from flwr_kd.learning.weights import by_prefix
from flwr_kd.server.slots import Slot, SlotFile
from flwr_kd.server.tensor_file import forget_pages
from flwr_kd.transport.template import VARIANCE, ArrayTemplate

__all__ = ["MODEL_MEMORY", "ModelStore"]

NDArray = npt.NDArray[Any]
MODEL_MEMORY = 256 * 1024**2
"""Default of the bytes of models that are kept in memory."""
_BLOCK_NUMBERS = 2**22
"""Numbers of all models together that are in memory at once, 32 MB of them."""
_ALIGNED = 64


@dataclass(frozen=True)
class _Place:
    """Where one array is among a model's bytes."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, data: NDArray) -> NDArray:
        """Return the array, of a whole model's bytes."""
        end = self.start + self.size * self.dtype.itemsize
        value: NDArray = data[self.start : end].view(self.dtype).reshape(self.shape)
        return value


class ModelStore:
    """Models of one architecture by the keys of their clients.

    A model that was put in is never changed: a later one takes its place. So a :meth:`copy`, and what
    :meth:`state_arrays` returned, stay what they are, and share what is the same. Arrays that are not finite
    everywhere, such as a mask, have 0 in place of the template's constants here.

    Parameters
    ----------
    template : ArrayTemplate
        The names, dtypes and shapes of all models.
    memory : int
        Bytes of this store's models that are kept in memory. Further models are in a file without a name.
    folder : Path, optional
        Where that file is; the system's folder for temporary files if None.

    Examples
    --------
    >>> store = ModelStore(ArrayTemplate.of_ndarrays({"w": np.zeros(2)}), memory=0)
    >>> store.put(7, [np.array([1.0, 2.0])])
    >>> store.put(3, [np.array([4.0, 6.0])])
    >>> store.keys, store.squared_distances([3, 7]).tolist()
    ([3, 7], [[0.0, 25.0], [25.0, 0.0]])
    >>> store.mixed({7: np.array([0.5, 0.5])}, [3, 7]).get(7)
    [array([2.5, 4. ])]
    """

    def __init__(
        self, template: ArrayTemplate | None = None, *, memory: int = MODEL_MEMORY, folder: Path | None = None
    ) -> None:
        self.template = ArrayTemplate() if template is None else template
        self.memory, self.folder = memory, folder
        self._places: list[_Place] = []
        self.nbytes = 0
        for dtype, shape in zip(self.template.dtypes, self.template.shapes, strict=True):
            place = _Place(self.nbytes, np.dtype(dtype), shape)
            self._places.append(place)
            self.nbytes += -(-place.size * place.dtype.itemsize // _ALIGNED) * _ALIGNED
        self._file = SlotFile(self.nbytes, folder)
        self._models: dict[int, NDArray | Slot] = {}
        self._count_in_memory = 0

    # ------------------------------------------------------------------ single models

    @property
    def keys(self) -> list[int]:
        """The clients that have a model, ascending."""
        return sorted(self._models)

    @property
    def in_memory(self) -> int:
        """Bytes of the models that are in memory."""
        return self.nbytes * self._count_in_memory

    def __contains__(self, key: object) -> bool:
        return key in self._models

    def __len__(self) -> int:
        return len(self._models)

    def put(self, key: int, arrays: Sequence[NDArray]) -> None:
        """Keep a copy of a client's model, in place of its earlier one.

        Parameters
        ----------
        key : int
            The client's.
        arrays : sequence of ndarray
            In the template's order, of its dtypes and shapes.

        Raises
        ------
        OSError
            If it must be written to the file, and cannot.
        """
        data = np.zeros(self.nbytes, np.uint8)
        for place, array in zip(self._places, self.template.finite(arrays), strict=True):
            place.of(data)[...] = array
        self._keep(key, data)

    def get(self, key: int) -> list[NDArray]:
        """Return a client's model, which must not be changed."""
        held = self._models[key]
        data = held if isinstance(held, np.ndarray) else held.read(0, self.nbytes)
        return [place.of(data) for place in self._places]

    def record(self, key: int) -> ArrayRecord:
        """Return a client's model as it is sent, with the template's constants."""
        return self.template.record(self.get(key))

    # ------------------------------------------------------------------ stores

    def empty(self) -> ModelStore:
        """Return a store for models of the same architecture, without any."""
        other = ModelStore.__new__(ModelStore)
        other.__dict__.update(self.__dict__)
        other._models, other._count_in_memory = {}, 0
        return other

    def copy(self) -> ModelStore:
        """Return a store of the same models."""
        other = self.empty()
        other._models, other._count_in_memory = dict(self._models), self._count_in_memory
        return other

    def merge(self, other: ModelStore) -> None:
        """Take another store's models of the same architecture, in place of those of the same clients.

        Raises
        ------
        OSError
            See :meth:`put`.
        """
        for key, held in other._models.items():
            if isinstance(held, Slot):
                self._set(key, held)
            else:
                self._keep(key, held)

    def share(self, key: int, other: int) -> None:
        """Let a client have another's model."""
        self._set(key, self._models[other])

    def in_order_of(self, template: ArrayTemplate) -> ModelStore:
        """Return a store of the same models whose arrays have the order, dtypes and constants of a template.

        Raises
        ------
        OSError
            See :meth:`put`.
        """
        other = ModelStore(template, memory=self.memory, folder=self.folder)
        order = [self.template.names.index(name) for name in template.names] if self._models else []
        for key in self.keys:
            arrays = self.get(key)
            other.put(key, [arrays[i] for i in order])
        return other

    # ------------------------------------------------------------------ maths over models

    def products(self, keys: Sequence[int]) -> NDArray:
        """Return the inner products of clients' models, ``[N, N]``, float64, over all float arrays."""
        total = np.zeros((len(keys), len(keys)))
        for _, _, block in self.blocks(keys, self._floats):
            total += block @ block.T
        return total

    def cosines(self, keys: Sequence[int]) -> NDArray:
        """Return the cosine similarities of clients' models over their parameters, ``[N, N]``, float64.

        Without running statistics; see :attr:`ArrayTemplate.parameters`. A model of zeros, or one whose square is
        beyond float64, is similar to none but itself.
        """
        total = np.zeros((len(keys), len(keys)))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for _, _, block in self.blocks(keys, self.template.parameters):
                total += block @ block.T
            norms = np.sqrt(total.diagonal())
            cosines = total / norms[:, None] / norms
        cosines = np.clip(np.where(np.isfinite(cosines), cosines, 0.0), -1, 1)
        np.fill_diagonal(cosines, 1.0)
        return cosines

    def squared_distances(self, keys: Sequence[int]) -> NDArray:
        """Return the squared distances between clients' models over their parameters, ``[N, N]``, float64.

        Without running statistics; see :attr:`ArrayTemplate.parameters`. One beyond float64 is infinite.
        """
        total = np.zeros((len(keys), len(keys)))
        with np.errstate(over="ignore", invalid="ignore"):
            for _, _, block in self.blocks(keys, self.template.parameters):
                # The mean shifts all models alike. Without it, near models would differ by rounding alone.
                block -= block.mean(axis=0)
                total += block @ block.T
            squares = total.diagonal()
            distances = squares[:, None] + squares - 2 * total
        distances = np.where(np.isnan(distances), np.inf, np.maximum(distances, 0.0))
        np.fill_diagonal(distances, 0.0)
        return distances

    def mixed(
        self, rows: Mapping[int, NDArray], keys: Sequence[int], *, parameters_only: bool = False
    ) -> ModelStore:
        """Return mixtures of clients' models.

        Values are summed in float64, and clipped to the range of their dtype; variances are at least 0.

        Parameters
        ----------
        rows : mapping of int to ndarray
            By the key of a client that has a model, its weights ``[N]`` over ``keys``.
        keys : sequence of int
            The clients whose models are mixed.
        parameters_only : bool
            Leave running statistics what they are in the client's own model, as whole numbers always are.

        Returns
        -------
        ModelStore
            With a model for each of ``rows``; empty without any.

        Raises
        ------
        OSError
            See :meth:`put`.
        """
        if not rows:
            return self.empty()
        weights = np.stack([np.asarray(row, np.float64) for row in rows.values()])
        mixtures = self.empty()
        for number, key in enumerate(rows):
            held = self._models[key]
            room = (number + 1) * self.nbytes <= self.memory
            fresh: NDArray | Slot = np.zeros(self.nbytes, np.uint8) if room else mixtures._file.new()
            # What is not mixed is the client's own.
            _write(fresh, 0, held if isinstance(held, np.ndarray) else held.read(0, self.nbytes))
            mixtures._set(key, fresh)
        chosen = self.template.parameters if parameters_only else self._floats
        for index, start, block in self.blocks(keys, chosen):
            place = self._places[index]
            limit = float(np.finfo(place.dtype).max)
            low = 0.0 if self.template.names[index].endswith(VARIANCE) else -limit
            values = np.clip(weights @ block, low, limit).astype(place.dtype)
            at = place.start + start * place.dtype.itemsize
            for fresh, row in zip(mixtures._models.values(), values, strict=True):
                _write(fresh, at, row.view(np.uint8))
        for fresh in mixtures._models.values():
            if isinstance(fresh, np.ndarray):
                fresh.flags.writeable = False
        return mixtures

    def blocks(
        self, keys: Sequence[int], chosen: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int, npt.NDArray[np.float64]]]:
        """Yield values of all models ``[N, b]``, with the position of the array and the place of the first value.

        Parameters
        ----------
        keys : sequence of int
            Clients that have a model.
        chosen : sequence of int, optional
            Positions of the arrays; all arrays if None. Numbers of other dtypes are given as float64.
        """
        models = [self._models[key] for key in keys]
        width = max(1, _BLOCK_NUMBERS // max(len(models), 1))
        for index in range(len(self._places)) if chosen is None else chosen:
            place = self._places[index]
            for start in range(0, place.size, width):
                count = min(width, place.size - start)
                at, nbytes = place.start + start * place.dtype.itemsize, count * place.dtype.itemsize
                block = np.empty((len(models), count))
                for row, held in zip(block, models, strict=True):
                    data = held[at : at + nbytes] if isinstance(held, np.ndarray) else held.read(at, nbytes)
                    row[:] = data.view(place.dtype)
                yield index, start, block

    # ------------------------------------------------------------------ checkpoints

    def state_arrays(self) -> dict[str, NDArray]:
        """Return all models' arrays as ``key/name``; those of the file stay there until they are looked at."""
        arrays = {}
        for key in self.keys:
            held = self._models[key]
            data = held if isinstance(held, np.ndarray) else held.mapped(self.nbytes)
            for name, place in zip(self.template.names, self._places, strict=True):
                arrays[f"{key}/{name}"] = place.of(data)
        return arrays

    @classmethod
    def from_state(
        cls, state: Mapping[str, NDArray], *, memory: int = MODEL_MEMORY, folder: Path | None = None
    ) -> ModelStore:
        """Restore :meth:`state_arrays`.

        Raises
        ------
        ValueError
            If the models are not of one architecture, or the names are not those of such a state.
        OSError
            See :meth:`put`.
        """
        models = by_prefix(state)
        store: ModelStore | None = None
        for key, arrays in models.items():
            kinds = {name: (value.dtype, value.shape) for name, value in arrays.items()}
            if store is None:
                shapes = tuple(shape for _, shape in kinds.values())
                template = ArrayTemplate(tuple(kinds), tuple(d.name for d, _ in kinds.values()), shapes)
                store, first = cls(template, memory=memory, folder=folder), kinds
            if kinds != first or "" in kinds:
                raise ValueError("the clients' models of the state are not of one architecture")
            store.put(int(key), [arrays[name] for name in store.template.names])
            for value in arrays.values():
                forget_pages(value)
        return cls(memory=memory, folder=folder) if store is None else store

    # ------------------------------------------------------------------ inside

    @property
    def _floats(self) -> tuple[int, ...]:
        return tuple(i for i, place in enumerate(self._places) if place.dtype.kind == "f")

    def _keep(self, key: int, data: NDArray) -> None:
        replaced = isinstance(self._models.get(key), np.ndarray)
        if self.in_memory + (0 if replaced else self.nbytes) <= self.memory:
            data.flags.writeable = False
            self._set(key, data)
            return
        slot = self._file.new()
        slot.write(0, data)
        self._set(key, slot)

    def _set(self, key: int, held: NDArray | Slot) -> None:
        before = self._models.get(key)
        self._count_in_memory += isinstance(held, np.ndarray) - isinstance(before, np.ndarray)
        self._models[key] = held


def _write(held: NDArray | Slot, start: int, data: NDArray) -> None:
    if isinstance(held, np.ndarray):
        held[start : start + data.size] = data
    else:
        held.write(start, data)
