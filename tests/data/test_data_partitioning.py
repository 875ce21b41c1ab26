"""Partitions and the clients' train/test splits: properties of every result, and the calls of the library."""

from __future__ import annotations

import functools
import itertools
import random
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_kd.data import PARTITIONS, DataError, _images, histogram, load, partition, split
from flwr_kd.data import partitioning as module
from flwr_kd.seeding import derive_seed, numpy_generator

SPECS = [
    "iid",
    "dirichlet:0.1",
    "dirichlet:100",
    "inner-dirichlet:0.1",
    "inner-dirichlet:100",
    "pathological:2",
]

# These leave samples out, and need more samples of each class than some of the sets below have.
KTPFL = ["ktpfl-1:6", "ktpfl-2:5"]

needs_fashion = pytest.mark.skipif(
    not _images.DEBIAN_FASHION_MNIST.is_dir(), reason="the package dataset-fashion-mnist is not installed"
)


def global_state() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return random.getstate(), numpy_state["key"].tolist(), numpy_state["pos"], torch.get_rng_state().tolist()


def make_labels(size: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("size", "clients"), [(503, 7), (600, 1), (200, 20)])
def test_parts_are_disjoint_never_empty_and_complete(spec: str, size: int, clients: int) -> None:
    labels = make_labels(size, 5)
    parts = partition(labels, spec, num_clients=clients, seed=3)
    together = np.concatenate(parts)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and part.ndim == 1 and len(part) > 0 for part in parts)
    assert len(np.unique(together)) == len(together)
    if spec.startswith("pathological") and clients == 1:
        assert set(labels[together]) == set(labels[parts[0]])
        assert len(set(labels[together])) == 2
    else:
        assert sorted(together) == list(range(size))


@pytest.mark.parametrize("spec", SPECS + KTPFL)
def test_the_seed_decides_and_nothing_global_is_touched(spec: str) -> None:
    labels = make_labels(300, 5)
    before = global_state()
    first = partition(labels, spec, num_clients=6, seed=1)
    assert global_state() == before
    again = partition(torch.from_numpy(labels), spec, num_clients=6, seed=1)
    other = partition(labels, spec, num_clients=6, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_mixes_a_sorted_set() -> None:
    # IidPartitioner alone divides rows in their order, so that each client would get two classes.
    labels = np.repeat(np.arange(10), 100)
    table = np.array(histogram(labels, partition(labels, "iid", num_clients=5, seed=0), 10))
    assert table.sum(axis=1).tolist() == [200] * 5
    assert table.min() >= 5


@pytest.mark.parametrize("spec", ["iid", "inner-dirichlet:0.5"])
def test_leftover_rows_go_to_the_first_clients(spec: str) -> None:
    parts = partition(make_labels(103, 4), spec, num_clients=10, seed=0)
    assert [len(part) for part in parts] == [11] * 3 + [10] * 7


@pytest.mark.parametrize("kind", ["dirichlet", "inner-dirichlet"])
def test_a_small_alpha_concentrates_classes(kind: str) -> None:
    labels = np.repeat(np.arange(10), 200)

    def mean_share_of_top_class(alpha: str) -> float:
        table = np.array(histogram(labels, partition(labels, f"{kind}:{alpha}", num_clients=5, seed=0), 10))
        return float((table.max(axis=1) / table.sum(axis=1)).mean())

    assert mean_share_of_top_class("0.05") > 2 * mean_share_of_top_class("1000")
    assert mean_share_of_top_class("1000") < 0.15


def test_inner_dirichlet_agrees_with_the_library_where_the_library_works() -> None:
    """The floor of the shares only avoids NaN: the same seed gives the same rows."""
    import datasets
    from flwr_datasets.partitioner import InnerDirichletPartitioner

    labels = make_labels(200, 4)
    order = numpy_generator(5, "partition", "order").permutation(200)
    plain = InnerDirichletPartitioner(
        [50] * 4, "label", 0.5, seed=derive_seed(5, "partition", "inner-dirichlet")
    )
    plain.dataset = datasets.Dataset.from_dict({"label": labels[order], "row": order})
    ours = partition(labels, "inner-dirichlet:0.5", num_clients=4, seed=5)
    for client, part in enumerate(ours):
        assert plain.load_partition(client)["row"][:] == part.tolist()


@pytest.mark.parametrize("alpha", ["0.001", "0.01"])
def test_inner_dirichlet_survives_shares_of_zero(alpha: str) -> None:
    """The library raises "Probabilities contain NaN" for this case."""
    import datasets
    from flwr_datasets.partitioner import InnerDirichletPartitioner

    labels = make_labels(1000, 10)
    plain = InnerDirichletPartitioner([50] * 20, "label", float(alpha), seed=0)
    plain.dataset = datasets.Dataset.from_dict({"label": labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"contain NaN"):
            plain.load_partition(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        parts = partition(labels, f"inner-dirichlet:{alpha}", num_clients=20, seed=0)
    assert [len(part) for part in parts] == [50] * 20
    assert sorted(np.concatenate(parts)) == list(range(1000))


@pytest.mark.parametrize("spec", ["inner-dirichlet:0.1", "dirichlet:0.1"])
def test_many_clients_on_many_unequal_classes(spec: str) -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice(62, size=4000, p=rng.dirichlet(np.full(62, 0.5)))
    parts = partition(labels, spec, num_clients=128, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(4000))
    assert min(len(part) for part in parts) >= 10


def test_dirichlet_is_corrected_where_the_library_fails() -> None:
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = make_labels(1000, 10)
    plain = DirichletPartitioner(50, "label", 0.05, min_partition_size=10, seed=0)
    plain.dataset = datasets.Dataset.from_dict({"label": labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"attempts"):
            plain.load_partition(0)
    sizes = [len(part) for part in partition(labels, "dirichlet:0.05", num_clients=50, seed=0)]
    assert min(sizes) == 10
    assert sum(sizes) == 1000
    # The correction moves no more than necessary, so that sizes still differ much.
    assert max(sizes) > 40


def test_top_up_takes_from_the_largest() -> None:
    parts = [np.arange(0), np.arange(10), np.arange(10, 14)]
    done = module._top_up(parts, 3, np.random.default_rng(0))
    assert [len(part) for part in done] == [3, 7, 4]
    assert sorted(np.concatenate(done)) == list(range(14))
    assert set(done[2]) == {10, 11, 12, 13}


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_clients_as_samples(spec: str) -> None:
    labels = np.repeat([0, 1, 2], 4)
    if spec.startswith("pathological"):
        with pytest.raises(DataError, match=r"more clients than it has samples"):
            partition(labels, spec, num_clients=12, seed=0)
    else:
        parts = partition(labels, spec, num_clients=12, seed=0)
        assert sorted(int(part[0]) for part in parts) == list(range(12))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pathological_clients_have_exactly_k_classes(k: int) -> None:
    labels = make_labels(1000, 5)
    table = np.array(histogram(labels, partition(labels, f"pathological:{k}", num_clients=10, seed=0), 5))
    assert (table > 0).sum(axis=1).tolist() == [k] * 10
    assert [table[i, i % 5] > 0 for i in range(10)] == [True] * 10


FEW, MANY = [150] * 5, [450] * 5


@pytest.mark.parametrize("spec", ["ktpfl-1", "ktpfl-1:450"])
@pytest.mark.parametrize("sort", [True, False])
def test_ktpfl_1_with_20_clients_uses_all_of_60_000(spec: str, sort: bool) -> None:
    labels = np.repeat(np.arange(10), 6000)
    if not sort:
        labels = np.random.default_rng(0).permutation(labels)
    parts = partition(labels, spec, num_clients=20, seed=1)
    assert histogram(labels, parts, 10) == [MANY + FEW] * 10 + [FEW + MANY] * 10
    assert sorted(np.concatenate(parts)) == list(range(60_000))


@needs_fashion
def test_ktpfl_on_fashion_mnist() -> None:
    labels = load("fashion-mnist", seed=0).train.y
    parts = partition(labels, "ktpfl-1", num_clients=20, seed=0)
    assert histogram(labels, parts, 10) == [MANY + FEW] * 10 + [FEW + MANY] * 10
    assert sorted(np.concatenate(parts)) == list(range(60_000))
    parts = partition(labels, "ktpfl-2", num_clients=20, seed=0)
    assert [sorted(row) for row in histogram(labels, parts, 10)] == [[0] * 8 + [300] * 2] * 20
    assert len(np.unique(np.concatenate(parts))) == 20 * 600


@pytest.mark.parametrize(
    ("clients", "classes", "table"),
    [
        (1, 2, [[6, 2]]),
        (1, 5, [[6, 6, 6, 2, 2]]),
        (2, 3, [[6, 6, 2], [2, 2, 6]]),
        (3, 4, [[6, 6, 2, 2]] * 2 + [[2, 2, 6, 6]]),
        (5, 5, [[6, 6, 6, 2, 2]] * 3 + [[2, 2, 2, 6, 6]] * 2),
    ],
)
def test_ktpfl_1_puts_the_odd_one_into_the_first_half(
    clients: int, classes: int, table: list[list[int]]
) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), 40))
    parts = partition(labels, "ktpfl-1:6", num_clients=clients, seed=0)
    together = np.concatenate(parts)
    assert histogram(labels, parts, classes) == table
    assert all(part.dtype == np.int64 for part in parts)
    assert len(np.unique(together)) == len(together) == int(np.sum(table))


def test_ktpfl_2_gives_two_classes_drawn_at_random() -> None:
    labels = make_labels(60_000, 10)
    pairs = []
    for seed in range(5):
        parts = partition(labels, "ktpfl-2", num_clients=20, seed=seed)
        table = np.array(histogram(labels, parts, 10))
        assert np.sort(table).tolist() == [[0] * 8 + [300] * 2] * 20
        assert len(np.unique(np.concatenate(parts))) == 20 * 600
        pairs.append([tuple(np.flatnonzero(row)) for row in table])
        assert len(set(pairs[-1])) > 10
        # Classes are drawn, not distributed evenly.
        assert np.ptp((table > 0).sum(axis=0)) >= 3
    assert len(set(map(tuple, pairs))) == 5
    assert {k for drawn in pairs for pair in drawn for k in pair} == set(range(10))


def test_ktpfl_2_draws_every_pair_alike() -> None:
    labels = np.repeat(np.arange(6), 3000)
    parts = partition(labels, "ktpfl-2:1", num_clients=3000, seed=0)
    drawn = [tuple(sorted(labels[part])) for part in parts]
    times = [drawn.count(pair) for pair in itertools.combinations(range(6), 2)]
    assert sum(times) == 3000
    # Each of the 15 pairs is expected 200 times, with a standard deviation of 14.
    assert min(times) > 140
    assert max(times) < 260


def test_ktpfl_2_draws_among_classes_that_have_enough() -> None:
    labels = np.repeat(np.arange(5), [100, 9, 100, 10, 100])
    parts = partition(labels, "ktpfl-2:10", num_clients=10, seed=0)
    table = np.array(histogram(labels, parts, 5))
    assert np.sort(table).tolist() == [[0, 0, 0, 10, 10]] * 10
    assert table[:, 1].sum() == 0
    assert table[:, 3].sum() in (0, 10)


@functools.cache
def can_be_divided(shares: tuple[int, ...], clients: int) -> bool:
    """Try every pair of classes for every client."""
    return clients == 0 or any(
        can_be_divided(tuple(n - (k in pair) for k, n in enumerate(shares)), clients - 1)
        for pair in itertools.combinations([k for k, n in enumerate(shares) if n], 2)
    )


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    clients=st.integers(1, 5),
    each=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_ktpfl_2_finds_a_division_wherever_there_is_one(
    counts: list[int], clients: int, each: int, seed: int
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    if clients > len(labels):
        return
    works = [size for size in range(1, each + 1) if can_be_divided(tuple(n // size for n in counts), clients)]
    if each in works:
        parts = partition(labels, f"ktpfl-2:{each}", num_clients=clients, seed=seed)
        table = np.array(histogram(labels, parts, len(counts)))
        assert np.sort(table)[:, -2:].tolist() == [[each, each]] * clients
        assert table.sum() == 2 * each * clients == len(np.unique(np.concatenate(parts)))
    else:
        with pytest.raises(DataError) as caught:
            partition(labels, f"ktpfl-2:{each}", num_clients=clients, seed=seed)
        ending = f"a smaller EACH ({max(works)} at most)" if works else "a smaller EACH"
        assert str(caught.value).endswith(ending)


def test_ktpfl_2_where_all_is_used_still_differs_between_seeds() -> None:
    # Without looking ahead, one seed in four would leave two shares of one class and none of another.
    labels = np.repeat(np.arange(5), 4)
    tables = set()
    for seed in range(20):
        parts = partition(labels, "ktpfl-2:2", num_clients=5, seed=seed)
        assert sorted(np.concatenate(parts)) == list(range(20))
        table = histogram(labels, parts, 5)
        assert [sorted(row) for row in table] == [[0, 0, 0, 2, 2]] * 5
        tables.add(str(table))
    assert len(tables) > 15


def test_ktpfl_2_breaks_ties_at_random_where_it_must_choose() -> None:
    # The first client must have class 0, which it draws in two of three cases. Its other class may be 1 or 2.
    labels = np.array([0, 0, 1, 2])
    firsts = [sorted(labels[partition(labels, "ktpfl-2:1", num_clients=2, seed=i)[0]]) for i in range(200)]
    assert 80 < firsts.count([0, 1]) < 120
    assert firsts.count([0, 1]) + firsts.count([0, 2]) == 200


@pytest.mark.parametrize("spec", ["ktpfl-1:90", "ktpfl-2:60"])
def test_ktpfl_clients_have_random_samples_in_random_order(spec: str) -> None:
    # In sorted rows the class with few samples would come early.
    labels = np.repeat([0, 1], 300)
    rank, trend = np.zeros(2), []
    chosen = np.zeros(600, dtype=int)
    for seed in range(60):
        (part,) = partition(labels, spec, num_clients=1, seed=seed)
        chosen[part] += 1
        place = np.linspace(0, 1, len(part))
        rank += [place[labels[part] == k].mean() / 60 for k in (0, 1)]
        trend += [np.corrcoef(place[labels[part] == k], part[labels[part] == k])[0, 1] for k in (0, 1)]
    assert np.abs(rank - 0.5).max() < 0.03
    assert abs(np.mean(trend)) < 0.05
    # A sample is drawn in 18 or 6 of 60 cases, or in 12 of 60.
    assert chosen.max() < 36
    assert np.mean(chosen == 0) < 0.01


@pytest.mark.parametrize("spec", KTPFL)
def test_ktpfl_needs_no_library_and_takes_classes_with_gaps(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = make_labels(200, 4)
    dense = partition(labels, spec, num_clients=5, seed=0)
    monkeypatch.setattr(module, "require", None)
    gaps = partition(np.array([2, 5, 9, 11])[labels], spec, num_clients=5, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(dense, gaps, strict=True))


@pytest.mark.parametrize(
    ("spec", "clients", "needs", "helps"),
    [
        (
            "ktpfl-1:9",
            3,
            "9' needs 15 samples of class 8 for 3 clients, but there are 10",
            "MANY (6 at most)",
        ),
        # Class 8 is smaller, but has a larger share of the 150 samples that it must give.
        (
            "ktpfl-1",
            1,
            "450' needs 450 samples of class 7 for 1 client, but there are 16",
            "MANY (15 at most)",
        ),
        ("ktpfl-1:3", 10, "3' needs 20 samples of class 8 for 10 clients, but there are 10", "MANY"),
        (
            "ktpfl-2:8",
            4,
            "8' needs 8 shares of 8 samples of a class, two for each client, but there are 7",
            "EACH (5 at most)",
        ),
        (
            "ktpfl-2",
            1,
            "300' needs 2 shares of 300 samples of a class, two for each client, but there are 0",
            "EACH (16 at most)",
        ),
        (
            "ktpfl-2:1",
            40,
            "1' needs 80 shares of 1 samples of a class, two for each client, but there are 66",
            "EACH",
        ),
    ],
)
def test_ktpfl_says_which_class_is_too_small(spec: str, clients: int, needs: str, helps: str) -> None:
    labels = np.repeat([3, 7, 8], [40, 16, 10])
    kind = spec.partition(":")[0]
    step = 3 if kind == "ktpfl-1" else 1
    if kind == "ktpfl-2":
        needs += ", as a client takes one share of a class at most: class 8, the smallest, has 10 samples"
    with pytest.raises(DataError) as caught:
        partition(labels, spec, num_clients=clients, seed=0)
    assert str(caught.value) == (
        f"partition '{kind}:{needs}; use more samples, fewer clients or a smaller {helps}"
    )
    if suggested := re.search(r"\d+", helps):
        partition(labels, f"{kind}:{suggested[0]}", num_clients=clients, seed=0)
        with pytest.raises(DataError, match=r"at most\)"):
            partition(labels, f"{kind}:{int(suggested[0]) + step}", num_clients=clients, seed=0)
    else:
        with pytest.raises(DataError, match=r"a smaller (MANY|EACH)$"):
            partition(labels, f"{kind}:{step}", num_clients=clients, seed=0)


@pytest.mark.parametrize("spec", ["ktpfl-1:3", "ktpfl-2:1", "ktpfl-1", "ktpfl-2"])
def test_ktpfl_needs_two_classes(spec: str) -> None:
    with pytest.raises(DataError, match=r"'ktpfl-\d:\d+' needs at least 2 classes, .* only class 4"):
        partition(np.full(1000, 4), spec, num_clients=1, seed=0)


@pytest.mark.parametrize(
    ("kind", "clients", "size", "same"),
    [
        ("ktpfl-1", 20, 6000, 450),
        ("ktpfl-1", 100, 6000, 90),
        ("ktpfl-1", 2, 11, 6),
        ("ktpfl-2", 20, 6000, 1500),
        ("ktpfl-2", 100, 5000, 250),
    ],
)
def test_ktpfl_takes_as_many_samples_as_there_are(kind: str, clients: int, size: int, same: int) -> None:
    labels = np.arange(10).repeat(size)
    parts = partition(labels, f"{kind}:max", num_clients=clients, seed=0)
    expected = partition(labels, f"{kind}:{same}", num_clients=clients, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    step = 3 if kind == "ktpfl-1" else 1
    with pytest.raises(DataError, match=r"at most\)"):
        partition(labels, f"{kind}:{same + step}", num_clients=clients, seed=0)


def test_ktpfl_says_where_no_number_is_small_enough() -> None:
    labels = np.arange(10).repeat(3)
    with pytest.raises(DataError, match=r"'ktpfl-1:3' needs 20 samples of class 0 for 10 clients"):
        partition(labels, "ktpfl-1:max", num_clients=10, seed=0)
    with pytest.raises(DataError, match=r"'ktpfl-2:1' needs 40 shares of 1 samples"):
        partition(labels, "ktpfl-2:max", num_clients=20, seed=0)


@pytest.mark.parametrize("spec", [f"ktpfl-1:{3 * 10**30}", f"ktpfl-2:{10**30}"])
def test_ktpfl_with_numbers_beyond_int64(spec: str) -> None:
    with pytest.raises(DataError, match=r"at most\)"):
        partition(make_labels(100, 2), spec, num_clients=2, seed=0)


def test_split_gives_ktpfl_clients_75_and_25_percent() -> None:
    labels = make_labels(70_000, 10)
    for part in partition(labels, "ktpfl-1", num_clients=20, seed=0):
        train, test = split(labels, part, seed=0)
        assert (len(train), len(test)) == (2250, 750)
        whole, own = (np.array(histogram(labels, [rows], 10)[0]) for rows in (part, test))
        assert np.abs(own - whole / 4).max() == 0.5
    for part in partition(labels, "ktpfl-2", num_clients=20, seed=0):
        train, test = split(labels, part, seed=0)
        tables = np.array(histogram(labels, [train, test], 10))
        assert np.sort(tables)[:, -3:].tolist() == [[0, 225, 225], [0, 75, 75]]


@pytest.mark.parametrize("spec", SPECS)
def test_labels_may_have_gaps(spec: str) -> None:
    labels = np.array([2, 5, 9])[make_labels(90, 3)]
    parts = partition(labels, spec, num_clients=3, seed=0)
    assert sum(map(len, parts)) == 90


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dirichlett:1", ["'dirichlett:1'", *PARTITIONS]),
        ("iid:3", ["'iid:3'", "iid"]),
        ("dirichlet", ["'dirichlet'", "dirichlet:ALPHA"]),
        ("dirichlet:", ["ALPHA", "''"]),
        ("dirichlet:0", ["above 0", "'0'"]),
        ("inner-dirichlet:-1", ["above 0", "'-1'"]),
        ("inner-dirichlet:nan", ["finite", "'nan'"]),
        ("dirichlet:inf", ["finite", "'inf'"]),
        ("pathological:0", ["a whole number from 1", "'0'"]),
        ("pathological:1.5", ["whole", "'1.5'"]),
        ("pathological:6", ["at most", "5"]),
        ("ktpfl", ["'ktpfl'", *PARTITIONS]),
        ("ktpfl-3", ["'ktpfl-3'", "ktpfl-2[:EACH]"]),
        ("ktpfl-1:", ["MANY", "a whole number from 3", "''"]),
        ("ktpfl-1:0", ["MANY", "a whole number from 3", "'0'"]),
        ("ktpfl-1:-3", ["MANY", "a whole number from 3", "'-3'"]),
        ("ktpfl-1:4", ["MANY", "divisible by 3", "'4'"]),
        ("ktpfl-1:4.5", ["MANY", "whole", "'4.5'"]),
        ("ktpfl-1:3:3", ["MANY", "whole", "'3:3'"]),
        ("ktpfl-2:", ["EACH", "a whole number from 1", "''"]),
        ("ktpfl-2:0", ["EACH", "a whole number from 1", "'0'"]),
        ("ktpfl-2:-1", ["EACH", "a whole number from 1", "'-1'"]),
        ("ktpfl-2:many", ["EACH", "whole", "'many'"]),
        (None, ["None", "iid"]),
    ],
)
def test_bad_specs_are_named(spec: str, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        partition(make_labels(50, 5), spec, num_clients=3, seed=0)
    assert all(word in str(caught.value) for word in words)


def test_more_clients_than_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"51 clients are more than there are samples, 50; use fewer clients"):
        partition(make_labels(50, 5), "iid", num_clients=51, seed=0)


@pytest.mark.parametrize("clients", [0, -1, 1.5, True, "3"])
def test_bad_numbers_of_clients_are_named(clients: object) -> None:
    with pytest.raises(DataError, match=r"num_clients must be"):
        partition(make_labels(50, 5), "iid", num_clients=clients, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros((3, 2), int), "shape"),
        (np.array([0.5, 1]), "whole numbers"),
        (np.array([0, -1]), "negative"),
    ],
)
def test_bad_labels_are_named(labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        partition(labels, "iid", num_clients=1, seed=0)


def test_no_progress_bar_and_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in SPECS + KTPFL:
            partition(make_labels(205, 5), spec, num_clients=4, seed=0)
    out = capfd.readouterr()
    assert out.out == out.err == ""


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), max_size=60),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_split_has_its_documented_properties(labels: list[int], fraction: float, seed: int) -> None:
    indices = np.arange(len(labels))[::-1]
    train, test = split(labels, indices, test_fraction=fraction, seed=seed)
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert (np.diff(train) < 0).all()
    assert (np.diff(test) < 0).all()
    counts = np.bincount(labels, minlength=7) if labels else np.zeros(7, int)
    own = np.array(histogram(labels, [train, test], 7))
    assert ((own[0] > 0) == (counts > 0)).all()
    target = max(int(len(labels) * fraction + 0.5), int(len(labels) > 1 and fraction > 0))
    assert len(test) <= target
    exact = counts * target / max(len(labels), 1)
    assert (own[1] <= np.ceil(exact)).all()
    assert (own[1] >= np.minimum(np.floor(exact), np.maximum(counts - 1, 0))).all()


def test_split_has_the_clients_own_mix() -> None:
    labels = np.repeat([0, 1, 2], [80, 40, 4])
    train, test = split(labels, np.arange(124), seed=0)
    assert histogram(labels, [train, test], 3) == [[60, 30, 3], [20, 10, 1]]


@pytest.mark.parametrize(
    ("labels", "sizes"),
    [
        ([], (0, 0)),
        ([3], (1, 0)),
        ([1, 1], (1, 1)),
        ([0, 1], (2, 0)),
        ([0, 1, 1], (2, 1)),
        ([0, 1, 2, 3], (4, 0)),
    ],
)
def test_split_of_tiny_clients(labels: list[int], sizes: tuple[int, int]) -> None:
    train, test = split(labels, np.arange(len(labels)), seed=0)
    assert (len(train), len(test)) == sizes
    assert train.dtype == test.dtype == np.int64


def test_split_spreads_ties_over_the_classes() -> None:
    # Ten classes have two samples each. The five that give one to the test part must not always be the first five.
    labels = np.repeat(np.arange(10), 2)
    taken = np.zeros(10)
    for seed in range(40):
        _, test = split(labels, np.arange(20), seed=seed)
        assert len(test) == 5
        taken += np.bincount(labels[test], minlength=10)
    assert taken.min() >= 8


def test_split_takes_positions_of_the_whole_set_and_depends_on_the_seed() -> None:
    labels = make_labels(1000, 3)
    rows = np.arange(500, 700)
    train, test = split(torch.from_numpy(labels), torch.from_numpy(rows), seed=0)
    assert sorted([*train, *test]) == rows.tolist()
    assert np.array_equal(test, split(labels, rows, seed=0)[1])
    assert not np.array_equal(test, split(labels, rows, seed=1)[1])


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan"), "a"])
def test_split_refuses_bad_fractions(fraction: object) -> None:
    with pytest.raises(DataError, match=r"test_fraction must be in \[0, 1\)"):
        split([0, 1], [0, 1], test_fraction=fraction, seed=0)  # type: ignore[arg-type]


def test_positions_out_of_range_are_named() -> None:
    with pytest.raises(DataError, match=r"indices must lie in 0 .. 1, but there is 2"):
        split([0, 1], [0, 2], seed=0)
    with pytest.raises(DataError, match=r"parts\[1\] must lie"):
        histogram([0, 1], [np.array([0]), np.array([-1])], 2)
    with pytest.raises(DataError, match=r"below num_classes=1"):
        histogram([0, 1], [np.array([0])], 1)


def test_histogram_counts() -> None:
    assert histogram([0, 2, 2, 1], [np.array([1, 2]), np.array([], dtype=int)], 4) == [
        [0, 0, 2, 0],
        [0, 0, 0, 0],
    ]
    assert all(type(n) is int for row in histogram([0], [np.array([0])], 2) for n in row)
