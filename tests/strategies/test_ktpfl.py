"""KT-pFL at work: whole rounds against an oracle, who is there, what is kept, models instead of predictions."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coefficients
import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import Array, ArrayRecord, Context, RecordDict
from torch import nn
from watched import Party, Watched, equal, kept_model, party, same_models

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.ktpfl import (
    CoefficientMatrix,
    KTpFL,
    KTpFLClient,
    KTpFLConfig,
    KTpFLWeights,
    KTpFLWeightsClient,
    KTpFLWeightsConfig,
)
from flwr_kd.testing.faults import Fault

HETEROGENEOUS = ("ktpfl", "sim-pfl", "topk-pfl")
FAST: dict[str, Any] = {"coefficient_learning_rate": 0.3, "rho": 0.4}


def initial(run: Party, model: nn.Module | None = None) -> ArrayRecord:
    return ArrayRecord((model or run.models[0]).state_dict())


def weights_party(**config: Any) -> Party:
    return party("ktpfl-weights", **{"alike": True, **config})


def matrix_of(state: dict[str, Any]) -> dict[int, dict[int, float]]:
    clients = state["clients"].tolist()
    rows = state["coefficients"].tolist()
    return {n: dict(zip(clients, row, strict=True)) for n, row in zip(clients, rows, strict=True)}


def check_predictions(run: Party, precision: str = "float32", roster: Sequence[int] = range(4)) -> None:
    """Go through a run once more; after each round the matrix must be the oracle's."""
    oracle = transfer.Matrix(roster)

    def server(r: int, keys: list[int], s: Any, counts: list[int]) -> Any:
        targets = oracle.learn(keys, s, counts, run.strategy.config)
        state = run.matrices[r - 1]
        assert state["clients"].tolist() == oracle.clients
        np.testing.assert_allclose(state["coefficients"], oracle.c, rtol=0, atol=1e-6)
        return targets

    transfer.replay(run, run.draw, server, precision)


def check_models(run: Party, initial_weights: dict[str, Any]) -> None:
    """The same for models: what is sent, what comes, the matrix, the models that are kept, and accuracies."""
    config, grid = run.strategy.config, run.grid
    mirrors = [transfer.Mirror(*each) for each in zip(run.models, run.train, run.test, strict=True)]
    sgd = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    oracle, started = transfer.Matrix(range(len(mirrors))), set()
    for r, stats in enumerate(run.strategy_rounds, start=1):
        trained, distilled = grid.of(r, "train"), grid.of(r, "distill")
        keys, decay = sorted(trained), config.lr_decay ** ((r - 1) // config.lr_decay_every)
        for n in keys:
            assert bool(trained[n].down_arrays) == (n not in started)
            if n not in started:
                mirrors[n].take(initial_weights)
            started.add(n)
            order = run.draw("train", r, n, "order")
            mirror = mirrors[n]
            mirror.train(
                mirror.x, mirror.y, config.batch_size, config.local_epochs, order,
                rate=config.learning_rate * decay, **sgd,
            )  # fmt: skip
            same(trained[n].up_arrays, list(mirror.weights().values()))
        models = [list(mirrors[n].weights().values()) for n in keys]
        made = oracle.learn_models(keys, models, [len(mirrors[n].x) for n in keys], config)
        state = run.matrices[r - 1]
        np.testing.assert_allclose(state["coefficients"], oracle.c, rtol=0, atol=1e-6)
        scale = 1.0 if config.reduction == "sum" else 1 / len(coefficients.flat(models[0]))
        rate = config.distill_learning_rate * decay * config.distill_weight
        for n, own, goal in zip(keys, models, made, strict=True):
            same(distilled[n].down_arrays, goal)
            names = list(mirrors[n].weights())
            same([state[f"models/{n}/{name}"] for name in names], goal)
            found = coefficients.transferred(own, goal, rate, config.distill_steps, scale)
            mirrors[n].take(dict(zip(names, found, strict=True)))
            same([distilled[n].kept[name] for name in names], found)
            assert distilled[n].metrics == {"local-accuracy": mirrors[n].accuracy()}
        assert stats.clients == {n: {"local-accuracy": mirrors[n].accuracy()} for n in keys}


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_the_oracle_s_own_cases() -> None:
    results = doctest.testmod(transfer)
    assert results.attempted >= 11
    assert results.failed == 0


# ---------------------------------------------------------------------- whole rounds


class TestRounds:
    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_three_rounds_of_unlike_models(self, name: str) -> None:
        extra = FAST if name == "ktpfl" else {}
        run = party(name, **extra, **({"top_k": 2} if name == "topk-pfl" else {}))
        run.start(3)
        check_predictions(run)
        final = run.matrices[-1]["coefficients"]
        assert np.abs(final - 0.25).max() > 0.01
        np.testing.assert_allclose(final.sum(axis=1), 1, atol=1e-12)
        if name == "topk-pfl":
            assert ((final > 0).sum(axis=1) == 2).all()

    @pytest.mark.parametrize(
        "changes",
        [
            {"normalize": "softmax"},
            {"normalize": "none", "coefficient_learning_rate": 1.0, "rho": 0.0, "reduction": "mean"},
            {"normalize": "none", "coefficient_learning_rate": 0.1, "reduction": "mean"},
            {"reduction": "mean", "coefficient_learning_rate": 0.8},
            {"distill_weight": 3.0, "temperature": 1.0},
            {"rho": 0.0, "coefficient_learning_rate": 2.0},
            {
                "lr_decay": 0.5,
                "lr_decay_every": 2,
                "momentum": 0.6,
                "weight_decay": 0.02,
                "distill_epochs": 2,
            },
            {"public_samples": 9, "public_batch_size": 4, "batch_size": 16},  # 4 and 5; 17 together
            {"public_samples": 100, "public_batch_size": 64, "temperature": 20.0},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_hyper_parameters(self, changes: dict[str, Any]) -> None:
        run = party("ktpfl", **{**FAST, **changes})
        run.start(3)
        check_predictions(run)

    @pytest.mark.parametrize("precision", ["float16", "uint8"])
    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_rounded_predictions(self, name: str, precision: str) -> None:
        run = party(name, precision=precision, **(FAST if name == "ktpfl" else {"top_k": 3}))
        run.start(2)
        check_predictions(run, precision)

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_half_of_the_clients(self, name: str, seed: int) -> None:
        run = party(name, clients=6, **(FAST if name == "ktpfl" else {"top_k": 2}))
        run.start(4, fraction_train=0.5, seed=seed)
        assert len({tuple(sorted(run.grid.of(r, "train"))) for r in (1, 2, 3, 4)}) > 2
        check_predictions(run, roster=range(6))

    def test_targets_come_before_the_step(self) -> None:
        """Algorithm 1: round 1 distils with c_0, so everyone learns the mean of all."""
        run = party("ktpfl", **FAST)
        run.start(1)
        mean = np.mean([each.came()["predictions"] for each in run.grid.of(1, "train").values()], axis=0)
        for each in run.grid.of(1, "distill").values():
            np.testing.assert_allclose(each.sent()["targets"], mean, atol=1e-6)
        assert np.abs(run.matrices[0]["coefficients"] - 0.25).max() > 0.01

    def test_a_client_s_own_row_makes_its_target(self) -> None:
        """Row n, not column n: a matrix that is far from symmetric says which."""
        run = party("ktpfl", coefficient_learning_rate=0.0)
        strategy = run.build()
        strategy.matrix = CoefficientMatrix(range(4), torch.eye(4, dtype=torch.float64)[[1, 2, 3, 0]])
        strategy.reset = lambda: None
        run.strategy = strategy
        run.again(1, Watched(run.app(), 4))
        trained, distilled = run.grid.of(1, "train"), run.grid.of(1, "distill")
        for n in range(4):
            expected = trained[(n + 1) % 4].came()["predictions"]
            np.testing.assert_allclose(distilled[n].sent()["targets"], expected, atol=1e-6)

    def test_similar_clients_learn_from_each_other(self) -> None:
        """Two groups with exchanged labels: the matrix tells them apart."""
        swap = torch.tensor([1, 0, 2])
        run = party("ktpfl", coefficient_learning_rate=0.2, rho=0.1, local_epochs=20, temperature=1.0)
        for n in range(4):
            x, y = watched.samples(0, 40)
            keep = torch.randperm(40, generator=torch.Generator().manual_seed(n))[:30]
            run.train[n] = torch.utils.data.TensorDataset(x[keep], (swap[y] if n > 1 else y)[keep])
        run.start(4)
        c = run.matrices[-1]["coefficients"]
        inside = c[0, 1] + c[1, 0] + c[2, 3] + c[3, 2]
        across = (c[0, 2:] + c[1, 2:]).sum() + (c[2, :2] + c[3, :2]).sum()
        assert inside / 4 > 2 * across / 8

    def test_lambda_0_is_no_distillation(self) -> None:
        runs = [
            party("ktpfl", distill_weight=weight, distill_epochs=epochs)
            for weight, epochs in ((0, 1), (1, 0))
        ]
        for run in runs:
            run.start(3)
            for r in (1, 2, 3):
                for n, each in run.grid.of(r, "distill").items():
                    assert equal(each.kept, run.grid.of(r, "train")[n].kept)
        assert same_models(runs[0].grid, runs[1].grid)
        # λ weighs the matrix's loss, too: with 0 it has nothing to learn from, and stays at 1/N.
        np.testing.assert_allclose(runs[0].matrices[-1]["coefficients"], 0.25, atol=1e-15)
        assert np.abs(runs[1].matrices[-1]["coefficients"] - 0.25).max() > 1e-4

    def test_each_client_s_share_of_the_data_counts(self) -> None:
        """D_n/D: 17, 22, 12 and 27 of 78 samples; a row moves by its own client's share."""
        moves = []
        for weight in (1.0, 2.0):
            run = party(
                "ktpfl",
                coefficient_learning_rate=0.01,
                rho=0.0,
                normalize="none",
                reduction="mean",
                distill_weight=weight,
            )
            run.start(1)
            s = [each.came()["predictions"] for _, each in sorted(run.grid.of(1, "train").items())]
            plain = coefficients.coefficient_gradient(np.full((4, 4), 0.25), s, [1.0] * 4, reduction="mean")
            moves.append((run.matrices[0]["coefficients"] - 0.25) / (-0.01 * plain))
        shares = np.array([17, 22, 12, 27]) / 78
        np.testing.assert_allclose(moves[0], np.tile(shares[:, None], 4), rtol=1e-4)
        np.testing.assert_allclose(moves[1], 2 * moves[0], rtol=1e-4)

    @pytest.mark.parametrize("row", [(0.25, 0.25, 0.0, 0.0), (2.5, -1.5, 0.0, 0.0), (3.0, 0.5, 0.0, -1.0)])
    @pytest.mark.parametrize("precision", ["float32", "uint8"])
    def test_a_target_is_a_distribution_also_of_rows_that_are_none(
        self, row: tuple[float, ...], precision: str
    ) -> None:
        values = {"normalize": "none", "reduction": "mean", "coefficient_learning_rate": 0.0}
        run = party("ktpfl", temperature=0.3, precision=precision, **values)
        run.strategy = run.build()
        c = np.array([np.roll(row, n) for n in range(4)])
        run.strategy.matrix = CoefficientMatrix(range(4), torch.from_numpy(c))
        run.strategy.reset = lambda: None
        result = run.again(2, Watched(run.app(), 4))
        for r in (1, 2):
            s = [
                coefficients.unpacked(each.came()["predictions"])
                for _, each in sorted(run.grid.of(r, "train").items())
            ]
            bare = coefficients.personal_targets(c, s)
            assert (bare < -0.1).any() or sum(row) != 1
            expected = np.maximum(bare, 0)
            expected /= expected.sum(axis=2, keepdims=True)
            for n, each in run.grid.of(r, "distill").items():
                sent = each.sent()["targets"]
                np.testing.assert_allclose(coefficients.unpacked(sent), expected[n], atol=5e-3)
                if precision == "float32":
                    np.testing.assert_allclose(sent, expected[n], atol=2e-6)
        assert [(each.participants, each.failures) for each in result.rounds] == [(4, 0)] * 2

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_top_k_beyond_the_clients_and_one_client(self, name: str) -> None:
        run = party(name, clients=1, **({"top_k": 5} if name == "topk-pfl" else {}))
        run.start(2)
        assert run.matrices[-1]["coefficients"].tolist() == [[1.0]]
        check_predictions(run, roster=range(1))


# ---------------------------------------------------------------------- who is there


class TestParticipation:
    def test_absent_clients_rows_and_columns_stay_to_the_bit(self) -> None:
        run = party("ktpfl", clients=6, **FAST)
        run.start(6, fraction_train=0.5)
        before: dict[str, Any] = run.matrices[0]
        moved = 0
        for r in range(2, 7):
            there, after = set(run.grid.of(r, "train")), run.matrices[r - 1]
            for n, m in itertools.product(range(6), repeat=2):
                was, now = before["coefficients"][n, m], after["coefficients"][n, m]
                if n in there and m in there:
                    moved += was != now
                else:
                    assert was == now
            np.testing.assert_allclose(after["coefficients"].sum(axis=1), 1, atol=1e-12)
            assert (after["coefficients"] >= 0).all()
            before = after
        assert moved > 20

    def test_a_client_without_an_answer_is_not_there(self) -> None:
        run = party("ktpfl", **FAST)
        run.start(2, grid={"faults": {2: Fault("raise", frozenset({1}))}})
        first, second = (each["coefficients"] for each in run.matrices)
        assert (first[2] == 0.25).all()
        assert (first[:, 2] == 0.25).all()
        assert (first[np.ix_([0, 1, 3], [0, 1, 3])] != 0.25).all()
        assert (second[2] != 0.25).all()
        for n in (0, 1, 3):
            assert run.grid.of(1, "distill")[n].error == ""
        assert 2 not in run.grid.of(1, "distill")

    def test_an_absent_client_s_share_goes_to_those_who_are_there(self) -> None:
        run = party("ktpfl", coefficient_learning_rate=0.0)
        run.start(1, grid={"faults": {2: Fault("raise")}})
        trained = run.grid.of(1, "train")
        mean = np.mean([trained[n].came()["predictions"] for n in (0, 1, 3)], axis=0)
        for each in run.grid.of(1, "distill").values():
            np.testing.assert_allclose(each.sent()["targets"], mean, atol=1e-6)

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_a_client_that_returns_keeps_its_row(self, name: str) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {1} if r in (2, 3) else set()

        run = party(name, **(FAST if name == "ktpfl" else {}))
        run.start(4, grid={"arrive": arrive})
        rows = [each["coefficients"][1] for each in run.matrices]
        assert all(1 not in run.grid.of(r, "train") for r in (2, 3))
        assert (rows[0] == rows[1]).all()
        assert (rows[1] == rows[2]).all()
        assert (rows[2] != rows[3]).any()
        if name == "ktpfl":
            check_predictions(run)

    def test_a_new_node_id_of_the_same_partition_keeps_its_row(self) -> None:
        runs = []
        for restarted in (False, True):

            def arrive(grid: Watched, r: int, restarted: bool = restarted) -> None:
                if r == 2 and restarted:
                    state = grid.context(3).state
                    grid.restart(3)
                    grid.context(3).state = state

            run = party("ktpfl", **FAST)
            run.start(3, grid={"arrive": arrive})
            runs.append(run)
        for one, other in zip(runs[0].matrices, runs[1].matrices, strict=True):
            assert equal(one, other)
        assert runs[0].matrices[-1]["clients"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("late", [(0,), (2,), (1, 3)])
    def test_newcomers_extend_the_matrix(self, late: tuple[int, ...]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = set(late) if r < 2 else set()

        run = party("ktpfl", **FAST)
        run.start(3, grid={"arrive": arrive}, min_available_nodes=1)
        early = [n for n in range(4) if n not in late]
        assert run.matrices[0]["clients"].tolist() == early
        assert run.matrices[1]["clients"].tolist() == [0, 1, 2, 3]
        check_predictions(run, roster=early)

    def test_the_order_in_which_nodes_register_does_not_matter(self) -> None:
        runs = []
        for stages in ((), ({3}, {1, 2}), ({0, 1, 2}, {0}), ({2}, {1})):

            def arrive(grid: Watched, asked: int, stages: Any = stages) -> None:
                grid.away = stages[asked] if asked < len(stages) else set()
                turned = dict(reversed(grid.contexts.items())) if asked % 2 else dict(grid.contexts)
                grid.contexts.clear()
                grid.contexts.update(turned)

            run = party("ktpfl", **FAST)
            run.start(2, grid={"arrive": arrive, "seed": len(runs)})
            runs.append(run)
        for other in runs[1:]:
            assert equal(runs[0].matrices[-1], other.matrices[-1])
            assert same_models(runs[0].grid, other.grid)

    def test_nodes_without_a_partition_go_by_their_ids(self) -> None:
        class Nameless(KTpFLClient):
            def get_properties(self, config: Any) -> Any:
                found = super().get_properties(config)
                del found["partition-id"]
                return found

        run = party("ktpfl", **FAST)
        run.client = Nameless
        result = run.start(2)
        assert run.matrices[-1]["clients"].tolist() == sorted(run.grid.contexts)
        assert result.rounds[-1].participants == 4

    def test_a_named_client_is_itself_wherever_its_row_is(self) -> None:
        """The same clients, seven apart from each other: only the numbers on rows and columns differ."""
        m = CoefficientMatrix([5, 2])
        assert m.clients == [2, 5]
        m.values = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
        m.admit([2, 3, 3])
        m.admit([])
        assert m.clients == [2, 3, 5]
        third = 1 / 3
        expected = [[2 * third, third, 0], [third] * 3, [third / 2, third, third * 1.5]]
        np.testing.assert_allclose(m.values, expected, atol=1e-15)
        assert m.positions([5, 2]).tolist() == [2, 0]
        with pytest.raises(KeyError):
            m.positions([4])


# ---------------------------------------------------------------------- state


class TestState:
    @pytest.mark.parametrize("name", [*HETEROGENEOUS, "ktpfl-weights"])
    def test_a_resumed_run_goes_on_with_its_matrix(self, name: str, tmp_path: Path) -> None:
        run = party(name, alike=name == "ktpfl-weights", **({} if "pfl" in name[3:] else FAST))
        record = initial(run) if name == "ktpfl-weights" else None
        run.start(2, initial=record, checkpoint_dir=tmp_path, fraction_train=0.75)
        saved = run.matrices[-1]
        again = party(name, alike=name == "ktpfl-weights", **({} if "pfl" in name[3:] else FAST))
        again.strategy = again.build(checkpoint_dir=tmp_path, resume=True)
        assert again.strategy.prepare(record or ArrayRecord()).load_checkpoint()[0] == 2
        assert equal(again.strategy.state_arrays(), saved)

    @pytest.mark.parametrize("kind", ["ktpfl", "sim-pfl", "ktpfl-weights"])
    def test_interrupted_and_resumed_equals_uninterrupted(self, kind: str, tmp_path: Path) -> None:
        """Where the clients outlive the server. A model's arrays may come in another order."""
        alike = kind == "ktpfl-weights"
        whole, parts = (party(kind, alike=alike) for _ in range(2))
        record = None
        if not alike:
            whole.start(4, fraction_train=0.5)
            parts.start(2, fraction_train=0.5, checkpoint_dir=tmp_path)
            parts.strategy = parts.build(fraction_train=0.5, checkpoint_dir=tmp_path, resume=True)
            parts.again(4, parts.grid, record)
            assert equal(whole.matrices[-1], parts.matrices[-1])
            assert same_models(whole.grid, parts.grid)
            return
        record = initial(whole)
        parts.start(2, initial=record, checkpoint_dir=tmp_path)
        models = {n: parts.grid.of(2, "distill")[n].down_arrays for n in range(4)}
        kept = list(parts.grid.of(2, "distill")[0].kept)
        fresh = Watched(parts.app(), 4, seed=9)
        parts.strategy = parts.build(checkpoint_dir=tmp_path, resume=True)
        before = [each["coefficients"] for each in parts.matrices]
        result = parts.again(3, fresh, record)
        assert [each.server_round for each in result.rounds] == [3]
        # A new run: nobody has a model, and everyone is sent its own personal global model.
        names = parts.strategy.architecture.names
        assert set(names) == set(kept)
        for n, each in fresh.of(3, "train").items():
            came = dict(zip(names, each.down_arrays, strict=True))
            for name, value in zip(kept, models[n], strict=True):
                np.testing.assert_array_equal(came[name], value)
            assert each.error == ""
        assert np.abs(parts.matrices[-1]["coefficients"] - before[-1]).max() > 0

    def test_state_before_the_first_answers_is_none(self) -> None:
        for run in (party("ktpfl"), weights_party()):
            record = initial(run) if run.name == "ktpfl-weights" else None
            run.start(1, initial=record, grid={"faults": {i: Fault("raise") for i in range(4)}})
            assert run.matrices == [{}]

    @pytest.mark.parametrize("name", ["ktpfl", "ktpfl-weights"])
    def test_starting_again_forgets(self, name: str) -> None:
        run = party(name, alike=name == "ktpfl-weights")
        record = initial(run, watched.net(2, seed=7)) if name == "ktpfl-weights" else None
        run.start(2, initial=record)
        first = run.matrices[:]
        run.matrices.clear()
        run.again(2, Watched(run.app(), 4), record)
        assert all(equal(a, b) for a, b in zip(first, run.matrices, strict=True))
        run.strategy.min_available_nodes = 3
        run.again(1, Watched(run.app(), 3), record)
        assert run.matrices[-1]["clients"].tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("state", "text"),
        [
            ({"coefficients": np.eye(2)}, r"must be coefficients and clients, got \['coefficients'\]"),
            ({"clients": np.arange(2)}, r"must be coefficients and clients, got \['clients'\]"),
            (
                {"coefficients": np.eye(2), "clients": np.arange(2), "more": np.eye(1)},
                r"must be coefficients and clients",
            ),
            (
                {"coefficients": np.eye(3), "clients": np.arange(2)},
                r"\[N, N\] of N = 2 clients, got \(3, 3\)",
            ),
            ({"coefficients": np.ones((2, 3)), "clients": np.arange(2)}, r"got \(2, 3\)"),
            ({"coefficients": np.ones(2), "clients": np.arange(2)}, r"got \(2,\)"),
            ({"coefficients": np.eye(2), "clients": np.array([1, 0])}, r"of N = 2 clients"),
            ({"coefficients": np.eye(2), "clients": np.array([1, 1])}, r"of N = 2 clients"),
        ],
    )
    @pytest.mark.parametrize("kind", [KTpFL, KTpFLWeights])
    def test_wrong_state_is_refused(self, kind: Any, state: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            kind().load_state_arrays(state)

    @pytest.mark.parametrize(
        "state",
        [
            {"coefficients": np.eye(2), "clients": np.array([[0, 1], [2, 3]])},
            {"coefficients": np.eye(1), "clients": np.array(3)},
            {"coefficients": np.array([[np.nan, 1], [0, 1]]), "clients": np.arange(2)},
            {"coefficients": np.eye(2), "clients": np.array([0.5, 1.5])},
        ],
    )
    def test_more_wrong_state_is_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"coefficients|clients"):
            CoefficientMatrix.from_state(state)

    def test_models_of_two_architectures_are_refused(self) -> None:
        good = {"coefficients": np.eye(2), "clients": np.arange(2), "models/0/w": np.zeros(2)}
        for other in ({"models/1/w": np.zeros(3)}, {"models/1/v": np.zeros(2)}):
            with pytest.raises(ValueError, match=r"not of one architecture"):
                KTpFLWeights().load_state_arrays({**good, **other})
        strategy = KTpFLWeights()
        strategy.load_state_arrays({**good, "models/1/w": np.ones(2)})
        assert [strategy.models[n][0].tolist() for n in (0, 1)] == [[0, 0], [1, 1]]
        for wrong in ({"models/x/w": np.zeros(2)}, {"models/1": np.zeros(2)}):
            with pytest.raises(ValueError, match=r".+"):
                KTpFLWeights().load_state_arrays({**good, **wrong})

    def test_names_with_slashes_come_back(self) -> None:
        strategy = KTpFLWeights()
        state = {"coefficients": np.eye(1), "clients": np.array([7])}
        state |= {"models/7/a/b": np.arange(2.0), "models/7/c": np.array(3)}
        strategy.load_state_arrays(state)
        assert strategy.architecture.names == ("a/b", "c")
        assert equal(strategy.state_arrays(), state)

    def test_what_was_saved_is_a_copy(self) -> None:
        state = {"coefficients": np.eye(2), "clients": np.arange(2)}
        m = CoefficientMatrix.from_state(state)
        m.values[0, 1] = 5.0
        assert state["coefficients"][0, 1] == 0

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_a_round_s_state_is_not_the_next_one_s(self, name: str) -> None:
        run = party(name)
        states: list[Any] = []
        run._note = lambda _: states.append(run.strategy.state_arrays())  # type: ignore[method-assign]
        run.start(2)
        if name == "ktpfl":
            run.strategy.matrix.values[0] = 0.0
        assert not np.array_equal(states[0]["coefficients"], states[1]["coefficients"])
        assert states[1]["coefficients"][0].sum() > 0.5

    @pytest.mark.parametrize("name", ["ktpfl", "ktpfl-weights"])
    def test_any_node_id_can_be_saved(self, name: str, tmp_path: Path) -> None:
        run = party(name, alike=name == "ktpfl-weights")
        base: Any = registry.get(name).client

        class Nameless(base):  # type: ignore[misc]
            def get_properties(self, config: Any) -> Any:
                found = super().get_properties(config)
                del found["partition-id"]
                return found

        def arrive(grid: Watched, asked: int) -> None:
            if asked == 0:
                for n in range(4):
                    grid.restart(n, 2**64 - 10 + n)

        run.client, record = Nameless, initial(run) if name == "ktpfl-weights" else None
        run.start(2, initial=record, checkpoint_dir=tmp_path, grid={"arrive": arrive})
        saved = run.matrices[-1]
        again = party(name, alike=name == "ktpfl-weights")
        again.strategy = again.build(checkpoint_dir=tmp_path, resume=True)
        again.strategy.prepare(record or ArrayRecord()).load_checkpoint()
        assert equal(again.strategy.state_arrays(), saved)


# ---------------------------------------------------------------------- models instead of predictions


class TestWeights:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"reduction": "mean", "distill_learning_rate": 20.0, "coefficient_learning_rate": 0.8},
            {"distill_steps": 3, "distill_learning_rate": 0.2, "distill_weight": 2.0},
            {"normalize": "none", "coefficient_learning_rate": 0.1, "rho": 0.05},
            {"normalize": "softmax"},
            {"lr_decay": 0.5, "lr_decay_every": 1, "momentum": 0.5, "weight_decay": 0.01},
            {"rho": 0.0, "coefficient_learning_rate": 0.3},
        ],
        ids=lambda changes: "-".join(changes) or "defaults",
    )
    @pytest.mark.parametrize("fraction", [1.0, 0.5])
    def test_three_rounds(self, changes: dict[str, Any], fraction: float) -> None:
        run = weights_party(**{"distill_learning_rate": 0.25, "coefficient_learning_rate": 0.05, **changes})
        start = {name: value.numpy() for name, value in watched.net(2, seed=7).state_dict().items()}
        run.start(3, initial=initial(run, watched.net(2, seed=7)), fraction_train=fraction)
        check_models(run, start)
        assert np.abs(run.matrices[-1]["coefficients"] - 0.25).max() > 5e-4

    def test_initial_arrays_reach_each_client_once(self) -> None:
        run = weights_party()
        record = initial(run, watched.net(2, seed=7))
        run.start(5, initial=record, fraction_train=0.5)
        sizes: dict[int, list[int]] = {n: [] for n in range(4)}
        for each in run.grid.passed:
            if each.phase == "train":
                sizes[each.partition].append(len(each.down_arrays))
                if each.down_arrays:
                    for found, expected in zip(each.down_arrays, record.values(), strict=True):
                        np.testing.assert_array_equal(found, expected.numpy())
        assert sum(map(len, sizes.values())) == 10
        assert all(not any(rest) and first == len(record) for first, *rest in sizes.values())

    def test_without_initial_arrays_each_begins_with_its_own(self) -> None:
        run = weights_party(local_epochs=1)
        run.models = [watched.net(2, seed=n) for n in range(4)]
        run.start(2)
        assert not any(each.down_arrays for each in run.grid.passed if each.phase == "train")
        mirror = transfer.Mirror(run.models[3], run.train[3], run.test[3])
        mirror.train(mirror.x, mirror.y, 8, 1, run.draw("train", 1, 3, "order"), rate=0.1)
        same(run.grid.of(1, "train")[3].up_arrays, list(mirror.weights().values()))

    def test_a_restarted_client_goes_on_from_its_personal_global_model(self) -> None:
        def arrive(grid: Watched, r: int) -> None:
            if r == 3:
                grid.restart(2)

        run = weights_party()
        run.start(4, initial=initial(run), grid={"arrive": arrive})
        last = run.grid.of(2, "distill")[2].down_arrays
        third = run.grid.of(3, "train")
        assert {n for n, each in third.items() if each.down_arrays} == {2}
        for found, expected in zip(third[2].down_arrays, last, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert not any(each.down_arrays for each in run.grid.of(4, "train").values())
        assert [each.failures for each in run.strategy_rounds] == [0] * 4

    def test_an_absent_client_keeps_its_personal_global_model(self) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {1} if r in (2, 3) else set()
            if r == 4:
                grid.restart(1)

        run = weights_party()
        run.start(4, initial=initial(run), grid={"arrive": arrive})
        last = run.grid.of(1, "distill")[1].down_arrays
        for found, expected in zip(run.grid.of(4, "train")[1].down_arrays, last, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_a_restarted_client_with_its_old_node_id_goes_on_too(self) -> None:
        """With ``--auth-supernode-private-key`` the node id outlives a restart, the state does not."""

        def arrive(grid: Watched, r: int) -> None:
            if r == 3:
                grid.context(2).state = RecordDict()

        run = weights_party()
        result = run.start(4, initial=initial(run), grid={"arrive": arrive})
        # It says so in round 3, which it misses, and is sent its personal global model in round 4.
        assert "no model of an earlier round is kept here" in run.grid.of(3, "train")[2].error
        assert [(each.participants, each.failures) for each in result.rounds] == [
            (4, 0),
            (4, 0),
            (3, 1),
            (4, 0),
        ]
        expected = transfer.Mirror(watched.net(2), run.train[2], run.test[2])
        names = list(expected.weights())
        expected.take(dict(zip(names, run.grid.of(2, "distill")[2].down_arrays, strict=True)))
        expected.train(expected.x, expected.y, 8, 2, run.draw("train", 4, 2, "order"), rate=0.1)
        same(run.grid.of(4, "train")[2].up_arrays, list(expected.weights().values()))

    def test_a_newcomer_of_a_resumed_run_gets_initial_arrays(self, tmp_path: Path) -> None:
        run = weights_party()
        record = initial(run)
        run.start(1, initial=record, checkpoint_dir=tmp_path, fraction_train=0.5)
        took_part = set(run.grid.of(1, "train"))
        again = weights_party()
        result = again.start(2, initial=record, checkpoint_dir=tmp_path, resume=True)
        assert len(took_part) == 2
        assert [each.error for each in again.grid.passed if each.error] == []
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)

    def test_a_lost_answer_does_not_leave_a_client_without_a_model(self) -> None:
        faults = {1: Fault("raise", frozenset({1})), 3: Fault("silent", frozenset({1}))}
        run = weights_party()
        result = run.start(2, initial=initial(run), grid={"faults": faults}, timeout=0.2)
        second = run.grid.of(2, "train")
        assert {n for n, each in second.items() if each.down_arrays} == {1, 3}
        assert [(each.participants, each.failures) for each in result.rounds] == [(2, 2), (4, 0)]

    def test_a_client_whose_answer_was_lost_goes_on_with_its_own_model(self) -> None:
        """It is sent a model again, since the server cannot know; it has one."""

        def arrive(grid: Watched, r: int) -> None:
            held[r] = {n: kept_model(grid.context(n)) for n in range(4)}

        held: dict[int, dict[int, Any]] = {}
        run = weights_party()
        faults = {1: Fault("late", frozenset({1}))}
        run.start(2, initial=initial(run), grid={"faults": faults, "arrive": arrive}, timeout=0.2)
        assert {n for n, each in run.grid.of(2, "train").items() if each.down_arrays} == {1}
        own = transfer.Mirror(watched.net(2), run.train[1], run.test[1])
        own.take(held[2][1])
        own.train(own.x, own.y, 8, 2, run.draw("train", 2, 1, "order"), rate=0.1)
        same(run.grid.of(2, "train")[1].up_arrays, list(own.weights().values()))

    def test_a_distillation_that_failed_costs_a_round(self) -> None:
        """An answer that is lost after the second phase, too; the model is the client's own in the next."""
        run = weights_party()
        after = {
            "after": lambda r, phase, n, content: (
                content.clear() if (r, phase, n) == (1, "distill", 1) else None
            )
        }
        result = run.start(3, initial=initial(run), grid=after)
        assert [(each.participants, each.failures) for each in result.rounds] == [(4, 1), (4, 0), (4, 0)]
        assert {n for n, each in run.grid.of(2, "train").items() if each.down_arrays} == {1}
        assert not any(each.down_arrays for each in run.grid.of(3, "train").values())
        own = transfer.Mirror(watched.net(2), run.train[1], run.test[1])
        own.take(run.grid.of(1, "distill")[1].kept)
        own.train(own.x, own.y, 8, 2, run.draw("train", 2, 1, "order"), rate=0.1)
        same(run.grid.of(2, "train")[1].up_arrays, list(own.weights().values()))

    def test_a_personal_global_model_without_finite_outputs_is_not_taken(self) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if (r, phase, n) == (1, "train", 1):
                record = content.array_records["fitres.parameters"]
                for key in list(record):
                    value = record[key].numpy()
                    if value.dtype.kind == "f":
                        record[key] = Array(np.full_like(value, 3.4e38))

        run = weights_party(distill_learning_rate=0.5)
        result = run.start(2, initial=initial(run), grid={"after": after})
        for n, each in run.grid.of(1, "distill").items():
            assert "FloatingPointError" in each.error
            assert "leads to outputs that are not finite; not taken" in each.error
            assert equal(each.kept, run.grid.of(1, "train")[n].kept)
        assert [(each.participants, each.failures) for each in result.rounds] == [(4, 4), (4, 0)]
        for each in run.grid.of(2, "distill").values():
            assert all(np.isfinite(value).all() for value in each.kept.values())

    def test_unlike_models_are_refused_in_the_handshake(self) -> None:
        for record in (True, False):
            run = weights_party()
            run.models = [watched.net(2), watched.net(1), watched.net(2), watched.net(2)]
            with pytest.raises(
                HandshakeError, match=r"3 clients fit, 4 are needed; refused: .*arrays missing"
            ):
                run.start(1, initial=initial(run) if record else None)
            assert run.grid.passed == []
        run.models[1] = watched.net(2)
        run.models[1][1] = nn.Linear(8, 4)
        with pytest.raises(
            HandshakeError, match=r"array '1.bias' has shape \[4\], expected \[5\]|'1.weight'"
        ):
            run.start(1, initial=initial(run))

    def test_a_newcomer_with_another_model_is_refused(self, flower_log: list[str]) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {3} if r < 2 else set()

        run = weights_party()
        run.models = [*run.models[:3], watched.net(1)]
        result = run.start(2, grid={"arrive": arrive}, min_available_nodes=3)
        assert [each.participants for each in result.rounds] == [3, 3]
        assert any("is refused: arrays missing" in line for line in flower_log)

    def test_a_resumed_run_knows_its_architecture(self, tmp_path: Path) -> None:
        run = weights_party()
        run.start(1, checkpoint_dir=tmp_path)
        again = weights_party()
        again.models = [watched.net(1, seed=n) for n in range(4)]
        with pytest.raises(HandshakeError, match=r"0 clients fit"):
            again.start(2, checkpoint_dir=tmp_path, resume=True)

    def test_batchnorm_s_counters_stay_the_client_s_own(self) -> None:
        run = weights_party(distill_learning_rate=0.5)
        run.start(2, initial=initial(run))
        steps = [2 * -(-size // 8) - 2 * (size % 8 == 1) for size in watched.SIZES]
        assert len(set(steps)) > 2
        for r in (1, 2):
            for n in range(4):
                for each in (run.grid.of(r, "train")[n], run.grid.of(r, "distill")[n]):
                    assert each.kept["2.num_batches_tracked"] == r * steps[n]
                    assert each.kept["2.num_batches_tracked"].dtype == np.int64
                counter = run.matrices[r - 1][f"models/{n}/2.num_batches_tracked"]
                assert counter.shape == ()
                assert counter == r * steps[n]

    def test_lambda_0_is_no_distillation(self) -> None:
        changes: tuple[dict[str, Any], ...] = (
            {"distill_weight": 0.0},
            {"distill_steps": 0},
        )
        runs = [weights_party(**change) for change in changes]
        for run in runs:
            run.start(3, initial=initial(run))
            for r, n in itertools.product((1, 2, 3), range(4)):
                assert equal(run.grid.of(r, "distill")[n].kept, run.grid.of(r, "train")[n].kept)
        assert same_models(runs[0].grid, runs[1].grid)

    def test_half_a_step_arrives(self) -> None:
        """With η₂λ = 1/2 one step ends in the personal global model itself."""
        run = weights_party(distill_learning_rate=0.25, distill_weight=2.0)
        run.start(1, initial=initial(run))
        for each in run.grid.of(1, "distill").values():
            for found, goal in zip(each.kept.values(), each.down_arrays, strict=True):
                if found.dtype.kind == "f":
                    np.testing.assert_allclose(found, goal, rtol=1e-6)

    def test_running_variances_never_are_negative(self) -> None:
        """3/2 of the own model and -1/2 of one whose data is spread more: the mixture's variances would be."""
        run = weights_party(normalize="none", coefficient_learning_rate=0.0, distill_learning_rate=0.5)
        for n in range(4):
            x, y = run.train[n].tensors
            run.train[n] = torch.utils.data.TensorDataset(x * 3**n, y)
        run.strategy = run.build()
        eye = torch.eye(4, dtype=torch.float64)
        run.strategy.matrix = CoefficientMatrix(range(4), 1.5 * eye - 0.5 * eye[[1, 2, 3, 0]])
        run.strategy.reset = lambda: None
        result = run.again(3, Watched(run.app(), 4), initial(run))
        place = list(run.grid.of(1, "distill")[0].kept).index("2.running_var")
        first = {n: each.up_arrays[place] for n, each in run.grid.of(1, "train").items()}
        for n, each in run.grid.of(1, "distill").items():
            bare = 1.5 * first[n] - 0.5 * first[(n + 1) % 4]
            assert (bare < 0).any() == (n < 3)
            np.testing.assert_allclose(each.down_arrays[place], np.maximum(bare, 0), rtol=1e-5, atol=1e-6)
            assert (each.down_arrays[place - 1] < 0).any()  # means may be
        for each in run.grid.passed:
            assert (each.kept["2.running_var"] >= 0).all()
        assert all((value >= 0).all() for name, value in run.matrices[-1].items() if "running_var" in name)
        assert [each.failures for each in result.rounds] == [0] * 3

    def test_nor_with_a_step_that_is_too_long_for_a_mean(self) -> None:
        """Half the number of weights is the mean's 1/2."""
        run = weights_party(reduction="mean", distill_learning_rate=200.0)
        result = run.start(2, initial=initial(run))
        size = 5 * 8 + 3 * 5 + 4 * 5 + 5 + 3
        text = f"distill-learning-rate times distill-weight must be <= {size / 2:g} for this model"
        for each in run.grid.of(1, "distill").values():
            assert text in each.error
            assert "got 200" in each.error
            assert (each.kept["2.running_var"] >= 0).all()
        assert [each.failures for each in result.rounds] == [4, 4]
        largest = weights_party(reduction="mean", distill_learning_rate=size / 4, distill_weight=2.0)
        assert largest.start(1, initial=initial(largest)).rounds[0].failures == 0

    @pytest.mark.parametrize("how", ["simplex", "softmax", "none"])
    @pytest.mark.parametrize("size", [1e8, 1e30, 3.4e38])
    def test_hostile_weights_end_nothing(self, how: str, size: float) -> None:
        def after(r: int, phase: str, n: int, content: RecordDict) -> None:
            if n == 1 and phase == "train":
                record = content.array_records["fitres.parameters"]
                for key in list(record):
                    value = record[key].numpy()
                    if value.dtype.kind == "f":
                        record[key] = Array(np.full_like(value, size))

        run = weights_party(normalize=how)
        result = run.start(6, initial=initial(run), grid={"after": after}, max_void_rounds=6)
        assert len(result.rounds) == 6
        for state in run.matrices:
            assert all(np.isfinite(value).all() for value in state.values())
            if how != "none":
                c = state["coefficients"]
                assert (c >= 0).all()
                np.testing.assert_allclose(c.sum(axis=1), 1, atol=1e-9)
        if how != "none":
            assert run.matrices[-1]["coefficients"][[0, 2, 3], 1].max() < 1e-6
        sent = [a for each in run.grid.passed for a in each.down_arrays]
        assert all(np.isfinite(a).all() for a in sent)

    @pytest.mark.parametrize("kind", ["arrays-of-nan", "fewer-arrays", "arrays-of-other-shape"])
    def test_what_is_no_model_is_dropped(self, kind: str) -> None:
        from flwr_kd.testing.garbage import GARBAGE

        fault = Fault("garbage", frozenset({1}), garble=GARBAGE[kind])
        run = weights_party(**FAST)
        run.start(1, initial=initial(run), grid={"faults": {2: fault}})
        assert (run.matrices[0]["coefficients"][2] == 0.25).all()
        assert not any(name.startswith("models/2/") for name in run.matrices[0])
        assert 2 not in run.grid.of(1, "distill")

    def test_a_client_that_lost_its_state_between_the_phases_says_so(self) -> None:
        def before(r: int, phase: str, context: Context) -> None:
            if (r, phase, context.node_config["partition-id"]) == (1, "distill", 2):
                context.state = RecordDict()

        run = weights_party()
        result = run.start(2, initial=initial(run), grid={"before": before})
        errors = {(each.server_round, each.phase, each.partition): each.error for each in run.grid.passed}
        assert [key for key, text in errors.items() if text] == [(1, "distill", 2)]
        assert "no model of this round's training is kept here" in errors[1, "distill", 2]
        assert "StateError" in errors[1, "distill", 2]
        assert [(each.participants, each.failures) for each in result.rounds] == [(4, 1), (4, 0)]
        assert set(result.rounds[0].clients) == {0, 1, 3}

    def test_dtypes_may_differ(self) -> None:
        run = weights_party()
        run.models = [*run.models[:3], watched.net(2).double()]
        for sets in (run.train, run.test):
            x, y = sets[3].tensors
            sets[3] = torch.utils.data.TensorDataset(x.double(), y)
        result = run.start(2, initial=initial(run))
        assert [(each.participants, each.failures) for each in result.rounds] == [(4, 0)] * 2
        assert {a.dtype for a in run.grid.of(2, "distill")[3].kept.values()} == {
            np.dtype("float64"), np.dtype("int64"),
        }  # fmt: skip

    def test_bytes_are_a_model_up_and_a_model_down(self) -> None:
        run = weights_party()
        record = initial(run)
        result = run.start(2, initial=record)
        size = sum(len(value.data) for value in record.values())
        assert [each.bytes_up for each in result.rounds] == [4 * size] * 2
        assert [each.bytes_down for each in result.rounds] == [8 * size, 4 * size]

    def test_public_options_are_not_its_own(self) -> None:
        with pytest.raises((TypeError, ConfigError)):
            KTpFLWeights(public_set=watched.samples(0, 4))
        assert not registry.get("ktpfl-weights").public_at


# ---------------------------------------------------------------------- accuracy


class TestAccuracy:
    @pytest.mark.parametrize("name", ["ktpfl", "ktpfl-weights"])
    def test_it_is_of_the_model_after_the_distillation(self, name: str) -> None:
        weights = name == "ktpfl-weights"
        run = party(name, alike=weights, distill_learning_rate=0.5 if weights else 3.0)
        result = run.start(3, initial=initial(run) if weights else None)
        differ = 0
        for r, stats in enumerate(result.rounds, start=1):
            for n in range(4):
                accuracies = []
                for phase in ("train", "distill"):
                    mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
                    mirror.take(run.grid.of(r, phase)[n].kept)
                    accuracies.append(mirror.accuracy())
                assert stats.clients[n] == {"local-accuracy": accuracies[1]}
                assert "local-accuracy" not in run.grid.of(r, "train")[n].metrics
                differ += accuracies[0] != accuracies[1]
            assert stats.local_accuracy == pytest.approx(
                np.mean([v["local-accuracy"] for v in stats.clients.values()])
            )
            assert stats.global_accuracy is None
        assert differ >= 3

    @pytest.mark.parametrize("name", ["ktpfl", "ktpfl-weights"])
    def test_no_test_split_no_accuracy(self, name: str) -> None:
        run = party(name, alike=name == "ktpfl-weights")
        run.test = [None] * 4
        result = run.start(1, initial=initial(run) if name == "ktpfl-weights" else None)
        assert result.rounds[0].local_accuracy is None
        assert result.rounds[0].failures == 0

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_initial_arrays_are_not_sent(self, name: str) -> None:
        """They may be there, as with any other strategy; nothing becomes of them."""
        runs = [party(name) for _ in range(2)]
        record = initial(runs[1], watched.net(2, seed=7))
        runs[0].start(1)
        result = runs[1].start(1, initial=record)
        assert not any(each.down_arrays or each.up_arrays for each in runs[1].grid.passed)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
        assert same_models(runs[0].grid, runs[1].grid)
        assert {k: v.data for k, v in result.arrays.items()} == {k: v.data for k, v in record.items()}

    def test_nothing_but_numbers_comes_back_from_the_distillation(self) -> None:
        run = party("ktpfl")
        run.start(1)
        for each in run.grid.of(1, "distill").values():
            assert each.up is None
            assert each.up_arrays == []
        for each in run.grid.of(1, "train").values():
            assert each.up_arrays == []
            assert set(each.metrics) == {"train-loss"}
        assert not any(each.down_arrays for each in run.grid.passed)


# ---------------------------------------------------------------------- hyper-parameters and registration


class TestConfig:
    def test_the_paper_s_values_of_unlike_models(self) -> None:
        """Appendix B.2, and K of section 5.1."""
        config = KTpFLConfig()
        assert (config.temperature, config.distill_weight, config.top_k) == (10, 1, 5)
        assert (config.batch_size, config.public_batch_size, config.public_samples) == (128, 256, 3000)
        assert (config.local_epochs, config.distill_epochs, config.rho) == (20, 1, 0.6)
        rates = {
            config.learning_rate, config.distill_learning_rate, config.coefficient_learning_rate,
        }  # fmt: skip
        assert rates == {0.01}
        assert (config.optimizer, config.momentum, config.weight_decay, config.lr_decay) == ("sgd", 0, 0, 1)
        assert (config.normalize, config.reduction, config.precision) == ("simplex", "sum", "float32")
        assert (config.coefficients, config.public_at) == ("learned", "clients")

    def test_the_paper_s_values_of_like_models(self) -> None:
        config = KTpFLWeightsConfig()
        assert (config.local_epochs, config.batch_size, config.distill_steps, config.rho) == (20, 32, 1, 0.6)
        assert (config.learning_rate, config.distill_learning_rate) == (0.01, 0.01)
        assert (config.coefficient_learning_rate, config.distill_weight) == (0.005, 1)
        assert (config.optimizer, config.momentum, config.lr_decay) == ("sgd", 0, 1)
        assert (config.normalize, config.reduction) == ("simplex", "sum")

    @pytest.mark.parametrize("kind", [KTpFLConfig, KTpFLWeightsConfig])
    def test_a_step_beyond_the_mean_is_refused(self, kind: Any) -> None:
        text = r"coefficient-learning-rate times rho must be <= 0.5, .*got 0.5 times 1.5"
        with pytest.raises(ConfigError, match=text):
            kind(coefficient_learning_rate=0.5, rho=1.5)
        assert kind(coefficient_learning_rate=0.5, rho=1.0).rho == 1.0
        assert kind(coefficient_learning_rate=0.0, rho=1e9).rho == 1e9

    def test_bare_rows_need_a_mean(self) -> None:
        with pytest.raises(ConfigError, match=r"normalize=none needs reduction=mean: .*got reduction=sum"):
            KTpFLConfig(normalize="none")
        assert KTpFLConfig(normalize="none", reduction="mean").normalize == "none"
        assert KTpFLWeightsConfig(normalize="none").reduction == "sum"

    def test_a_step_beyond_the_target_is_refused(self) -> None:
        text = (
            r"distill-learning-rate times distill-weight must be <= 0.5 with reduction=sum, .*got 0.3 times 2"
        )
        with pytest.raises(ConfigError, match=text):
            KTpFLWeightsConfig(distill_learning_rate=0.3, distill_weight=2.0)
        assert KTpFLWeightsConfig(distill_learning_rate=0.25, distill_weight=2.0)
        assert KTpFLWeightsConfig(distill_learning_rate=0.3, distill_weight=2.0, reduction="mean")
        assert KTpFLConfig(distill_learning_rate=0.3, distill_weight=2.0)

    @pytest.mark.parametrize(
        ("kind", "changes", "text"),
        [
            (KTpFLConfig, {"rho": -0.1}, r"rho must be >= 0, got -0.1"),
            (KTpFLConfig, {"coefficient_learning_rate": -1.0}, r"coefficient-learning-rate must be >= 0"),
            (KTpFLConfig, {"normalize": "l2"}, r"normalize must be one of simplex, softmax, none, got 'l2'"),
            (KTpFLConfig, {"coefficients": "mean"}, r"coefficients must be one of learned, cosine, top-k"),
            (KTpFLConfig, {"top_k": 0}, r"top-k must be >= 1, got 0"),
            (KTpFLWeightsConfig, {"distill_steps": -1}, r"distill-steps must be >= 0"),
            (KTpFLWeightsConfig, {"reduction": "max"}, r"reduction must be one of sum, mean, got 'max'"),
            (KTpFLWeightsConfig, {"distill_weight": -1.0}, r"distill-weight must be >= 0"),
            (KTpFLWeightsConfig, {"distill_learning_rate": 0.0}, r"distill-learning-rate must be > 0"),
        ],
    )
    def test_what_is_out_of_range(self, kind: Any, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            kind(**changes)

    def test_a_step_of_the_regularisation_ends_at_the_mean(self) -> None:
        """2 η₃ ρ = 1: without knowledge (λ = 0) all coefficients are 1/N after one step."""
        run = party("ktpfl", coefficient_learning_rate=0.5, rho=1.0, distill_weight=0.0)
        strategy = run.build()
        strategy.matrix = CoefficientMatrix(range(4), torch.eye(4, dtype=torch.float64))
        strategy.reset = lambda: None
        run.strategy = strategy
        run.again(1, Watched(run.app(), 4))
        np.testing.assert_allclose(run.matrices[0]["coefficients"], 0.25, atol=1e-15)

    def test_registration(self) -> None:
        for name, fixed in (("ktpfl", "learned"), ("sim-pfl", "cosine"), ("topk-pfl", "top-k")):
            method = registry.get(name)
            assert (method.strategy, method.client) == (KTpFL, KTpFLClient)
            assert (method.public_at, method.heterogeneous, method.global_model) == ("clients", True, False)
            assert dict(method.fixed) == {"coefficients": fixed}
            assert method.config().coefficients == fixed  # type: ignore[attr-defined]
            with pytest.raises(ConfigError, match=rf"coefficients is fixed at {fixed}"):
                method.config(["coefficients=learned"])
        method = registry.get("ktpfl-weights")
        assert (method.strategy, method.client) == (KTpFLWeights, KTpFLWeightsClient)
        assert (method.public_at, method.heterogeneous, method.global_model) == ("", False, False)
        assert method.exchanged == "weights"
        assert dict(method.fixed) == {}
