"""Knowledge exchange on public data: what travels, the public set, precisions, distillation, and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coefficients
import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import ArrayRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from watched import Party, Watched, equal, kept_model, party, same_models

from flwr_kd.checks import ConfigError
from flwr_kd.client.personal_state import StateError
from flwr_kd.data import ArrayDataset
from flwr_kd.distillation.samples import digest_of
from flwr_kd.learning.batches import Batches, DatasetError
from flwr_kd.models import build_model
from flwr_kd.public_data import client as client_half
from flwr_kd.public_data import server as server_half
from flwr_kd.public_data.client import PublicKnowledgeClient
from flwr_kd.public_data.config import PRECISIONS, PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    PublicRows,
    PublicRowsTargets,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_predictions,
)
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.server.records import HandshakeError, KDResult, Node, Reply
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.payload import Payload, PayloadError

repeatable = settings(max_examples=60, deadline=None, derandomize=True)
X, Y = watched.samples(99, watched.PUBLIC)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Own(PublicKnowledgeStrategy):
    """Everyone's target is what it predicted."""

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        return predictions


class Turned(PublicKnowledgeStrategy):
    """Client n's target is client n + 1's prediction."""

    def targets(self, server_round: int, replies: list[Reply], predictions: Tensor) -> Tensor:
        return predictions.roll(-1, dims=0)


def bare(**changes: Any) -> Party:
    """Return four clients without a method: the core's own client half."""
    run = party("fedmd", **changes)
    run.client = PublicKnowledgeClient
    return run


def participants(result: KDResult) -> list[tuple[int, int]]:
    return [(each.participants, each.failures) for each in result.rounds]


def rows_of(run: Party, r: int, phase: str = "train") -> list[list[int]]:
    return [each.sent()["rows"].tolist() for each in run.grid.of(r, phase).values()]


def digest(source: Any, **options: Any) -> str:
    return digest_of(Batches(source, num_classes=0, labelled=False, **options))


# ---------------------------------------------------------------------- what travels


def distributions(seed: int, rows: int, classes: int, temperature: float) -> np.ndarray[Any, Any]:
    z = np.random.default_rng(seed).normal(scale=4.0, size=(rows, classes)) / temperature
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


class TestPacking:
    @repeatable
    @given(
        st.integers(0, 99), st.integers(1, 6), st.integers(2, 12), st.sampled_from([0.05, 1.0, 10.0, 1000.0]),
        st.sampled_from(PRECISIONS),
    )  # fmt: skip
    def test_there_and_back(
        self, seed: int, rows: int, classes: int, temperature: float, precision: str
    ) -> None:
        p = distributions(seed, rows, classes, temperature)
        packed = pack_predictions(torch.from_numpy(p).float(), precision)
        assert packed.dtype.name == precision
        assert packed.shape == p.shape
        SoftPredictions(packed)  # is one
        if precision == "uint8":
            assert (np.abs(packed - coefficients.codes(p)) <= 0.5 + 1e-4).all()
        found = unpack_predictions(packed)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, coefficients.unpacked(packed), rtol=1e-6)
        assert (np.abs(found.numpy() - p) <= coefficients.error_bound(p, precision)).all()
        np.testing.assert_allclose(found.sum(dim=1), 1, atol=1e-6)

    @pytest.mark.parametrize("classes", [2, 10, 1000])
    def test_flat_distributions_keep_their_differences(self, classes: int) -> None:
        """At T = 10 probabilities differ in the second digit: in 255 steps of 1 nothing would be left."""
        p = distributions(0, 20, classes, 100.0)
        found = unpack_predictions(pack_predictions(torch.from_numpy(p).float(), "uint8")).numpy()
        assert np.corrcoef((found - 1 / classes).ravel(), (p - 1 / classes).ravel())[0, 1] > 0.99

    def test_certainty(self) -> None:
        p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-38]])
        for precision in PRECISIONS:
            found = unpack_predictions(pack_predictions(p, precision))
            np.testing.assert_allclose(found, p, atol=1e-7)

    def test_unknown_precisions(self) -> None:
        with pytest.raises(ValueError, match=r"precision must be one of float32, float16, uint8, got 'int8'"):
            pack_predictions(torch.ones(1, 1), "int8")

    def test_nothing_at_all(self) -> None:
        for precision in PRECISIONS:
            packed = np.zeros((0, 3), dtype=precision)
            SoftPredictions(packed)
            assert unpack_predictions(packed).shape == (0, 3)

    @every_precision
    def test_targets_do_not_change_what_they_are_made_of(self, precision: str) -> None:
        p = torch.tensor([[0.6, 0.3, 0.1]])
        pack_predictions(p, precision)[:] = 0
        assert precision == "float32" or p.tolist() == torch.tensor([[0.6, 0.3, 0.1]]).tolist()


NO_DISTRIBUTIONS: dict[str, tuple[Any, str]] = {
    "negative": (np.float32([[1.5, -0.5, 0.0]]), r"must be in \[0, 1\], got -0.5..1.5"),
    "slightly negative": (np.float32([[1.0, -1e-3, 1e-3]]), r"must be in \[0, 1\]"),
    "more than one": (np.float32([[0.6, 0.5, 0.0]]), r"rows must sum to 1 within 0.02, got 1.1..1.1"),
    "less than one": (np.float16([[0.3, 0.3, 0.3]]), r"rows must sum to 1 within 0.02"),
    "zeros": (np.zeros((1, 3), dtype=np.float32), r"rows must sum to 1 within 0.02, got 0..0"),
    "one row of several": (np.float32([[1, 0, 0], [0.5, 0.5, 0.5]]), r"rows must sum to 1 .*got 1..1.5"),
    "large": (np.float32([[3e38, 0, 0]]), r"must be in \[0, 1\]"),
    "large cancelling": (np.float16([[6e4, -6e4, 1]]), r"must be in \[0, 1\]"),
    "nan": (np.float32([[np.nan, 0.5, 0.5]]), r"1 values that are not finite"),
    "infinite": (np.float16([[np.inf, 0, 0]]), r"1 values that are not finite"),
    "codes below 255": (np.uint8([[254, 1, 0]]), r"each row's largest code must be 255"),
    "codes of nothing": (np.uint8([[255, 0, 0], [0, 0, 0]]), r"each row's largest code must be 255"),
    "no classes": (np.zeros((1, 0), dtype=np.uint8), r"each row's largest code must be 255"),
    "float64": (np.float64([[1, 0, 0]]), r"dtype float64, expected float32 or float16 or uint8"),
    "int8": (np.int8([[1, 0, 0]]), r"dtype int8"),
    "one axis": (np.float32([1, 0, 0]), r"shape \[3\], expected \[K, C\]"),
}


class TestMessages:
    @pytest.mark.parametrize("kind", NO_DISTRIBUTIONS)
    def test_what_are_no_distributions(self, kind: str) -> None:
        values, text = NO_DISTRIBUTIONS[kind]
        with pytest.raises(PayloadError, match=text):
            SoftPredictions(values)

    @pytest.mark.parametrize(
        "values", [np.float32([[0.99, 0, 0]]), np.float32([[0.5, 0.515, 0]]), np.float16([[1.01, 0, 0]])]
    )
    def test_rounding_is_allowed(self, values: Any) -> None:
        assert SoftPredictions(values).predictions is values

    def test_sizes_belong_together(self) -> None:
        rows = np.arange(3)
        with pytest.raises(PayloadError, match=r"'targets' has shape \[2, 3\], expected \[K=3, C\]"):
            PublicRowsTargets(rows=rows, targets=np.ones((2, 3), dtype=np.float32))
        with pytest.raises(PayloadError, match=r"'targets' has shape \[2, 3\], expected \[K=3, C\]"):
            PublicSamplesTargets(samples=np.zeros((3, 2)), targets=np.ones((2, 3), dtype=np.float32))
        with pytest.raises(PayloadError, match=r"dtype int32, expected int64"):
            PublicRows(rows=rows.astype(np.int32), digest="a")

    @pytest.mark.parametrize(
        "message",
        [
            PublicRows(np.array([1, 5]), "abc"),
            PublicSamples(np.arange(12, dtype=np.uint8).reshape(2, 1, 6)),
            PublicRowsTargets(np.array([1, 5]), np.eye(2, dtype=np.float16)),
            PublicSamplesTargets(np.arange(2.0), np.eye(2, dtype=np.float32)),
            SoftPredictions(np.eye(2, dtype=np.uint8) * np.uint8(255)),
        ],
        ids=lambda message: type(message).__name__,
    )
    def test_round_trip(self, message: Payload) -> None:
        assert type(message).from_bytes(message.to_bytes()) == message

    def test_names_differ(self) -> None:
        kinds = (PublicRows, PublicSamples, PublicRowsTargets, PublicSamplesTargets, SoftPredictions)
        assert len({kind.schema for kind in kinds}) == 5
        example: dict[str, Any] = {
            "rows": np.arange(9), "samples": np.zeros((9, 40)), "digest": "a",
            "targets": np.ones((9, 40), dtype=np.float32),
            "predictions": np.full((9, 40), 1 / 40, dtype=np.float32),
        }  # fmt: skip
        for kind in kinds:
            names = kind.__dataclass_fields__
            message = kind(**{name: value for name, value in example.items() if name in names})
            with pytest.raises(PayloadError, match=r"more than max_payload_bytes .*smaller public-samples"):
                message.to_bytes(max_bytes=1)


# ---------------------------------------------------------------------- the public set's digest


class Rows(Dataset[Any]):
    """Items one by one, as a user's own data set gives them."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class TestDigest:
    def test_it_is_of_inputs_in_their_order(self) -> None:
        mine = digest(TensorDataset(X, Y))
        assert len(mine) == 64
        assert mine == digest(TensorDataset(X.clone(), Y))
        others = {
            "labels": TensorDataset(X, Y.flip(0)),
            "no labels": TensorDataset(X),
            "items": Rows([(x, 0) for x in X]),
            "inputs alone": Rows(list(X)),
            "dicts": Rows([{"image": x, "label": "cat"} for x in X]),
            "loader": DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, drop_last=True),
            "array": ArrayDataset(X, Y),
            "strides": TensorDataset(X.transpose(2, 3).contiguous().transpose(2, 3), Y),
        }
        for name, source in others.items():
            assert digest(source) == mine, name

    def test_whatever_differs(self) -> None:
        moved = X.clone()
        moved[7, 0, 1, 2] = torch.nextafter(moved[7, 0, 1, 2], torch.tensor(9.0))
        swapped = X.clone()
        swapped[[3, 4]] = X[[4, 3]]
        found = [
            digest(TensorDataset(x))
            for x in (
                X, moved, swapped, X.flip(0), X[:-1], torch.cat([X, X[:1]]), X.double(), X.half(), -X,
                X.reshape(-1, 1, 4, 2), X.reshape(-1, 8), X.reshape(-1, 1, 1, 4), X.view(torch.int32), X[:0],
            )
        ]  # fmt: skip
        assert len(set(found)) == len(found)

    def test_more_samples_than_a_batch(self) -> None:
        x = torch.arange(1000.0)[:, None]
        other = x.clone()
        other[999] = 0
        assert digest(TensorDataset(x)) != digest(TensorDataset(other))
        assert digest(TensorDataset(x)) == digest(DataLoader(TensorDataset(x), batch_size=7))

    def test_zero_and_minus_zero(self) -> None:
        """Equal to the last bit is what counts."""
        assert digest(TensorDataset(torch.zeros(2, 3))) != digest(TensorDataset(-torch.zeros(2, 3)))

    def test_integers_and_single_numbers(self) -> None:
        images = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
        assert digest(TensorDataset(images)) != digest(TensorDataset(images.to(torch.int8)))
        assert digest(TensorDataset(torch.arange(3.0))) != digest(TensorDataset(torch.arange(3.0)[:, None]))


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the size of each public set that is digested."""
    found: list[int] = []

    def noted(samples: Batches) -> str:
        found.append(len(samples))
        return digest_of(samples)

    for half in (client_half, server_half):
        monkeypatch.setattr(half, "digest_of", noted)
    return found


class TestDigestIsMadeOnce:
    def test_a_client_and_run(self, digests: list[int]) -> None:
        bare().start(3, kind=Own)
        assert len(digests) == 4

    def test_the_server_s_own(self, digests: list[int]) -> None:
        bare().start(2, kind=Own, public_set=TensorDataset(X))
        assert len(digests) == 5

    def test_again_where_the_state_is_lost(self, digests: list[int]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            if r == 2:
                grid.restart(1)

        result = bare().start(3, kind=Own, grid={"arrive": arrive})
        assert len(digests) == 5
        assert participants(result) == [(4, 0)] * 3

    def test_the_set_is_not_read_for_it_again(self) -> None:
        reads: Counter[int] = Counter()

        class Counting(Rows):
            def __getitem__(self, index: int) -> Any:
                reads[index] += 1
                return super().__getitem__(index)

        run = bare(public_samples=4, distill_epochs=1, public=lambda _: Counting(list(X)))
        run.start(2, kind=Own, fraction_train=0.25)
        # Four clients once for the digest; then two rounds in which one predicts and distils 4 samples, and shows
        # its model the first before.
        assert sum(reads.values()) == 4 * len(X) + 2 * (2 * 4 + 1)


# ---------------------------------------------------------------------- whose set it is


def changed(kind: str) -> Any:
    return {
        "order": lambda: TensorDataset(X.flip(0), Y.flip(0)),
        "transform": lambda: TensorDataset(X * (1 + 1e-6), Y),
        "kind": lambda: TensorDataset(X.double(), Y),
        "fewer": lambda: TensorDataset(X[:-1], Y[:-1]),
        "more": lambda: TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])),
        "samples": lambda: TensorDataset(*watched.samples(98, watched.PUBLIC)),
    }[kind]()


def names_both(text: str, theirs: Any, expected: Any) -> bool:
    numbers = (
        f"{len(theirs)} samples with digest {digest(theirs)[:12]}, expected {len(expected)} with "
        f"{digest(expected)[:12]}"
    )
    return f"its public data is another: {numbers}; samples, order and transforms must be the same" in text


OTHERS = ("order", "transform", "kind", "fewer", "more", "samples")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(X)

    def __len__(self) -> int:
        return len(X)


class TestPublicSet:
    @pytest.mark.parametrize("kind", OTHERS)
    def test_another_set_is_refused_before_any_training(self, kind: str) -> None:
        mine, other = TensorDataset(X, Y), changed(kind)
        run = bare(public=lambda n: other if n == 2 else mine)
        with pytest.raises(HandshakeError) as caught:
            run.start(1, kind=Own)
        assert "3 clients fit, 4 are needed" in str(caught.value)
        assert names_both(str(caught.value), other, mine)
        assert run.grid.passed == []

    def test_the_others_go_on(self, flower_log: list[str]) -> None:
        mine, other = TensorDataset(X, Y), changed("order")
        run = bare(public=lambda n: other if n == 0 else mine)
        result = run.start(2, kind=Own, min_available_nodes=3)
        assert participants(result) == [(3, 0)] * 2
        assert set(run.grid.of(1, "train")) == {1, 2, 3}
        assert any(names_both(line, other, mine) for line in flower_log)

    def test_a_missing_set_is_refused(self) -> None:
        text = r"it has no public data: give its client public_set, or set public-at=server"
        for absent in ({1}, {0}, {0, 1, 2, 3}):
            run = bare(public=lambda n, absent=absent: None if n in absent else TensorDataset(X, Y))
            with pytest.raises(HandshakeError, match=text):
                run.start(1, kind=Own)
            assert run.grid.passed == []

    @pytest.mark.parametrize("absent", [{1, 2, 3}, {0, 1, 2}])
    def test_one_that_has_it_is_not_refused_for_those_who_have_none(self, absent: set[int]) -> None:
        run = bare(public=lambda n: None if n in absent else TensorDataset(X, Y))
        result = run.start(1, kind=Own, min_available_nodes=1)
        assert set(run.grid.of(1, "train")) == set(range(4)) - absent
        assert participants(result) == [(1, 0)]

    @pytest.mark.parametrize(("count", "text"), [(0, "a"), (5, ""), (0, "")])
    def test_half_a_set_is_none(self, count: int, text: str) -> None:
        """Also where all clients say so."""
        node = Node(1, 0, 9, 3, (2,), num_public=count, public_digest=text)
        assert "it has no public data" in (Own().accept_node(node) or "")

    @pytest.mark.parametrize("who", [(0, 1, 2), (1, 2, 3), (3,)])
    def test_the_server_s_own_decides(self, who: tuple[int, ...]) -> None:
        mine, other = TensorDataset(X, Y), changed("transform")
        run = bare(public=lambda n: other if n in who else mine)
        left = 4 - len(who)
        result = run.start(1, kind=Own, min_available_nodes=left, public_set=TensorDataset(X, Y * 0))
        assert set(run.grid.of(1, "train")) == set(range(4)) - set(who)
        assert participants(result) == [(left, 0)]
        with pytest.raises(HandshakeError) as caught:
            run.start(1, kind=Own, public_set=mine)
        assert names_both(str(caught.value), other, mine)

    @pytest.mark.parametrize("most", [{0, 1, 2}, {1, 2, 3}, {0, 3, 1}])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_else_the_majority(self, most: set[int], seed: int) -> None:
        run = bare(public=lambda n: TensorDataset(X, Y) if n in most else changed("order"))
        run.start(1, kind=Own, min_available_nodes=3, grid={"seed": seed})
        assert set(run.grid.of(1, "train")) == most

    def test_of_two_halves_the_first(self) -> None:
        for seed in range(4):
            run = bare(public=lambda n: TensorDataset(X, Y) if n in (0, 3) else changed("order"))
            run.start(1, kind=Own, min_available_nodes=2, grid={"seed": seed})
            assert set(run.grid.of(1, "train")) == {0, 3}

    def test_one_that_comes_later_must_have_it_too(self, flower_log: list[str]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {1, 3} if r < 2 else set()

        mine, other = TensorDataset(X, Y), changed("more")
        run = bare(public=lambda n: other if n == 3 else mine)
        result = run.start(3, kind=Own, min_available_nodes=2, grid={"arrive": arrive})
        assert participants(result) == [(2, 0), (3, 0), (3, 0)]
        assert any(names_both(line, other, mine) for line in flower_log)

    def test_a_client_that_comes_back_with_another_is_refused(self, flower_log: list[str]) -> None:
        sets = {n: TensorDataset(X, Y) for n in range(4)}

        def arrive(grid: Watched, r: int) -> None:
            if r == 2:
                sets[2] = changed("samples")
                grid.restart(2)

        run = bare(public=lambda n: sets[n])
        result = run.start(2, kind=Own, grid={"arrive": arrive})
        assert participants(result) == [(4, 0), (3, 0)]
        assert any("its public data is another" in line for line in flower_log)

    def test_other_classes_are_refused(self) -> None:
        run = bare()
        run.models[1] = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
        with pytest.raises(HandshakeError, match=r"4 classes, expected 3"):
            run.start(1, kind=Own)
        run = bare()
        run.models = [nn.Sequential(nn.Flatten(), nn.Linear(8, 1))] * 4
        run.train = [TensorDataset(each.tensors[0], each.tensors[1] * 0) for each in run.train]
        run.test = [None] * 4
        with pytest.raises(HandshakeError, match=r"1 classes, expected 2"):
            run.start(1, kind=Own)

    @every_precision
    def test_a_message_that_would_be_too_large_is_refused_in_the_handshake(self, precision: str) -> None:
        size = 10 * (8 + 3 * np.dtype(precision).itemsize)
        run = bare(precision=precision)
        text = rf"what it is sent has {size} bytes, max_payload_bytes is {size - 1}; use a smaller public-samples"
        with pytest.raises(HandshakeError, match=text):
            run.start(1, kind=Own, max_payload_bytes=size - 1)
        assert run.grid.passed == []
        result = bare(precision=precision).start(1, kind=Own, max_payload_bytes=size)
        assert participants(result) == [(4, 0)]

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: TensorDataset(X[:0], Y[:0]), r"public_set is empty"),
            (
                lambda: DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 14, 14)),
                r"public_set must not be a loader with a sampler of its own",
            ),
            (lambda: iter(X), r"map-style data set with __len__ and __getitem__ is expected"),
            (lambda: Endless(), r"map-style data set .*got Endless"),
            (lambda: Rows([{"a": x, "b": x} for x in X]), r"which key to use is not clear: name input_key"),
            (lambda: Rows([x.numpy().tolist() for x in X]), r"inputs must be tensors|items must be"),
        ],
    )
    def test_what_is_no_public_set(self, make: Callable[[], Any], text: str) -> None:
        with pytest.raises(DatasetError, match=text):
            Own(public_set=make())

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Rows([torch.zeros(i + 1) for i in range(5)]), r"does not go into batches"),
            (lambda: TensorDataset(torch.tensor([[0.0], [np.nan]])), r"not finite"),
            (
                lambda: DataLoader(TensorDataset(X), collate_fn=lambda rows: (X[:1], 0)),
                r"collate_fn returned",
            ),
        ],
    )
    def test_more_that_is_no_public_set(self, make: Callable[[], Any], text: str) -> None:
        with pytest.raises(DatasetError, match=text):
            Own(public_set=make())

    @pytest.mark.parametrize("who", ["server", "client"])
    def test_a_kind_that_numpy_has_not(self, who: str) -> None:
        text = r"public_set must have inputs of a dtype that numpy has, got torch.bfloat16"
        source = TensorDataset(X.bfloat16())
        with pytest.raises(DatasetError, match=text):
            Own(public_set=source) if who == "server" else lone_client(public=lambda _: source)[
                0
            ].get_properties({})

    def test_the_client_s_set_is_checked_where_it_is_built(self) -> None:
        run = bare(public=lambda _: TensorDataset(X[:0], Y[:0]))
        with pytest.raises(DatasetError, match=r"public_set is empty"):
            run.make(lone_context())


# ---------------------------------------------------------------------- which samples


class TestRows:
    @pytest.mark.parametrize(("asked", "drawn"), [(1, 1), (5, 5), (13, 13), (14, 14), (15, 14), (3000, 14)])
    def test_they_ascend_and_are_unique_and_the_same_for_everyone(self, asked: int, drawn: int) -> None:
        run = bare(public_samples=asked)
        result = run.start(3, kind=Own)
        for r in (1, 2, 3):
            everyone = rows_of(run, r) + rows_of(run, r, "distill")
            assert len(everyone) == 8
            assert all(rows == everyone[0] for rows in everyone)
            assert everyone[0] == sorted(set(everyone[0]))
            assert len(everyone[0]) == drawn
            assert 0 <= everyone[0][0] <= everyone[0][-1] < len(X)
        assert participants(result) == [(4, 0)] * 3

    def test_the_seed_and_the_round_decide(self) -> None:
        drawn = {}
        for seed, fraction in ((0, 1.0), (0, 0.5), (1, 1.0)):
            run = bare(public_samples=7)
            run.start(3, kind=Own, seed=seed, fraction_train=fraction, grid={"seed": seed + int(fraction)})
            drawn[seed, fraction] = [rows_of(run, r)[0] for r in (1, 2, 3)]
        assert drawn[0, 1.0] == drawn[0, 0.5]
        assert all(a != b for a, b in zip(drawn[0, 1.0], drawn[1, 1.0], strict=True))
        assert len({tuple(rows) for rows in drawn[0, 1.0]}) == 3

    def test_a_faulty_round_does_not_move_the_next(self) -> None:
        plain, faulty = bare(), bare()
        plain.start(2, kind=Own)
        faulty.start(2, kind=Own, grid={"faults": {n: Fault("raise", frozenset({1})) for n in range(4)}})
        assert rows_of(plain, 2) == rows_of(faulty, 2)

    def test_each_sample_is_drawn_alike(self) -> None:
        strategy, node = Own(PublicKnowledgeConfig(public_samples=5)), Node(1, 0, 9, 3, (2,))
        node = Node(1, 0, 9, 3, (2,), num_public=20, public_digest="a")
        counts: Counter[int] = Counter()
        for r in range(1, 401):
            (out,) = strategy.configure_phase("train", r, [node], None)
            assert isinstance(out.payload, PublicRows)
            assert out.payload.digest == "a"
            counts.update(out.payload.rows.tolist())
        # 100 each, with a standard deviation of 8.7.
        assert sorted(counts) == list(range(20))
        assert min(counts.values()) > 65
        assert max(counts.values()) < 135

    def test_the_samples_at_the_rows_are_predicted(self) -> None:
        run = bare(public_samples=6, temperature=1.5)
        run.start(1, kind=Own)
        (rows,) = {tuple(rows) for rows in rows_of(run, 1)}
        for n, each in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(each.kept)
            expected = mirror.predict(X[list(rows)].double(), 1.5)
            np.testing.assert_allclose(each.came()["predictions"], expected, atol=1e-6)

    def test_the_digest_travels_with_the_first(self) -> None:
        run = bare()
        run.start(1, kind=Own)
        for each in run.grid.of(1, "train").values():
            assert each.down is not None
            assert PublicRows.from_bytes(each.down).digest == digest(TensorDataset(X))


# ---------------------------------------------------------------------- precisions and broken answers


def garbled(values: Any) -> Callable[[int, str, int, RecordDict], None]:
    def after(r: int, phase: str, n: int, content: RecordDict) -> None:
        if (r, phase, n) == (1, "train", 1):
            record = content.config_records["fitres.metrics"]
            data = record["payload"]
            assert isinstance(data, bytes)
            good = SoftPredictions.from_bytes(data).predictions
            record["payload"] = values(good) if callable(values) else values

    return after


def raw(array: Any) -> bytes:
    """Return what a client sends that does not check."""
    metadata = {"schema": SoftPredictions.schema, "version": "1", "scalars": "{}"}
    return save({"predictions": np.ascontiguousarray(array)}, metadata=metadata)


def spoilt(good: Any, row: Sequence[float]) -> bytes:
    bad = good.copy()
    bad[3] = row
    return raw(bad)


BROKEN: dict[str, Callable[[Any], bytes]] = {
    "one row more": lambda good: raw(np.concatenate([good, good[:1]])),
    "one row fewer": lambda good: raw(good[:-1]),
    "no rows": lambda good: raw(good[:0]),
    "one class more": lambda good: raw(np.concatenate([good, good[:, :1] * 0], axis=1)),
    "one class": lambda good: raw(good[:, :1] * 0 + (255 if good.dtype == np.uint8 else 1)),
    "turned": lambda good: raw(good.T),
    "three axes": lambda good: raw(good[None]),
    "float64": lambda good: raw(good.astype(np.float64)),
    "int16": lambda good: raw(good.astype(np.int16)),
    "zeros": lambda good: spoilt(good, [0, 0, 0]),
    "another message": lambda good: PublicRows(np.arange(len(good)), "a").to_bytes(),
    "text": lambda _: b"no safetensors at all",
    "nothing": lambda _: b"",
    "no header": lambda _: b"\xff" * 64,
}
BROKEN_FLOATS: dict[str, Callable[[Any], bytes]] = {
    "nan": lambda good: spoilt(good, [np.nan, 0.5, 0.5]),
    "infinite": lambda good: spoilt(good, [np.inf, 0, 0]),
    "negative": lambda good: spoilt(good, [1.5, -0.5, 0]),
    "large": lambda good: spoilt(good, [6e4, 0, 0]),
    "twice": lambda good: spoilt(good, [1, 1, 0]),
    "logits": lambda good: spoilt(good, [0.9, 0.8, -0.7]),
}


class TestPrecision:
    @every_precision
    def test_what_travels_has_it(self, precision: str) -> None:
        run = bare(precision=precision)
        result = run.start(2, kind=Turned)
        size, fixed = np.dtype(precision).itemsize, 400
        for each in run.grid.passed:
            if each.phase == "train":
                assert each.came()["predictions"].dtype.name == precision
                assert 10 * 3 * size < len(each.up or b"") < 10 * 3 * size + fixed
                assert 10 * 8 < len(each.down or b"") < 10 * 8 + fixed
            else:
                assert each.sent()["targets"].dtype.name == precision
                assert 10 * (8 + 3 * size) < len(each.down or b"") < 10 * (8 + 3 * size) + fixed
                assert each.up is None
        for r, stats in enumerate(result.rounds, start=1):
            there = [each for each in run.grid.passed if each.server_round == r]
            assert stats.bytes_down == sum(len(each.down or b"") for each in there)
            assert stats.bytes_up == sum(len(each.up or b"") for each in there)

    @every_precision
    def test_many_classes_and_samples_cost_what_they_should(self, precision: str) -> None:
        p = torch.from_numpy(distributions(0, 300, 100, 10.0)).float()
        message = SoftPredictions(pack_predictions(p, precision))
        assert message.nbytes == pytest.approx(300 * 100 * np.dtype(precision).itemsize, rel=0.02)

    @pytest.mark.parametrize(
        ("precision", "kind"),
        [
            *(("float32", kind) for kind in BROKEN),
            *(("float16", kind) for kind in BROKEN_FLOATS),
            *(("uint8", kind) for kind in ("one row more", "one class", "float64", "zeros")),
        ],
    )
    def test_a_broken_answer_is_dropped(self, precision: str, kind: str, flower_log: list[str]) -> None:
        run = bare(precision=precision)
        result = run.start(2, kind=Turned, grid={"after": garbled({**BROKEN, **BROKEN_FLOATS}[kind])})
        assert participants(result) == [(3, 1), (4, 0)]
        assert [line for line in flower_log if "is dropped" in line and "(partition 1)" in line]
        assert set(run.grid.of(1, "distill")) == {0, 2, 3}

    def test_the_others_numbers_are_those_of_a_round_without_it(self) -> None:
        run, other = bare(), bare()
        run.start(1, kind=Turned, grid={"after": garbled(BROKEN_FLOATS["nan"])})
        other.start(1, kind=Turned, grid={"faults": {1: Fault("raise")}})
        for n in (0, 2, 3):
            assert equal(run.grid.of(1, "distill")[n].kept, other.grid.of(1, "distill")[n].kept)

    @every_precision
    @pytest.mark.parametrize("other", PRECISIONS)
    def test_another_precision_than_asked_for(
        self, precision: str, other: str, flower_log: list[str]
    ) -> None:
        def repacked(good: Any) -> bytes:
            return raw(pack_predictions(unpack_predictions(good), other))

        run = bare(precision=precision)
        result = run.start(1, kind=Turned, grid={"after": garbled(repacked)})
        if other == precision:
            assert participants(result) == [(4, 0)]
            return
        assert participants(result) == [(3, 1)]
        text = f"soft predictions came as {other}, asked for was {precision}"
        assert any(text in line for line in flower_log)

    def test_codes_that_do_not_begin_at_255(self, flower_log: list[str]) -> None:
        run = bare(precision="uint8")
        result = run.start(1, kind=Turned, grid={"after": garbled(lambda good: raw(good // 2))})
        assert participants(result) == [(3, 1)]
        assert any("each row's largest code must be 255" in line for line in flower_log)

    def test_arrays_in_an_answer_are_refused(self) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if n == 1:
                content.array_records["fitres.parameters"] = ArrayRecord([np.zeros(3)])

        run = bare()
        result = run.start(2, kind=Turned, grid={"after": after})
        assert participants(result) == [(3, 1)] * 2

    def test_a_payload_after_the_distillation_is_refused(self) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if (phase, n) == ("distill", 1):
                content.config_records["fitres.metrics"]["payload"] = b"x"

        result = bare().start(1, kind=Turned, grid={"after": after})
        assert participants(result) == [(4, 1)]
        assert set(result.rounds[0].clients) == {0, 2, 3}

    @every_precision
    def test_everyone_s_garbage_ends_nothing(self, precision: str) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if phase == "train":
                content.config_records["fitres.metrics"]["payload"] = raw(
                    np.full((10, 3), 2, dtype=precision)
                )

        run = bare(precision=precision)
        result = run.start(3, kind=Turned, grid={"after": after}, max_void_rounds=4)
        assert participants(result) == [(0, 4)] * 3
        assert not run.grid.of(1, "distill")

    def test_hostile_properties_end_nothing(self) -> None:
        class Hostile(PublicKnowledgeClient):
            def properties(self) -> Any:
                found = super().properties()
                if self.context.node_config["partition-id"] == 1:
                    found |= changes
                return found

        for changes in (
            {"num-public-examples": 2**52}, {"num-public-examples": -1}, {"num-public-examples": "many"},
            {"public-digest": "x" * 200}, {"public-digest": 7}, {"public-digest": "a\nb"}, {"public-digest": ""},
            {"num-public-examples": 0}, {"public-digest": "f" * 64},
        ):  # fmt: skip
            run = bare()
            run.client = Hostile
            assert participants(run.start(1, kind=Turned, min_available_nodes=3)) == [(3, 0)], changes
            assert set(run.grid.of(1, "train")) == {0, 2, 3}


# ---------------------------------------------------------------------- distillation


def image_party(name: str = "resnet8", **changes: Any) -> Party:
    shape = (3, 8, 8)
    public = TensorDataset(*watched.samples(99, 12, shape))
    run = bare(public=lambda _: public, local_epochs=1, batch_size=8, distill_learning_rate=0.2, **changes)
    run.models = [build_model(name, input_shape=shape, num_classes=3, seed=n) for n in range(2)]
    run.train = [TensorDataset(*watched.samples(n, 16, shape)) for n in range(2)]
    run.test = [TensorDataset(*watched.samples(50 + n, 6, shape)) for n in range(2)]
    return run


class TestDistillation:
    @pytest.mark.parametrize("name", ["resnet8", "shufflenet"])
    def test_running_statistics_do_not_move(self, name: str) -> None:
        run = image_party(name)
        assert participants(run.start(2, kind=Turned)) == [(2, 0)] * 2
        for r in (1, 2):
            for n, after in run.grid.of(r, "distill").items():
                before = run.grid.of(r, "train")[n].kept
                moved = {key for key, value in after.kept.items() if not np.array_equal(value, before[key])}
                assert len(moved) > 5
                assert not [key for key in moved if "running" in key or "num_batches" in key]
        # In training they do.
        first, second = (run.grid.of(r, "train")[0].kept for r in (1, 2))
        assert any("running_var" in key and not np.array_equal(first[key], second[key]) for key in first)

    def test_a_single_sample_goes_through_batchnorm(self) -> None:
        run = image_party(public_samples=1)
        assert participants(run.start(1, kind=Turned)) == [(2, 0)]

    def test_nothing_is_dropped_out(self) -> None:
        """Predictions and distillation are in eval mode: twice the same, and without holes."""
        run = bare(local_epochs=1)
        run.models = [
            nn.Sequential(nn.Flatten(), nn.Linear(8, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 3))
            for _ in range(4)
        ]
        run.start(1, kind=Turned)
        targets = run.grid.of(1, "distill")
        for n, each in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(each.kept)
            rows = torch.from_numpy(each.sent()["rows"].copy())
            x = X[rows].double()
            np.testing.assert_allclose(each.came()["predictions"], mirror.predict(x, 2.0), atol=1e-6)
            order = run.draw("distill", 1, n, "public-order")
            mirror.distil(
                x, targets[n].sent()["targets"], 4, 1, order, temperature=2.0, weight=1.0, reduction="sum",
                rate=0.05,
            )  # fmt: skip
            for key, value in mirror.weights().items():
                np.testing.assert_allclose(targets[n].kept[key], value, atol=2e-6)

    def test_labels_are_never_looked_at(self) -> None:
        def refuse(*_: Any) -> Any:
            raise AssertionError("a label was looked at")

        names = ("int", "float", "index", "array", "iter", "len", "bool", "add", "eq", "getitem", "getattr")
        label = type("Untouchable", (), {f"__{name}__": refuse for name in names})()

        def collate(items: list[Any]) -> Any:
            return torch.stack([x for (x,) in items]), label

        def public(_: int) -> Any:
            return DataLoader(TensorDataset(X), batch_size=4, collate_fn=collate)

        watched_run, plain = bare(public=public), bare()
        result = watched_run.start(2, kind=Turned, public_set=public(0))
        assert participants(result) == [(4, 0)] * 2
        plain.start(2, kind=Turned)
        assert same_models(watched_run.grid, plain.grid)

    @pytest.mark.parametrize("temperature", [0.25, 1.0, 10.0, 1000.0])
    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_one_s_own_prediction_teaches_nothing(self, temperature: float, reduction: str) -> None:
        run = bare(
            temperature=temperature, reduction=reduction, distill_epochs=3, distill_weight=2.0,
            distill_learning_rate=0.005,
        )  # fmt: skip
        run.start(2, kind=Own)
        for r in (1, 2):
            for n, each in run.grid.of(r, "distill").items():
                for key, value in run.grid.of(r, "train")[n].kept.items():
                    np.testing.assert_allclose(each.kept[key], value, rtol=0, atol=2e-6)

    def test_nor_does_it_where_there_is_batchnorm(self) -> None:
        run = image_party()
        run.start(1, kind=Own)
        for n, each in run.grid.of(1, "distill").items():
            for key, value in run.grid.of(1, "train")[n].kept.items():
                np.testing.assert_allclose(each.kept[key], value, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("changes", [{"distill_epochs": 0}, {"distill_weight": 0.0}])
    def test_without_steps_or_weight_the_model_stays(self, changes: dict[str, Any]) -> None:
        run = bare(**changes)
        result = run.start(2, kind=Turned)
        for r in (1, 2):
            for n, each in run.grid.of(r, "distill").items():
                assert equal(each.kept, run.grid.of(r, "train")[n].kept)
        assert all(set(each.clients) == {0, 1, 2, 3} for each in result.rounds)

    def test_the_sum_is_as_many_means_as_a_batch_has_samples(self) -> None:
        """Batches of 4, two of them: the sum at η₂ is the mean at 4 η₂."""
        values = {"public_samples": 8, "public_batch_size": 4}
        runs = [
            bare(reduction=reduction, distill_learning_rate=rate, **values)
            for reduction, rate in (("sum", 0.02), ("mean", 0.08), ("mean", 0.02))
        ]
        for run in runs:
            run.start(1, kind=Turned)
        models = [run.grid.of(1, "distill") for run in runs]
        for n in range(4):
            for key, value in models[0][n].kept.items():
                np.testing.assert_allclose(models[1][n].kept[key], value, atol=1e-6)
            assert any(
                np.abs(models[2][n].kept[key] - value).max() > 1e-4
                for key, value in models[0][n].kept.items()
                if key.endswith("weight")
            )

    def test_more_steps_lead_nearer(self) -> None:
        distances = []
        for epochs in (0, 1, 5, 30):
            run = bare(distill_epochs=epochs, temperature=1.0)
            run.start(1, kind=Turned)
            total = 0.0
            for n, each in run.grid.of(1, "distill").items():
                mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
                mirror.take(each.kept)
                x = X[torch.from_numpy(each.sent()["rows"].copy())].double()
                with torch.no_grad():
                    z = mirror.model.eval()(x)
                total += float(transfer.divergence(torch.from_numpy(each.sent()["targets"].copy()), z, 1.0))
            distances.append(total)
        assert sorted(distances, reverse=True) == distances

    def test_optimizers(self) -> None:
        """Adam's steps are not SGD's, in both phases; each phase begins with a new one."""
        runs = [
            bare(optimizer=name, learning_rate=0.01, distill_learning_rate=0.01) for name in ("adam", "sgd")
        ]
        for run in runs:
            run.start(2, kind=Turned)
        assert not same_models(runs[0].grid, runs[1].grid)
        # A first step of Adam is the learning rate in each direction: R = 1 and one batch.
        run = bare(
            optimizer="adam",
            distill_learning_rate=0.01,
            public_batch_size=99,
            temperature=1.0,
            local_epochs=1,
        )
        run.start(1, kind=Turned)
        for n, each in run.grid.of(1, "distill").items():
            before = run.grid.of(1, "train")[n].kept
            names = [key for key in before if key.endswith((".weight", ".bias"))]
            steps = np.concatenate([np.ravel(each.kept[key] - before[key]) for key in names])
            assert np.abs(steps).max() == pytest.approx(0.01, rel=1e-3)
            assert np.median(np.abs(steps)) == pytest.approx(0.01, rel=1e-2)


class Breaking(PublicKnowledgeClient):
    """Partition 1 leads its weights beyond all numbers, in the distillation of round 1."""

    def distil(self, task: Any, *args: Any) -> None:
        super().distil(task, *args)
        if (task.server_round, self.context.node_config["partition-id"]) == (1, 1):
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(value)


value = float("inf")


class TestFailures:
    @pytest.mark.parametrize("number", [float("inf"), float("nan")])
    def test_one_whose_distillation_diverges(
        self, number: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(globals(), "value", number)
        for folders in (None, [{"state-dir": str(tmp_path / str(n))} for n in range(4)]):
            run = bare()
            run.client = Breaking
            result = run.start(2, kind=Turned, grid={"node_configs": folders})
            failed = run.grid.of(1, "distill")[1]
            assert "FloatingPointError" in failed.error
            assert "the weights are no longer finite: try a smaller distill-learning-rate" in failed.error
            assert participants(result) == [(4, 1), (4, 0)]
            assert set(result.rounds[0].clients) == {0, 2, 3}
            assert set(result.rounds[1].clients) == {0, 1, 2, 3}
            # It goes on from the model of before.
            if folders is None:
                assert equal(failed.kept, run.grid.of(1, "train")[1].kept)
            mirror = transfer.Mirror(run.models[1], run.train[1], run.test[1])
            for r in (1, 2):
                order = run.draw("train", r, 1, "order")
                mirror.train(mirror.x, mirror.y, 8, 2, order, rate=0.1)
            x = X[rows_of(run, 2)[0]].double()
            expected = mirror.predict(x, 2.0)
            np.testing.assert_allclose(run.grid.of(2, "train")[1].came()["predictions"], expected, atol=1e-6)

    @pytest.mark.parametrize(("rate", "epochs"), [(1e37, 5), (3e38, 1)])
    def test_everyone_s_diverges(self, rate: float, epochs: int) -> None:
        run = bare(distill_learning_rate=rate, distill_epochs=epochs, temperature=0.1)
        result = run.start(3, kind=Turned)
        failed = [each for each in run.grid.passed if each.error]
        assert len(failed) >= 6
        assert all(each.phase == "distill" and "FloatingPointError" in each.error for each in failed)
        for each in failed:
            assert equal(each.kept, run.grid.of(each.server_round, "train")[each.partition].kept)
        assert [each.participants for each in result.rounds] == [4] * 3

    def test_the_learning_rate_that_is_to_blame_is_named(self) -> None:
        run = bare(distill_learning_rate=1e37, distill_epochs=5, temperature=0.1)
        run.start(1, kind=Turned)
        failed = [each.error for each in run.grid.passed if each.error]
        assert failed
        assert all("distill-learning-rate" in each for each in failed)

    def test_a_training_that_diverges_leaves_the_model_of_before_in_its_folder(self, tmp_path: Path) -> None:
        """As Flower does with ``context.state``, which it takes from calls that return."""

        class Leaping(PublicKnowledgeClient):
            def train(self, task: Any, *args: Any, **kwargs: Any) -> float:
                loss = super().train(task, *args, **kwargs)
                if (task.server_round, self.context.node_config["partition-id"]) == (2, 1):
                    with torch.no_grad():
                        next(iter(self.model.parameters())).fill_(float("nan"))
                return loss

        run = bare()
        run.client = Leaping
        folders = [{"state-dir": str(tmp_path / str(n))} for n in range(4)]
        result = run.start(3, kind=Turned, grid={"node_configs": folders})
        assert participants(result) == [(4, 0), (3, 1), (4, 0)]

    def test_a_client_that_lost_its_state_between_the_phases_says_so(self) -> None:
        def before(r: int, phase: str, context: Context) -> None:
            if (r, phase, context.node_config["partition-id"]) == (1, "distill", 2):
                context.state = RecordDict()

        run = bare()
        result = run.start(2, kind=Turned, grid={"before": before})
        failed = [each for each in run.grid.passed if each.error]
        assert [(each.server_round, each.phase, each.partition) for each in failed] == [(1, "distill", 2)]
        text = "no model of this round's training is kept here: it was lost, or never trained"
        assert text in failed[0].error
        assert StateError.__name__ in failed[0].error
        assert participants(result) == [(4, 1), (4, 0)]

    def test_no_state_no_matter_which_answer_is_lost(self) -> None:
        faults = {0: Fault("silent", frozenset({1})), 1: Fault("late", frozenset({1}))}
        result = bare().start(2, kind=Turned, grid={"faults": faults}, timeout=0.2)
        assert [each.participants for each in result.rounds] == [2, 4]

    def test_targets_must_be_made_by_the_method(self) -> None:
        with pytest.raises(NotImplementedError):
            bare().start(1, kind=PublicKnowledgeStrategy)


def lone_context(partition: int = 0) -> Context:
    return Context(
        run_id=1, node_id=1, node_config={"partition-id": partition}, state=RecordDict(), run_config={}
    )


def lone_client(context: Context | None = None, **changes: Any) -> tuple[Any, dict[str, Any]]:
    run = bare(**changes)
    config = PublicKnowledgeConfig(**run.config)
    return run.make(context or lone_context()), config.to_wire()


class TestClient:
    MINE = digest(TensorDataset(X))

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (PublicRows(np.array([0, 14]), MINE), r"rows must be within 0..13, got 14"),
            (
                PublicRows(np.array([0]), "0" * 64),
                rf"this client's public data is another: digest {MINE[:12]}, the server's is 000000000000",
            ),
            (PublicRows(np.array([0]), ""), r"public data is another"),
            (None, r"phase 'train' came without its payload"),
            (PublicSamples(X.numpy()), r"public.rows: expected this message, got 'public.samples'"),
            (
                PublicRowsTargets(np.array([0]), np.eye(3, dtype=np.float32)[:1]),
                r"expected this message, got 'public.rows-targets'",
            ),
        ],
    )
    def test_what_a_server_must_not_ask(self, message: Payload | None, text: str) -> None:
        client, config = lone_client()
        payload = {} if message is None else {"payload": message.to_bytes()}
        with pytest.raises(PayloadError, match=text):
            client.fit([], {**config, "phase": "train", **payload})
        assert kept_model(client.context) == {}

    @pytest.mark.parametrize(
        ("targets", "text"),
        [
            (np.eye(4, dtype=np.float32)[:2], r"'targets' has shape \[2, 4\], expected \[K=2, C=3\]"),
            (np.full((2, 3), np.nan, dtype=np.float32), r"not finite"),
        ],
    )
    def test_targets_it_cannot_learn(self, targets: Any, text: str) -> None:
        client, config = lone_client()
        data = save(
            {"rows": np.array([0b11], dtype=np.uint8), "targets": targets},
            metadata={"schema": PublicRowsTargets.schema, "version": str(PublicRowsTargets.version)},
        )  # fmt: skip
        with pytest.raises(PayloadError, match=text):
            client.fit([], {**config, "phase": "distill", "payload": data})

    def test_distilling_comes_after_training(self) -> None:
        client, config = lone_client()
        message = PublicRowsTargets(np.array([0, 1]), np.eye(3, dtype=np.float32)[:2])
        with pytest.raises(StateError, match=r"no model of this round's training"):
            client.fit([], {**config, "phase": "distill", "payload": message.to_bytes()})

    def test_a_client_without_the_set(self) -> None:
        client, config = lone_client(public=lambda _: None)
        assert "public-digest" not in client.get_properties({})
        assert "num-public-examples" not in client.get_properties({})
        payload = PublicRows(np.array([0]), self.MINE).to_bytes()
        with pytest.raises(PayloadError, match=r"names public samples, but this client has no public_set"):
            client.fit([], {**config, "phase": "train", "payload": payload})

    def test_what_it_says_of_its_set(self) -> None:
        client, _ = lone_client()
        found = client.get_properties({})
        assert (found["num-public-examples"], found["public-digest"]) == (14, self.MINE)

    @pytest.mark.parametrize("phase", ["clients", "server"])
    def test_samples_that_its_model_does_not_take(self, phase: str) -> None:
        """Said before any training, and not by a stack of torch's."""
        x = torch.zeros(5, 1, 3, 3)
        client, config = lone_client(public=lambda _: TensorDataset(x), public_at=phase)
        rows = PublicRows(np.arange(2), digest(TensorDataset(x)))
        message = rows if phase == "clients" else PublicSamples(x[:2].numpy())
        client.train = lambda *_: pytest.fail("it was trained")
        text = r"model does not take public data of shape \[1, 3, 3\]: "
        with pytest.raises(ConfigError, match=text):
            client.fit([], {**config, "phase": "train", "payload": message.to_bytes()})
        assert kept_model(client.context) == {}

    def test_predictions_are_made_in_eval_mode(self) -> None:
        client, config = lone_client(lone_context(2))  # the net with BatchNorm
        rows, values = torch.arange(14), PublicKnowledgeConfig.from_wire(config)
        before = {name: value.clone() for name, value in client.model.state_dict().items()}
        expected = client.predict(client.public_batches, rows, values)
        client.model.train()
        assert torch.equal(client.predict(client.public_batches, rows, values), expected)
        assert not client.model.training
        assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())

    def test_what_is_sent_is_not_changed(self) -> None:
        """Arrays of a payload cannot be written to; a client that tried would fail."""
        client, config = lone_client()
        payload = PublicRows(np.arange(14), self.MINE).to_bytes()
        first = client.fit([], {**config, "phase": "train", "payload": payload})
        assert first[0] == []
        assert first[1] == 17
        predictions = SoftPredictions.from_bytes(first[2]["payload"]).predictions
        message = PublicRowsTargets(np.arange(14), predictions)
        second = client.fit([], {**config, "phase": "distill", "payload": message.to_bytes()})
        assert second[0] == []
        assert set(second[2]) == {"local-accuracy"}


# ---------------------------------------------------------------------- samples from the server


class TestServerData:
    @every_precision
    def test_the_same_numbers_as_with_the_clients_own(self, precision: str) -> None:
        values = {"precision": precision, "distill_epochs": 2}
        own, sent = bare(**values), bare(public_at="server", **values)
        sent.public = None
        first = own.start(3, kind=Turned)
        second = sent.start(3, kind=Turned, public_set=TensorDataset(X, Y))
        assert same_models(own.grid, sent.grid)
        assert [r.clients for r in first.rounds] == [r.clients for r in second.rounds]
        for r in (1, 2, 3):
            for n in range(4):
                a, b = (run.grid.of(r, "train")[n].came() for run in (own, sent))
                assert equal(a, b)

    def test_samples_travel_in_both_phases(self) -> None:
        own, run = bare(), bare(public_at="server")
        run.public = None
        own.start(2, kind=Turned)
        result = run.start(2, kind=Turned, public_set=TensorDataset(X, Y))
        for r in (1, 2):
            rows = rows_of(own, r)[0]
            for phase, kind in (("train", PublicSamples), ("distill", PublicSamplesTargets)):
                for each in run.grid.of(r, phase).values():
                    assert each.down is not None
                    message = kind.from_bytes(each.down)
                    np.testing.assert_array_equal(message.samples, X[rows])  # type: ignore[attr-defined]
                    assert "rows" not in each.sent()
        size = 10 * 8 * 4
        for stats in result.rounds:
            assert 4 * (2 * size + 120) < stats.bytes_down < 4 * (2 * size + 120) + 4 * 2 * 400

    def test_what_clients_have_does_not_matter(self) -> None:
        run, plain = bare(public_at="server"), bare(public_at="server")
        run.public = lambda n: [None, changed("order"), changed("fewer"), TensorDataset(X, Y)][n]
        plain.public = None
        assert participants(run.start(2, kind=Turned, public_set=TensorDataset(X))) == [(4, 0)] * 2
        plain.start(2, kind=Turned, public_set=TensorDataset(X))
        assert same_models(run.grid, plain.grid)

    def test_it_needs_them(self) -> None:
        with pytest.raises(ConfigError, match=r"public-at=server needs public_set, got none"):
            Own(PublicKnowledgeConfig(public_at="server"))

    @pytest.mark.parametrize("kind", [torch.uint8, torch.float16, torch.float64, torch.int64, torch.bool])
    def test_other_kinds_of_samples(self, kind: torch.dtype) -> None:
        class Floats(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.flatten(1).float()

        x = (X * 2).to(kind)
        run = bare(public_at="server")
        run.public, run.models = None, [nn.Sequential(Floats(), nn.Linear(8, 3)) for _ in range(4)]
        result = run.start(1, kind=Turned, public_set=TensorDataset(x))
        assert participants(result) == [(4, 0)]
        sent = run.grid.of(1, "train")[0].sent()["samples"]
        assert sent.dtype == x.numpy().dtype
        assert sent.shape == (10, 1, 2, 4)

    def test_dicts_at_the_server(self) -> None:
        items = [{"picture": x, "name": "cat", "number": 3} for x in X]
        run, plain = (bare(public_at="server") for _ in range(2))
        run.public = plain.public = None
        run.start(1, kind=Turned, public_set=Rows(items), input_key="picture")
        plain.start(1, kind=Turned, public_set=TensorDataset(X))
        assert same_models(run.grid, plain.grid)
        with pytest.raises(DatasetError, match=r"input_key 'photo' is not among the item's keys"):
            Own(public_set=Rows(items), input_key="photo")

    def test_samples_that_fit_only_without_targets_are_refused_before_training(self) -> None:
        run = bare(public_at="server")
        run.public = None
        with pytest.raises((HandshakeError, ConfigError), match=r"max_payload_bytes"):
            run.start(1, kind=Turned, public_set=TensorDataset(X), max_payload_bytes=10 * 8 * 4 + 60)

    def test_a_sample_that_is_no_number_is_found_at_once(self) -> None:
        x = X.clone()
        x[3] = float("nan")
        with pytest.raises(DatasetError, match=r"not finite"):
            bare(public_at="server").start(4, kind=Turned, public_set=TensorDataset(x))


# ---------------------------------------------------------------------- other forms of data


class TestForms:
    @pytest.mark.parametrize("kind", ["items", "inputs", "tensors", "array", "loader", "dicts", "named"])
    def test_they_give_the_same_numbers(self, kind: str) -> None:
        source: Any = {
            "items": Rows([(x, "cat") for x in X]),
            "inputs": Rows(list(X)),
            "tensors": TensorDataset(X),
            "array": ArrayDataset(X, Y),
            "loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
            "dicts": Rows([{"image": x, "label": 7} for x in X]),
            "named": Rows([{"picture": x, "id": i} for i, x in enumerate(X)]),
        }[kind]
        plain, run = bare(), bare(public=lambda _: source)
        if kind == "named":
            run.client_options = {"input_key": "picture"}
        plain.start(2, kind=Turned)
        result = run.start(2, kind=Turned)
        assert participants(result) == [(4, 0)] * 2
        assert same_models(run.grid, plain.grid)

    def test_they_are_the_same_set(self) -> None:
        sources = [
            Rows([{"image": x} for x in X]),
            DataLoader(TensorDataset(X), batch_size=5),
            Rows(list(X)),
            None,
        ]
        run = bare(public=lambda n: sources[n] or TensorDataset(X, Y))
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]

    def test_the_key_is_that_of_the_training_data(self) -> None:
        run = bare(public=lambda _: Rows([{"a": x, "b": x * 0} for x in X]))
        for sets in (run.train, run.test):
            for n, each in enumerate(sets):
                x, y = each.tensors
                sets[n] = Rows([{"a": x[i], "b": x[i] * 0, "label": int(y[i])} for i in range(len(y))])
        run.client_options = {"input_key": "a"}
        plain = bare()
        plain.start(1, kind=Turned)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert same_models(run.grid, plain.grid)

    def test_a_key_of_its_own(self) -> None:
        run = bare(public=lambda _: Rows([{"a": x * 0, "picture": x} for x in X]))
        for sets in (run.train, run.test):
            for n, each in enumerate(sets):
                x, y = each.tensors
                sets[n] = Rows([{"a": x[i], "picture": x[i] * 0, "label": int(y[i])} for i in range(len(y))])
        run.client_options = {"input_key": "a", "public_input_key": "picture"}
        plain = bare()
        plain.start(1, kind=Turned)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert same_models(run.grid, plain.grid)

    def test_a_loader_that_drops_its_last_batch(self) -> None:
        """It does so in the distillation; everything is predicted."""
        source = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
        run = bare(public=lambda _: source)
        assert participants(run.start(1, kind=Turned)) == [(4, 0)]
        assert run.grid.of(1, "train")[0].came()["predictions"].shape == (10, 3)


# ---------------------------------------------------------------------- accuracy and hyper-parameters


class TestAccuracy:
    def test_it_is_of_the_distilled_model_on_the_client_s_own_test_split(self) -> None:
        run = bare(distill_learning_rate=2.0, distill_epochs=3)
        result = run.start(2, kind=Turned)
        differ = 0
        for r, stats in enumerate(result.rounds, start=1):
            found = {}
            for n in range(4):
                mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
                mirror.take(run.grid.of(r, "train")[n].kept)
                before = mirror.accuracy()
                mirror.take(run.grid.of(r, "distill")[n].kept)
                found[n] = {"local-accuracy": mirror.accuracy()}
                differ += before != mirror.accuracy()
            assert stats.clients == found
            assert stats.train_loss is not None
            assert stats.global_accuracy is None
        assert differ >= 3

    def test_top_5_of_many_classes(self) -> None:
        run = bare()
        run.models = [nn.Sequential(nn.Flatten(), nn.Linear(8, 7)) for _ in range(4)]
        result = run.start(1, kind=Turned)
        assert result.rounds[0].local_top5 is not None
        assert result.rounds[0].local_top5 >= (result.rounds[0].local_accuracy or 0)


class TestConfig:
    def test_the_paper_s_values(self) -> None:
        """Appendix B.2."""
        config = PublicKnowledgeConfig()
        assert (config.temperature, config.distill_weight, config.distill_epochs) == (10, 1, 1)
        assert (config.batch_size, config.public_batch_size, config.public_samples) == (128, 256, 3000)
        assert (config.local_epochs, config.learning_rate, config.distill_learning_rate) == (20, 0.01, 0.01)
        assert (config.optimizer, config.momentum, config.weight_decay, config.lr_decay) == ("sgd", 0, 0, 1)
        assert (config.public_at, config.precision, config.reduction) == ("clients", "float32", "sum")

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"public_at": "cloud"}, r"public-at must be one of clients, server, got 'cloud'"),
            ({"public_samples": 0}, r"public-samples must be >= 1, got 0"),
            ({"public_batch_size": 0}, r"public-batch-size must be >= 1"),
            ({"temperature": 0.0}, r"temperature must be > 0, got 0.0"),
            ({"temperature": float("inf")}, r"temperature must be finite"),
            ({"distill_epochs": -1}, r"distill-epochs must be >= 0, got -1"),
            ({"distill_learning_rate": 0.0}, r"distill-learning-rate must be > 0, got 0.0"),
            ({"distill_weight": -1.0}, r"distill-weight must be >= 0, got -1.0"),
            ({"reduction": "median"}, r"reduction must be one of sum, mean, got 'median'"),
            ({"precision": "int8"}, r"precision must be one of float32, float16, uint8, got 'int8'"),
            ({"local_epochs": 0}, r"local-epochs must be >= 1, got 0"),
        ],
    )
    def test_what_is_out_of_range(self, changes: Mapping[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            PublicKnowledgeConfig(**changes)

    def test_they_reach_the_clients(self) -> None:
        run = bare(temperature=3.0, precision="float16", public_samples=4)
        run.start(1, kind=Turned)
        for n, each in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(each.kept)
            x = X[rows_of(run, 1)[0]].double()
            np.testing.assert_allclose(each.came()["predictions"], mirror.predict(x, 3.0), atol=1e-3)
