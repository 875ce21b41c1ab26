"""KT-pFL on models: rounds, against the oracle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import coefficients
import numpy as np
import pytest
import torch
import transfer
import watched
from flwr.app import Array, Context, RecordDict
from torch import nn
from transfer_rounds import FAST, initial, same, weights_party
from watched import Party, Watched, equal, kept_model, same_models

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.ktpfl import (
    CoefficientMatrix,
    KTpFLWeights,
)
from flwr_kd.testing.faults import Fault


def check_models(run: Party, initial_weights: dict[str, Any]) -> None:
    """The same for models: what is sent, what comes, the matrix, the models that are kept, and accuracies."""
    config, grid = run.strategy.config, run.grid
    mirrors = [transfer.Mirror(*part) for part in zip(run.models, run.train, run.test, strict=True)]
    sgd = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    oracle, started = transfer.Matrix(range(len(mirrors))), set()
    for r, stats in enumerate(run.strategy_rounds, start=1):
        trained, distilled = grid.of(r, "train"), grid.of(r, "distill")
        keys, decay = sorted(trained), config.lr_decay ** ((r - 1) // config.lr_decay_every)
        before: dict[int, float] = {}
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
            before[n] = mirror.accuracy()
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
            actual = coefficients.transferred(own, goal, rate, config.distill_steps, scale)
            mirrors[n].take(dict(zip(names, actual, strict=True)))
            same([distilled[n].kept[name] for name in names], actual)
            assert distilled[n].metrics == {"local-accuracy": mirrors[n].accuracy()}
        if r == len(run.strategy_rounds):
            # After the last round all are measured, those that never trained with what they would be sent.
            for n in set(range(len(mirrors))) - started:
                mirrors[n].take(initial_weights)
            keys = range(len(mirrors))
        assert stats.clients == {
            n: {"local-accuracy": mirrors[n].accuracy()}
            | ({"trained-accuracy": before[n]} if n in before else {})
            for n in keys
        }


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
        for call in run.grid.passed:
            if call.phase == "train":
                sizes[call.partition].append(len(call.down_arrays))
                if call.down_arrays:
                    for actual, expected in zip(call.down_arrays, record.values(), strict=True):
                        np.testing.assert_array_equal(actual, expected.numpy())
        assert sum(map(len, sizes.values())) == 10
        assert all(not any(rest) and first == len(record) for first, *rest in sizes.values())

    def test_without_initial_arrays_each_begins_with_its_own(self) -> None:
        run = weights_party(local_epochs=1)
        run.models = [watched.net(2, seed=n) for n in range(4)]
        run.start(2)
        assert not any(call.down_arrays for call in run.grid.passed if call.phase == "train")
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
        assert {n for n, call in third.items() if call.down_arrays} == {2}
        for actual, expected in zip(third[2].down_arrays, last, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert not any(call.down_arrays for call in run.grid.of(4, "train").values())
        assert [stats.failures for stats in run.strategy_rounds] == [0] * 4

    def test_an_absent_client_keeps_its_personal_global_model(self) -> None:
        def arrive(grid: Watched, r: int) -> None:
            grid.away = {1} if r in (2, 3) else set()
            if r == 4:
                grid.restart(1)

        run = weights_party()
        run.start(4, initial=initial(run), grid={"arrive": arrive})
        last = run.grid.of(1, "distill")[1].down_arrays
        for actual, expected in zip(run.grid.of(4, "train")[1].down_arrays, last, strict=True):
            np.testing.assert_array_equal(actual, expected)

    def test_a_restarted_client_with_its_old_node_id_goes_on_too(self) -> None:
        """With ``--auth-supernode-private-key`` the node id outlives a restart, the state does not."""

        def arrive(grid: Watched, r: int) -> None:
            if r == 3:
                grid.context(2).state = RecordDict()

        run = weights_party()
        result = run.start(4, initial=initial(run), grid={"arrive": arrive})
        # The client reports the loss in round 3, which it misses, and is sent its personal global model in round 4.
        assert "no model of an earlier round is kept here" in run.grid.of(3, "train")[2].error
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [
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
        assert [call.error for call in again.grid.passed if call.error] == []
        assert (result.rounds[0].participants, result.rounds[0].failures) == (4, 0)

    def test_a_lost_answer_does_not_leave_a_client_without_a_model(self) -> None:
        faults = {1: Fault("raise", frozenset({1})), 3: Fault("silent", frozenset({1}))}
        run = weights_party()
        result = run.start(2, initial=initial(run), grid={"faults": faults}, timeout=0.2)
        second = run.grid.of(2, "train")
        assert {n for n, call in second.items() if call.down_arrays} == {1, 3}
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(2, 2), (4, 0)]

    def test_a_client_whose_answer_was_lost_goes_on_with_its_own_model(self) -> None:
        """The client is sent a model again, since the server does not know that it has one."""

        def arrive(grid: Watched, r: int) -> None:
            held[r] = {n: kept_model(grid.context(n)) for n in range(4)}

        held: dict[int, dict[int, Any]] = {}
        run = weights_party()
        faults = {1: Fault("late", frozenset({1}))}
        run.start(2, initial=initial(run), grid={"faults": faults, "arrive": arrive}, timeout=0.2)
        assert {n for n, call in run.grid.of(2, "train").items() if call.down_arrays} == {1}
        own = transfer.Mirror(watched.net(2), run.train[1], run.test[1])
        own.take(held[2][1])
        own.train(own.x, own.y, 8, 2, run.draw("train", 2, 1, "order"), rate=0.1)
        same(run.grid.of(2, "train")[1].up_arrays, list(own.weights().values()))

    def test_a_distillation_that_failed_costs_a_round(self) -> None:
        """Also if a reply is lost after the second phase; the client continues with its own model in the next."""
        run = weights_party()
        after = {
            "after": lambda r, phase, n, content: (
                content.clear() if (r, phase, n) == (1, "distill", 1) else None
            )
        }
        result = run.start(3, initial=initial(run), grid=after)
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 1), (4, 0), (4, 0)]
        assert {n for n, call in run.grid.of(2, "train").items() if call.down_arrays} == {1}
        assert not any(call.down_arrays for call in run.grid.of(3, "train").values())
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
        for n, call in run.grid.of(1, "distill").items():
            assert "FloatingPointError" in call.error
            assert "has outputs that are not finite; the model does not change" in call.error
            assert equal(call.kept, run.grid.of(1, "train")[n].kept)
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 4), (4, 0)]
        for call in run.grid.of(2, "distill").values():
            assert all(np.isfinite(value).all() for value in call.kept.values())

    def test_heterogeneous_models_are_refused_in_the_handshake(self) -> None:
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
        assert [stats.participants for stats in result.rounds] == [3, 3]
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
                for call in (run.grid.of(r, "train")[n], run.grid.of(r, "distill")[n]):
                    assert call.kept["2.num_batches_tracked"] == r * steps[n]
                    assert call.kept["2.num_batches_tracked"].dtype == np.int64
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
        for call in run.grid.of(1, "distill").values():
            for actual, goal in zip(call.kept.values(), call.down_arrays, strict=True):
                if actual.dtype.kind == "f":
                    np.testing.assert_allclose(actual, goal, rtol=1e-6)

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
        first = {n: call.up_arrays[place] for n, call in run.grid.of(1, "train").items()}
        for n, call in run.grid.of(1, "distill").items():
            bare = 1.5 * first[n] - 0.5 * first[(n + 1) % 4]
            assert (bare < 0).any() == (n < 3)
            np.testing.assert_allclose(call.down_arrays[place], np.maximum(bare, 0), rtol=1e-5, atol=1e-6)
            assert (call.down_arrays[place - 1] < 0).any()  # means may be
        for call in run.grid.passed:
            assert (call.kept["2.running_var"] >= 0).all()
        assert all((value >= 0).all() for name, value in run.matrices[-1].items() if "running_var" in name)
        assert [stats.failures for stats in result.rounds] == [0] * 3

    def test_nor_with_a_step_that_is_too_long_for_a_mean(self) -> None:
        """Half the number of weights is the mean's 1/2."""
        run = weights_party(reduction="mean", distill_learning_rate=200.0)
        result = run.start(2, initial=initial(run))
        size = 5 * 8 + 3 * 5 + 4 * 5 + 5 + 3
        text = f"distill-learning-rate times distill-weight must be <= {size / 2:g} for this model"
        for call in run.grid.of(1, "distill").values():
            assert text in call.error
            assert "got 200" in call.error
            assert (call.kept["2.running_var"] >= 0).all()
        assert [stats.failures for stats in result.rounds] == [4, 4]
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
        sent = [a for call in run.grid.passed for a in call.down_arrays]
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
        errors = {(call.server_round, call.phase, call.partition): call.error for call in run.grid.passed}
        assert [key for key, text in errors.items() if text] == [(1, "distill", 2)]
        assert "no model of this round's training is kept here" in errors[1, "distill", 2]
        assert "StateError" in errors[1, "distill", 2]
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 1), (4, 0)]
        measured = {key for key, values in result.rounds[0].clients.items() if "local-accuracy" in values}
        assert measured == {0, 1, 3}

    def test_dtypes_may_differ(self) -> None:
        run = weights_party()
        run.models = [*run.models[:3], watched.net(2).double()]
        for sets in (run.train, run.test):
            x, y = sets[3].tensors
            sets[3] = torch.utils.data.TensorDataset(x.double(), y)
        result = run.start(2, initial=initial(run))
        assert [(stats.participants, stats.failures) for stats in result.rounds] == [(4, 0)] * 2
        assert {a.dtype for a in run.grid.of(2, "distill")[3].kept.values()} == {
            np.dtype("float64"), np.dtype("int64"),
        }  # fmt: skip

    def test_bytes_are_a_model_up_and_a_model_down(self) -> None:
        run = weights_party()
        record = initial(run)
        result = run.start(2, initial=record)
        size = sum(len(value.data) for value in record.values())
        assert [stats.bytes_up for stats in result.rounds] == [4 * size] * 2
        assert [stats.bytes_down for stats in result.rounds] == [8 * size, 4 * size]

    def test_public_options_are_not_its_own(self) -> None:
        with pytest.raises((TypeError, ConfigError)):
            KTpFLWeights(public_set=watched.samples(0, 4))
        assert not registry.get("ktpfl-weights").public_at
