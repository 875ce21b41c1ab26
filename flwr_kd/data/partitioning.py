"""Partitions of samples among clients, and each client's train/test split.

The partitions are those of `flwr-datasets` and KT-pFL's two, which the library does not have. This module adds
properties that the library does not guarantee: rows are shuffled before `IidPartitioner` divides them (it does not
shuffle, so that a set sorted by class would give each client its own classes), a class that runs out causes no
division by zero, no client is empty, and the result depends only on the seed.
"""

from __future__ import annotations

import bisect
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flwr_kd import catalogue
from flwr_kd.checks import DataError, read_number, read_whole_number, whole_number
from flwr_kd.data._base import AnyArray, IntArray, as_indices, as_labels, require
from flwr_kd.seeding import derive_seed, numpy_generator
from flwr_kd.text import plural, unknown_name
from flwr_kd.wording import option

__all__ = ["PARTITIONS", "histogram", "natural", "partition", "split"]

PARTITIONS: tuple[str, ...] = tuple(catalogue.PARTITIONS)
"""Forms that :func:`partition` accepts; :data:`flwr_kd.catalogue.PARTITIONS` has a line about each."""

# Minimum number of samples per client with `dirichlet`, or half of an even share if that is less.
_DIRICHLET_MINIMUM = 10

# Default samples per class of KT-pFL's partitions.
_MANY, _EACH = 450, 300

# In place of these numbers: the largest for which the samples suffice.
_MOST = "max"

# Far below any share that can be drawn, and far above the point where float64 loses precision.
_PRIOR_FLOOR = 1e-100

_log = logging.getLogger(__name__)


def partition(
    labels: Tensor | AnyArray | Sequence[int], spec: str, *, num_clients: int, seed: int
) -> list[IntArray]:
    """Divide samples among clients.

    For partitions by a column of the data set see :func:`natural`.

    Parameters
    ----------
    labels : Tensor or ndarray
        Class of each sample, ``[N]``, whole numbers from 0. Numbers may be missing.
    spec : str
        The kind of partition:

        ``iid``
            Random parts of equal size (``IidPartitioner``).
        ``dirichlet:ALPHA``
            Each class is divided by shares from ``Dirichlet(ALPHA)`` over the clients
            (``DirichletPartitioner``, with ``self_balancing=False`` as in the papers' definition: the smaller
            ALPHA, the more the sizes differ). Every client gets at least 10 samples, or half of an even share if
            that is less, and at least 1. The library draws up to 11 times to reach this. With many clients and a
            small ALPHA it usually fails; one draw is then corrected: a client below the minimum
            gets random samples of the currently largest client.
        ``inner-dirichlet:ALPHA``
            Parts of equal size; a client's class mix is drawn from ``Dirichlet(ALPHA)`` over the classes
            (``InnerDirichletPartitioner``). A client whose classes have all run out gets samples of the remaining
            classes, so that the clients' mixes always add up to that of the data. The library divides by
            zero if the shares of all remaining classes of a client were rounded to 0 (small ALPHA). Here shares
            are at least 1e-100, so that such a client takes from those classes evenly.
        ``pathological:K``
            Each client has samples of exactly K classes (``PathologicalPartitioner``, "first-deterministic":
            client i has class i mod C and K-1 random others). A class is divided evenly among the clients
            that have it, so sizes differ. A class that no client has is left out.
        ``ktpfl-1`` or ``ktpfl-1:MANY``
            Two groups of clients with opposite class mixes (KT-pFL, appendix B.1, case 1): the first half of
            the clients (the larger half of an odd number) and the others. A single client is in the first group.
            A client of the first group has MANY samples of each class of the first half of the classes (the
            larger half of an odd number) and MANY/3 of each other class. In the second group it is the opposite.
            MANY is a multiple of 3, by default 450. The rest of a class is left out: 20 clients
            use all of 10 classes of 6,000 samples; fewer clients use less. ``ktpfl-1:max`` takes the largest MANY
            for which the samples suffice: 90 with 100 clients and 10 classes of 6,000 samples.
        ``ktpfl-2`` or ``ktpfl-2:EACH``
            Each client draws two different classes, all pairs with the same probability, and has EACH samples of
            each (KT-pFL, appendix B.1, case 2). EACH is by default 300. A client draws from the classes that
            still have EACH samples. If its draw would leave too few for the following clients, it
            gets the two classes with the most samples left, so that the existence of a partition does not depend
            on the seed. The rest of a class, and a class that no client drew, is left out. ``ktpfl-2:max`` takes
            the largest EACH for which the samples suffice.
    num_clients : int
        Number of clients, from 1 to N.
    seed : int
        The result depends only on the arguments.

    Returns
    -------
    list of ndarray
        For each client the positions of its samples, int64, in random order; disjoint and not empty. Together
        they are all of ``0 .. N-1``, except with ``pathological:K``, ``ktpfl-1`` and ``ktpfl-2``, which may leave
        samples out. "Equal size" means equal within one: if N is not divisible, the first clients get one more.

    Raises
    ------
    DataError
        If ``spec`` is unknown, ALPHA is not a finite number above 0, K is not in 1 .. number of classes, MANY is
        not a multiple of 3 from 3, EACH is below 1, there are more clients than samples, a class has fewer samples
        than the clients that share it, or, with ``ktpfl-1`` and ``ktpfl-2``, there are fewer than 2 classes or too
        few samples of a class.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.repeat([0, 1, 2], 4)
    >>> parts = partition(labels, "inner-dirichlet:0.1", num_clients=4, seed=0)
    >>> [len(part) for part in parts], sorted(np.concatenate(parts).tolist()) == list(range(12))
    ([3, 3, 3, 3], True)
    >>> histogram(labels, partition(labels, "ktpfl-1:3", num_clients=1, seed=0), 3)
    [[3, 3, 1]]
    """
    classes = as_labels(labels)
    num_clients = whole_number("num_clients", num_clients, 1, error=DataError)
    if num_clients > len(classes):
        raise DataError(
            f"{num_clients} clients are more than there are samples, {len(classes)}; use fewer clients or more "
            "samples"
        )
    divide, parameter = _parse(spec)

    # The library, and `_deal`, assign the rows of a class in their order here.
    order = numpy_generator(seed, "partition", "order").permutation(len(classes))
    parts = divide(classes[order], parameter, num_clients, seed)
    return [order[part].astype(np.int64) for part in parts]


def natural(columns: Mapping[str, AnyArray], spec: str, *, num_clients: int) -> list[IntArray]:
    """Divide samples by a column, such as the person that each comes from: one client for each of its values.

    Parameters
    ----------
    columns : mapping of str to ndarray
        ``[N]`` each: ``Bundle.columns``.
    spec : str
        ``natural:COLUMN``.
    num_clients : int
        The number of values in the column.

    Returns
    -------
    list of ndarray
        For each client the positions of its samples, int64, ascending; clients in the order of the values.

    Raises
    ------
    DataError
        If there is no such column, or it has another number of values.

    Examples
    --------
    >>> speakers = {"speaker": np.array(["b", "a", "b"])}
    >>> [part.tolist() for part in natural(speakers, "natural:speaker", num_clients=2)]
    [[1], [0, 2]]
    """
    name = spec.partition(":")[2]
    if name not in columns:
        known = ", ".join(f"natural:{column}" for column in columns) or "none: it has no columns"
        raise DataError(f"partition {spec!r} needs a column of the data set, got {name!r}; valid: {known}")
    values, groups = np.unique(columns[name], return_inverse=True)
    if len(values) != num_clients:
        raise DataError(
            f"partition {spec!r} has a client for each of the {len(values)} values in the column: set "
            f"{option('clients', len(values))}, got {num_clients}"
        )
    return [np.flatnonzero(groups == group).astype(np.int64) for group in range(len(values))]


def split(
    labels: Tensor | AnyArray | Sequence[int],
    indices: Tensor | AnyArray | Sequence[int],
    *,
    test_fraction: float = 0.25,
    seed: int,
) -> tuple[IntArray, IntArray]:
    """Split one client's samples into train and test with the same class mix.

    The test part gets ``test_fraction`` of the samples (rounded half up, at least one of two or more),
    divided among the classes by largest remainder; ties are broken at random. The last sample of a class
    always stays in train, and no class gives more than its share rounded up. A client whose classes have
    one sample each therefore has no test part.

    Parameters
    ----------
    labels : Tensor or ndarray
        Class of each sample of the whole set, ``[N]``.
    indices : Tensor or ndarray
        The client's samples, ``[n]``, positions in ``labels``; may be empty.
    test_fraction : float
        In ``[0, 1)``; 0 gives an empty test part.
    seed : int
        Determines which samples of a class are in the test part.

    Returns
    -------
    train, test : ndarray
        Positions in ``labels``, int64, in the order of ``indices``; disjoint, together ``indices``.

    Raises
    ------
    DataError
        If the fraction or a position is out of range.

    Examples
    --------
    >>> train, test = split([0, 0, 0, 0, 1, 1, 1, 1], range(8), seed=0)
    >>> len(train), len(test)
    (6, 2)
    """
    classes = as_labels(labels)
    rows = as_indices(
        indices if isinstance(indices, Tensor) else np.asarray(indices), len(classes), "indices"
    )
    if not isinstance(test_fraction, int | float) or not 0 <= test_fraction < 1:
        raise DataError(f"test_fraction must be in [0, 1), not {test_fraction!r}")
    size = math.floor(len(rows) * test_fraction + 0.5)
    if test_fraction > 0 and len(rows) > 1:
        size = max(size, 1)
    chosen = stratified(classes[rows], size, numpy_generator(seed, "split"), keep=1)
    return rows[~chosen], rows[chosen]


def histogram(
    labels: Tensor | AnyArray | Sequence[int], parts: Sequence[AnyArray], num_classes: int
) -> list[list[int]]:
    """Count each client's samples per class.

    Parameters
    ----------
    labels : Tensor or ndarray
        Class of each sample, ``[N]``, in ``0 .. num_classes - 1``.
    parts : sequence of ndarray
        Each client's positions in ``labels``.
    num_classes : int
        Number of classes.

    Returns
    -------
    list of list of int
        ``[clients][classes]``.

    Raises
    ------
    DataError
        If a label or a position is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> histogram([0, 1, 1, 2], [np.array([0, 1]), np.array([2])], 3)
    [[1, 1, 0], [0, 1, 0]]
    """
    classes = as_labels(labels)
    num_classes = whole_number("num_classes", num_classes, 1, error=DataError)
    if classes.size and classes.max() >= num_classes:
        raise DataError(f"labels must be below num_classes={num_classes}, but there is {classes.max()}")
    rows = [as_indices(part, len(classes), f"parts[{i}]") for i, part in enumerate(parts)]
    return [np.bincount(classes[row], minlength=num_classes).tolist() for row in rows]


def stratified(labels: IntArray, size: int, rng: np.random.Generator, *, keep: int = 0) -> AnyArray:
    """Choose ``size`` samples with the class mix of ``labels``, by largest remainder.

    Parameters
    ----------
    labels : ndarray
        Classes, ``[N]``.
    size : int
        Number of samples to choose, at most N.
    rng : numpy.random.Generator
        Chooses the samples, and breaks ties between classes.
    keep : int
        Number of samples of each class that are never chosen; fewer than ``size`` may then be chosen.

    Returns
    -------
    ndarray
        The mask of the chosen samples, bool, ``[N]``.
    """
    mask = np.zeros(len(labels), dtype=bool)
    if size == 0:
        return mask
    _, dense, counts = np.unique(labels, return_inverse=True, return_counts=True)
    room = np.maximum(counts - keep, 0)
    # Whole numbers only, because 0.2 * 15 in floats may be less than 3.
    share, remainder = np.divmod(counts * size, len(labels))
    share = np.minimum(share, room)
    tie_break = rng.permutation(len(counts))
    order = np.lexsort((tie_break, -remainder))
    order = order[(remainder[order] > 0) & (share[order] < room[order])]
    share[order[: size - share.sum()]] += 1
    for k, number in enumerate(share):
        mask[rng.permutation(np.flatnonzero(dense == k))[:number]] = True
    return mask


_Divide = Callable[[IntArray, float, int, int], list[IntArray]]


def _parse(spec: str) -> tuple[_Divide, float]:
    forms = ", ".join(repr(form) for form in PARTITIONS)
    if not isinstance(spec, str):
        raise DataError(f"partition must be one of {forms}, not {spec!r}")
    kind, colon, text = spec.partition(":")
    if spec == "iid":
        return _iid, 0.0
    if kind == "natural":
        raise DataError(f"partition {spec!r} needs a data set with columns: see flwr_kd.data.natural")
    if kind in ("ktpfl-1", "ktpfl-2") and text == _MOST:
        return (_ktpfl_1 if kind == "ktpfl-1" else _ktpfl_2), math.inf
    if kind == "ktpfl-1":
        many = read_whole_number(f"MANY in partition {spec!r}", text, 3, error=DataError) if colon else _MANY
        if many % 3:
            raise DataError(f"MANY in partition {spec!r} must be divisible by 3, got {text!r}")
        return _ktpfl_1, many
    if kind == "ktpfl-2":
        per_class = (
            read_whole_number(f"EACH in partition {spec!r}", text, 1, error=DataError) if colon else _EACH
        )
        return _ktpfl_2, per_class
    if not colon or kind not in ("dirichlet", "inner-dirichlet", "pathological"):
        raise DataError(unknown_name("partition", spec, PARTITIONS))
    if kind == "pathological":
        return _pathological, read_whole_number(f"K in partition {spec!r}", text, 1, error=DataError)
    alpha = read_number(f"ALPHA in partition {spec!r}", text, 0, open_low=True, error=DataError)
    return (_dirichlet if kind == "dirichlet" else _inner_dirichlet), alpha


def _run(partitioner: Any, labels: IntArray, num_clients: int) -> list[IntArray]:
    """Return a library partitioner's result as positions in ``labels``."""
    datasets = require("datasets")
    # The library assumes that labels are 0 .. C-1 without gaps.
    _, dense = np.unique(labels, return_inverse=True)
    partitioner.dataset = datasets.Dataset.from_dict({"label": dense, "row": np.arange(len(labels))})
    with warnings.catch_warnings():
        # The library's warnings recommend other settings than those that are chosen here.
        warnings.simplefilter("ignore", UserWarning)
        return [
            np.asarray(partitioner.load_partition(client)["row"][:], dtype=np.int64)
            for client in range(num_clients)
        ]


def _iid(labels: IntArray, _: float, num_clients: int, seed: int) -> list[IntArray]:
    library = require("flwr_datasets.partitioner")
    return _run(library.IidPartitioner(num_clients), labels, num_clients)


def _dirichlet(labels: IntArray, alpha: float, num_clients: int, seed: int) -> list[IntArray]:
    library = require("flwr_datasets.partitioner")
    minimum = max(1, min(_DIRICHLET_MINIMUM, len(labels) // (2 * num_clients)))

    def draw(min_size: int) -> list[IntArray]:
        partitioner = library.DirichletPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            alpha=alpha,
            min_partition_size=min_size,
            self_balancing=False,
            seed=derive_seed(seed, "partition", "dirichlet"),
        )
        return _run(partitioner, labels, num_clients)

    try:
        return draw(minimum)
    except ValueError:
        _log.info(
            "dirichlet:%g leaves clients with fewer than %d samples; they get samples of larger clients",
            alpha,
            minimum,
        )
    return _top_up(draw(0), minimum, numpy_generator(seed, "partition", "top-up"))


def _top_up(parts: list[IntArray], minimum: int, rng: np.random.Generator) -> list[IntArray]:
    """Move random samples from the largest part to parts with fewer than ``minimum``."""
    rows = [rng.permutation(part).tolist() for part in parts]
    for small in rows:
        while len(small) < minimum:
            small.append(max(rows, key=len).pop())
    return [np.asarray(row, dtype=np.int64) for row in rows]


class _FlooredDirichlet(np.random.Generator):
    """A generator whose Dirichlet draws are never 0.

    `InnerDirichletPartitioner` renormalises a client's shares whenever a class runs out, which gives NaN if all
    remaining shares are 0. It accepts a generator as its seed, so that the library needs no change.
    """

    def dirichlet(self, alpha: Any, size: Any = None) -> Any:
        shares = np.maximum(super().dirichlet(alpha, size), _PRIOR_FLOOR)
        return shares / shares.sum(axis=-1, keepdims=True)


def _inner_dirichlet(labels: IntArray, alpha: float, num_clients: int, seed: int) -> list[IntArray]:
    library = require("flwr_datasets.partitioner")
    sizes = [len(part) for part in np.array_split(labels, num_clients)]
    generator = _FlooredDirichlet(np.random.PCG64(derive_seed(seed, "partition", "inner-dirichlet")))
    partitioner = library.InnerDirichletPartitioner(
        partition_sizes=sizes, partition_by="label", alpha=alpha, seed=generator
    )
    return _run(partitioner, labels, num_clients)


def _pathological(labels: IntArray, number: float, num_clients: int, seed: int) -> list[IntArray]:
    library = require("flwr_datasets.partitioner")
    _, counts = np.unique(labels, return_counts=True)
    num_classes = len(counts)
    if number > num_classes:
        raise DataError(
            f"K in partition 'pathological:{number}' must be at most the number of classes, {num_classes}"
        )
    partitioner = library.PathologicalPartitioner(
        num_partitions=num_clients,
        partition_by="label",
        num_classes_per_partition=int(number),
        class_assignment_mode="first-deterministic",
        seed=derive_seed(seed, "partition", "pathological"),
    )
    try:
        return _run(partitioner, labels, num_clients)
    except ValueError as error:
        raise DataError(
            f"partition 'pathological:{number}' cannot be made for {plural(num_clients, 'client')}: a class would "
            f"have to serve more clients than it has samples (the smallest has {counts.min()}); "
            "use fewer clients or a smaller K"
        ) from error


def _ktpfl_1(labels: IntArray, many: float, num_clients: int, seed: int) -> list[IntArray]:
    names, counts = _two_or_more_classes(labels, f"ktpfl-1:{_written(many)}")
    first = (num_clients + 1) // 2
    second = num_clients - first
    half = (len(names) + 1) // 2
    # Samples that a class gives, in units of MANY/3. These are Python's ints, because MANY may exceed int64.
    thirds = [3 * first + second] * half + [first + 3 * second] * (len(names) - half)
    worst = min(range(len(names)), key=lambda k: counts[k] / thirds[k])
    if many == math.inf:
        many = max(3, 3 * (counts[worst] // thirds[worst]))
    many, few = int(many), int(many) // 3
    if counts[worst] < few * thirds[worst]:
        raise DataError(
            f"partition 'ktpfl-1:{many}' needs {few * thirds[worst]} samples of class {names[worst]} for "
            f"{plural(num_clients, 'client')}, but there are {counts[worst]}; use more samples, fewer clients or a "
            f"smaller MANY{_at_most(3 * (counts[worst] // thirds[worst]))}"
        )
    wanted = np.full((num_clients, len(names)), few, dtype=np.int64)
    wanted[:first, :half] = wanted[first:, half:] = many
    return _deal(labels, wanted, numpy_generator(seed, "partition", "ktpfl-1"))


def _ktpfl_2(labels: IntArray, each: float, num_clients: int, seed: int) -> list[IntArray]:
    names, counts = _two_or_more_classes(labels, f"ktpfl-2:{_written(each)}")

    def clients_served(size: int) -> list[int]:
        return [min(count // size, num_clients) for count in counts]

    def is_enough(size: int) -> bool:
        return sum(clients_served(size)) >= 2 * num_clients

    # Larger shares are fewer, so that all sizes above the first that is too large are also too large.
    sizes = range(1, int(min(each, max(counts))) + 1)
    most = bisect.bisect_left(sizes, True, key=lambda size: not is_enough(size))
    each = max(1, most) if each == math.inf else int(each)
    if not is_enough(each):
        smallest = counts.index(min(counts))
        raise DataError(
            f"partition 'ktpfl-2:{each}' needs {2 * num_clients} shares of {each} samples of a class, two for "
            f"each client, but there are {sum(clients_served(each))}, as a client takes "
            f"one share of a class at most: class {names[smallest]}, the smallest, has {counts[smallest]} "
            f"samples; use more samples, fewer clients or a smaller EACH{_at_most(most)}"
        )

    rng = numpy_generator(seed, "partition", "ktpfl-2")
    left = np.asarray(clients_served(each))
    wanted = np.zeros((num_clients, len(names)), dtype=np.int64)
    for client in range(num_clients):
        following = num_clients - client - 1
        pair = rng.choice(np.flatnonzero(left), 2, replace=False)
        after = left.copy()
        after[pair] -= 1
        # A client takes at most one share of a class, so that of each class at most `following` shares count.
        if np.minimum(after, following).sum() < 2 * following:
            pair = np.lexsort((rng.permutation(len(left)), -left))[:2]
        left[pair] -= 1
        wanted[client, pair] = each
    return _deal(labels, wanted, rng)


def _two_or_more_classes(labels: IntArray, spec: str) -> tuple[list[int], list[int]]:
    """Return the classes that occur and the number of samples of each."""
    names, counts = np.unique(labels, return_counts=True)
    if len(names) < 2:
        raise DataError(f"partition {spec!r} needs at least 2 classes, but there is only class {names[0]}")
    return names.tolist(), counts.tolist()


def _written(size: float) -> str:
    return _MOST if size == math.inf else str(int(size))


def _at_most(number: int) -> str:
    return f" ({number} at most)" if number else ""


def _deal(labels: IntArray, wanted: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Give each client ``wanted[client, k]`` samples of the k-th class, ``[clients, classes]``."""
    _, dense = np.unique(labels, return_inverse=True)
    # The last piece of a class goes to no client.
    pieces = [np.split(np.flatnonzero(dense == k), np.cumsum(column)) for k, column in enumerate(wanted.T)]
    # Without the permutation a client's rows would be sorted by class.
    return [rng.permutation(np.concatenate([piece[i] for piece in pieces])) for i in range(len(wanted))]
