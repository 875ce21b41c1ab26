"""KT-pFL's rounds, participation, state and accuracy, against the oracle."""

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
from flwr.app import ArrayRecord
from transfer_rounds import FAST, initial, weights_party
from watched import Party, Watched, equal, party, same_models

from flwr_kd import registry
from flwr_kd.checks import ConfigError
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


def test_the_oracle_s_own_cases() -> None:
    results = doctest.testmod(transfer)
    assert results.attempted >= 11
    assert results.failed == 0


class TestRounds:
    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_three_rounds_of_heterogeneous_models(self, name: str) -> None:
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
        mean = np.mean([call.came()["predictions"] for call in run.grid.of(1, "train").values()], axis=0)
        for call in run.grid.of(1, "distill").values():
            np.testing.assert_allclose(call.sent()["targets"], mean, atol=1e-6)
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
                for n, call in run.grid.of(r, "distill").items():
                    assert equal(call.kept, run.grid.of(r, "train")[n].kept)
        assert same_models(runs[0].grid, runs[1].grid)
        # λ also weighs the matrix's loss: with 0 there is no gradient, and the matrix stays at 1/N.
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
            s = [call.came()["predictions"] for _, call in sorted(run.grid.of(1, "train").items())]
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
                coefficients.unpacked(call.came()["predictions"])
                for _, call in sorted(run.grid.of(r, "train").items())
            ]
            bare = coefficients.personal_targets(c, s)
            assert (bare < -0.1).any() or sum(row) != 1
            expected = np.maximum(bare, 0)
            expected /= expected.sum(axis=2, keepdims=True)
            for n, call in run.grid.of(r, "distill").items():
                sent = call.sent()["targets"]
                np.testing.assert_allclose(coefficients.unpacked(sent), expected[n], atol=5e-3)
                if precision == "float32":
                    np.testing.assert_allclose(sent, expected[n], atol=2e-6)
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 0)] * 2

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_top_k_beyond_the_clients_and_one_client(self, name: str) -> None:
        run = party(name, clients=1, **({"top_k": 5} if name == "topk-pfl" else {}))
        run.start(2)
        assert run.matrices[-1]["coefficients"].tolist() == [[1.0]]
        check_predictions(run, roster=range(1))


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
        first, second = (matrix["coefficients"] for matrix in run.matrices)
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
        for call in run.grid.of(1, "distill").values():
            np.testing.assert_allclose(call.sent()["targets"], mean, atol=1e-6)

    @pytest.mark.parametrize("name", HETEROGENEOUS)
    def test_a_client_that_returns_keeps_its_row(self, name: str) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {1} if r in (2, 3) else set()

        run = party(name, **(FAST if name == "ktpfl" else {}))
        run.start(4, grid={"arrive": arrive})
        rows = [matrix["coefficients"][1] for matrix in run.matrices]
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
                actual = super().get_properties(config)
                del actual["partition-id"]
                return actual

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
        """The clients continue while the server restarts. A model's arrays may come in another order."""
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
        before = [matrix["coefficients"] for matrix in parts.matrices]
        result = parts.again(3, fresh, record)
        assert [stats.server_round for stats in result.rounds] == [3]
        # A new run: nobody has a model, and everyone is sent its own personal global model.
        names = parts.strategy.architecture.names
        assert set(names) == set(kept)
        for n, call in fresh.of(3, "train").items():
            came = dict(zip(names, call.down_arrays, strict=True))
            for name, value in zip(kept, models[n], strict=True):
                np.testing.assert_array_equal(came[name], value)
            assert call.error == ""
        assert np.abs(parts.matrices[-1]["coefficients"] - before[-1]).max() > 0

    def test_state_before_the_first_answers_is_none(self) -> None:
        for run in (party("ktpfl"), weights_party()):
            record = initial(run) if run.name == "ktpfl-weights" else None
            faults = {i: Fault("raise", frozenset({1})) for i in range(4)}
            run.start(2, initial=record, grid={"faults": faults})
            assert run.matrices[0] == {}

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
        assert [strategy.models.get(n)[0].tolist() for n in (0, 1)] == [[0, 0], [1, 1]]
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
                actual = super().get_properties(config)
                del actual["partition-id"]
                return actual

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
                assert stats.clients[n] == {
                    "trained-accuracy": accuracies[0], "local-accuracy": accuracies[1]
                }  # fmt: skip
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
        """Initial arrays are allowed, as in any strategy, and ignored."""
        runs = [party(name) for _ in range(2)]
        record = initial(runs[1], watched.net(2, seed=7))
        runs[0].start(1)
        result = runs[1].start(1, initial=record)
        assert not any(call.down_arrays or call.up_arrays for call in runs[1].grid.passed)
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)
        assert same_models(runs[0].grid, runs[1].grid)
        assert len(result.arrays) == 0

    def test_nothing_but_numbers_comes_back_from_the_distillation(self) -> None:
        run = party("ktpfl")
        run.start(1)
        for call in run.grid.of(1, "distill").values():
            assert call.up is None
            assert call.up_arrays == []
        for call in run.grid.of(1, "train").values():
            assert call.up_arrays == []
            assert set(call.metrics) == {"train-loss", "trained-accuracy"}
        assert not any(call.down_arrays for call in run.grid.passed)


class TestConfig:
    def test_the_paper_s_values_of_heterogeneous_models(self) -> None:
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
        assert method.exchanged == "weights, a mixture for each client"
        assert dict(method.fixed) == {}
