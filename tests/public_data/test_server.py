"""The server's public data: whose set is used, which samples are drawn, precisions, and samples that it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import ArrayRecord, RecordDict
from items import Items
from public_rounds import (
    Own,
    Turned,
    X,
    Y,
    bare,
    digest,
    distributions,
    every_precision,
    lone_client,
    lone_context,
    participants,
    rows_of,
)
from safetensors.numpy import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from watched import Watched, equal, same_models

from flwr_kd.checks import ConfigError
from flwr_kd.learning.batches import DatasetError
from flwr_kd.public_data.client import PublicKnowledgeClient
from flwr_kd.public_data.config import PRECISIONS, PublicKnowledgeConfig
from flwr_kd.public_data.messages import (
    PublicRows,
    PublicSamples,
    PublicSamplesTargets,
    SoftPredictions,
    pack_predictions,
    unpack_predictions,
)
from flwr_kd.server.records import HandshakeError, Node
from flwr_kd.testing.faults import Fault


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
    return f"its public data differs: {numbers}; samples, order and transforms must be the same" in text


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

    def test_of_two_halves_none(self) -> None:
        mine, other = TensorDataset(X, Y), changed("order")
        run = bare(public=lambda n: mine if n in (0, 3) else other)
        with pytest.raises(HandshakeError, match="none are in the majority") as caught:
            run.start(1, kind=Own, min_available_nodes=2)
        assert all(f"digest {digest(public)[:12]}" in str(caught.value) for public in (mine, other))

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
        assert any("its public data differs" in line for line in flower_log)

    def test_other_classes_are_refused(self) -> None:
        run = bare()
        run.models[1] = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
        with pytest.raises(HandshakeError, match=r"4 classes, expected 3"):
            run.start(1, kind=Own)
        run = bare()
        run.models = [nn.Sequential(nn.Flatten(), nn.Linear(8, 1))] * 4
        run.train = [TensorDataset(part.tensors[0], part.tensors[1] * 0) for part in run.train]
        run.test = [None] * 4
        with pytest.raises(HandshakeError, match="model has one output"):
            run.start(1, kind=Own)

    @every_precision
    def test_a_message_that_would_be_too_large_is_refused_in_the_handshake(self, precision: str) -> None:
        size = 10 * (8 + 3 * np.dtype(precision).itemsize)
        run = bare(precision=precision)
        text = (
            rf"its messages have {size} bytes, max_payload_bytes is {size - 1}; use a smaller public-samples"
        )
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
                r"public_set must not be a loader whose sampler has no fixed rows",
            ),
            (lambda: iter(X), r"map-style data set with __len__ and __getitem__ is expected"),
            (lambda: Endless(), r"map-style data set .*got Endless"),
            (lambda: Items([{"a": x, "b": x} for x in X]), r"which key to use is not clear: name input_key"),
            (lambda: Items([x.numpy().tolist() for x in X]), r"inputs must be tensors|items must be"),
        ],
    )
    def test_what_is_no_public_set(self, make: Callable[[], Any], text: str) -> None:
        with pytest.raises(DatasetError, match=text):
            Own(public_set=make())

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Items([torch.zeros(i + 1) for i in range(5)]), r"does not go into batches"),
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
        for n, call in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(call.kept)
            expected = mirror.predict(X[list(rows)].double(), 1.5)
            np.testing.assert_allclose(call.came()["predictions"], expected, atol=1e-6)

    def test_the_digest_travels_with_the_first(self) -> None:
        run = bare()
        run.start(1, kind=Own)
        for call in run.grid.of(1, "train").values():
            assert call.down is not None
            assert PublicRows.from_bytes(call.down).digest == digest(TensorDataset(X))


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
        for call in run.grid.passed:
            if call.phase == "train":
                assert call.came()["predictions"].dtype.name == precision
                assert 10 * 3 * size < len(call.up or b"") < 10 * 3 * size + fixed
                assert 10 * 8 < len(call.down or b"") < 10 * 8 + fixed
            else:
                assert call.sent()["targets"].dtype.name == precision
                assert 10 * (8 + 3 * size) < len(call.down or b"") < 10 * (8 + 3 * size) + fixed
                assert call.up is None
        for r, stats in enumerate(result.rounds, start=1):
            there = [call for call in run.grid.passed if call.server_round == r]
            assert stats.bytes_down == sum(len(node.down or b"") for node in there)
            assert stats.bytes_up == sum(len(node.up or b"") for node in there)

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
        text = f"soft predictions have dtype {other}, expected {precision}"
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
        # Its model of the training is measured after the last round.
        assert (set(result.rounds[0].clients), result.rounds[0].stored) == ({0, 1, 2, 3}, [1])

    @every_precision
    def test_everyone_s_garbage_ends_nothing(self, precision: str) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if phase == "train":
                content.config_records["fitres.metrics"]["payload"] = raw(
                    np.full((10, 3), 2, dtype=precision)
                )

        run = bare(precision=precision)
        result = watched.void(lambda: run.start(3, kind=Turned, grid={"after": after}, max_void_rounds=4))
        assert participants(result) == [(0, 4)] * 3
        assert not run.grid.of(1, "distill")

    def test_hostile_properties_end_nothing(self) -> None:
        class Hostile(PublicKnowledgeClient):
            def properties(self) -> Any:
                actual = super().properties()
                if self.context.node_config["partition-id"] == 1:
                    actual |= changes
                return actual

        for changes in (
            {"num-public-examples": 2**52}, {"num-public-examples": -1}, {"num-public-examples": "many"},
            {"public-digest": "x" * 200}, {"public-digest": 7}, {"public-digest": "a\nb"}, {"public-digest": ""},
            {"num-public-examples": 0}, {"public-digest": "f" * 64},
        ):  # fmt: skip
            run = bare()
            run.client = Hostile
            assert participants(run.start(1, kind=Turned, min_available_nodes=3)) == [(3, 0)], changes
            assert set(run.grid.of(1, "train")) == {0, 2, 3}


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
                for call in run.grid.of(r, phase).values():
                    assert call.down is not None
                    message = kind.from_bytes(call.down)
                    np.testing.assert_array_equal(message.samples, X[rows])  # type: ignore[attr-defined]
                    assert "rows" not in call.sent()
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
        run.start(1, kind=Turned, public_set=Items(items), input_key="picture")
        plain.start(1, kind=Turned, public_set=TensorDataset(X))
        assert same_models(run.grid, plain.grid)
        with pytest.raises(DatasetError, match=r"input_key 'photo' is not among the item's keys"):
            Own(public_set=Items(items), input_key="photo")

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
