"""``dp-clip`` and ``dp-noise``: what a client sends, against explicit loops, and in small federations."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import Strategy
from scipy.stats import kstest
from torch import nn

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.client import reply as core
from flwr_kd.client.private_update import clipping_factor, noise_refusal, noisy, private_update
from flwr_kd.seeding import torch_generator
from flwr_kd.server import run as server_run
from flwr_kd.server.stated_privacy import releases_per_round, stated_privacy
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedproto import FedProto
from flwr_kd.testing.federation import Federation, blobs, small_model
from flwr_kd.transport import flower_records
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.wire_version import VERSION, WIRE_VERSION

NDArray = npt.NDArray[Any]


def joint_norm(update: Sequence[NDArray]) -> float:
    """Return the L2 norm of all elements, one by one."""
    total = 0.0
    for array in update:
        for element in array.ravel().tolist():
            total += element * element
    return math.sqrt(total)


def clipped(update: Sequence[NDArray], bound: float) -> list[NDArray]:
    """Return the update, shortened to a norm."""
    norm = joint_norm(update)
    return [array if norm <= bound else array * (bound / norm) for array in update]


def answer(
    model: nn.Module, *settings: str, reproducible: bool = True, seed: int = 0
) -> tuple[list[str], list[NDArray], list[NDArray]]:
    """Return the names, and a client's arrays before and after a training."""
    context = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
    client = FedAvgClient(model, blobs(24, 0), context=context, device="cpu", reproducible_noise=reproducible)
    strategy = FedAvg(FedAvg.config_class.from_texts(["local-epochs=2", *settings]), seed=seed)
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    before = client.arrays(())
    sent, _, _ = client.fit(before, run.messages.config("train", 1, strategy.template.names))
    return list(strategy.template.names), before, sent


def difference(after: Sequence[NDArray], before: Sequence[NDArray]) -> list[NDArray]:
    return [np.asarray(a, dtype=np.float64) - b for a, b in zip(after, before, strict=True)]


class TestClipping:
    def test_the_factor_is_that_of_explicit_loops(self) -> None:
        rng = np.random.default_rng(0)
        for bound in (0.01, 1.0, 30.0):
            update = [rng.normal(size=shape) for shape in ((3, 4), (5,), ())]
            update = [np.asarray(array) for array in update]
            expected = min(1.0, bound / joint_norm(update))
            assert clipping_factor(update, bound) == pytest.approx(expected, rel=1e-11)
            assert joint_norm([array * clipping_factor(update, bound) for array in update]) <= bound

    def test_what_is_not_finite_is_refused(self) -> None:
        with pytest.raises(FloatingPointError, match="norm nan"):
            clipping_factor([np.array([1.0, math.nan])], 1.0)

    def test_a_client_sends_its_update_clipped(self) -> None:
        _, before, plain = answer(small_model())
        update = difference(plain, before)
        _, _, sent = answer(small_model(), "dp-clip=0.05")
        assert joint_norm(update) > 0.05
        assert joint_norm(difference(sent, before)) == pytest.approx(0.05, rel=1e-4)
        for mine, expected in zip(difference(sent, before), clipped(update, 0.05), strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-7)

    def test_a_short_update_is_sent_as_it_is(self) -> None:
        _, _, plain = answer(small_model())
        _, _, sent = answer(small_model(), "dp-clip=1000")
        for mine, expected in zip(sent, plain, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)


class TestNoise:
    @pytest.mark.parametrize("seeded", [True, False])
    def test_it_is_gaussian_of_the_size_asked_for(self, seeded: bool) -> None:
        values = np.linspace(-1, 1, 20_000).reshape(100, 200)
        generator = torch_generator(3, "noise") if seeded else None
        noise = (noisy(values, 0.25, generator) - values).ravel()
        assert noise.std() == pytest.approx(0.25, rel=0.03)
        assert abs(noise.mean()) < 4 * 0.25 / math.sqrt(noise.size)
        assert kstest(noise / 0.25, "norm").pvalue > 0.0001

    def test_secret_noise_lies_on_a_lattice_and_rounds_towards_zero(self, monkeypatch: Any) -> None:
        step = 0.25 / 1024
        values = np.array([0.9 * step, -0.9 * step, 7.5 * step, -7.5 * step])
        steps = noisy(values, 0.25, None) / step
        assert (steps == np.rint(steps)).all()
        monkeypatch.setattr(
            "flwr_kd.secret_noise._discrete_gaussian", lambda _, size: np.zeros(size, np.int64)
        )
        assert (noisy(values, 0.25, None) / step).tolist() == [0, 0, 7, -7]

    def test_the_seed_decides_in_a_simulation_only(self) -> None:
        settings = ("dp-clip=0.05", "dp-noise=1")
        seeded = [answer(small_model(), *settings)[2] for _ in range(2)]
        secret = [answer(small_model(), *settings, reproducible=False)[2] for _ in range(2)]
        other = answer(small_model(), *settings, seed=1)[2]
        for first, second in zip(*seeded, strict=True):
            np.testing.assert_array_equal(first, second)
        assert not np.array_equal(secret[0][0], secret[1][0])
        assert not np.array_equal(seeded[0][0], other[0])

    @pytest.mark.parametrize("reproducible", [True, False])
    def test_a_client_adds_it_to_its_clipped_update(self, reproducible: bool) -> None:
        _, _, exact = answer(small_model(), "dp-clip=0.05")
        _, _, sent = answer(small_model(), "dp-clip=0.05", "dp-noise=2", reproducible=reproducible)
        noise = np.concatenate([array.ravel() for array in difference(sent, exact)])
        assert noise.std() == pytest.approx(0.1, rel=4 / math.sqrt(2 * noise.size))
        assert kstest(noise / 0.1, "norm").pvalue > 0.0001


class TestCoverage:
    def test_counters_are_sent_as_they_are_and_variances_stay_positive(self) -> None:
        names, _, plain = answer(small_model("batch-norm"))
        _, _, sent = answer(small_model("batch-norm"), "dp-clip=1", "dp-noise=5")
        kinds = {name.rpartition(".")[2] for name in names}
        assert {"num_batches_tracked", "running_var", "running_mean"} <= kinds
        for name, mine, clean in zip(names, sent, plain, strict=True):
            if name.endswith("num_batches_tracked"):
                assert mine == clean
            else:
                assert not np.array_equal(mine, clean)
            if name.endswith("running_var"):
                assert mine.min() == 0

    def test_frozen_parameters_are_sent_as_they_came(self) -> None:
        model = small_model()
        frozen = next(iter(model.parameters()))
        frozen.requires_grad_(False)
        _, before, sent = answer(model, "dp-clip=1", "dp-noise=5")
        same = [np.array_equal(mine, first) for mine, first in zip(sent, before, strict=True)]
        assert same == [True] + [False] * (len(same) - 1)

    def test_noise_on_masks_keeps_what_is_infinite(self) -> None:
        model = small_model()
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        names, _, sent = answer(model, "dp-clip=1", "dp-noise=0.1")
        (mask,) = [array for name, array in zip(names, sent, strict=True) if name.endswith("mask")]
        assert np.isfinite(mask[0])
        assert mask[1] == -math.inf


WITH_WEIGHTS = [name for name, method in registry.methods().items() if method.strategy.reply_arrays]
WITHOUT = [name for name in registry.methods() if name not in WITH_WEIGHTS]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_method_with_weights_sends_clipped_noisy_updates(name: str, monkeypatch: Any) -> None:
    seen: list[tuple[str, int, float, float]] = []
    released: dict[tuple[str, int], list[NDArray]] = {}

    def watched(client: Any, task: Any, arrays: list[NDArray]) -> list[NDArray]:
        if not arrays:
            return private_update(client, task, arrays)
        partition = client.context.node_config["partition-id"]
        start = client.start.of(client, arrays)
        public = [task.arrays[: len(arrays)], released.get((name, partition), [])]
        public += [[np.zeros_like(array) for array in arrays], list(initial)]
        # The update begins at what the server knows, or at what no data have changed.
        assert any(
            len(candidate) == len(start)
            and all(np.array_equal(a, b) for a, b in zip(candidate, start, strict=True))
            for candidate in public
        )
        floats = [place for place, array in enumerate(arrays) if array.dtype.kind == "f"]
        sent = private_update(client, task, arrays)
        expected = clipped(difference([arrays[i] for i in floats], [start[i] for i in floats]), 0.5)
        noise = [
            mine - best
            for place, mine, best in zip(
                floats,
                difference([sent[i] for i in floats], [start[i] for i in floats]),
                expected,
                strict=True,
            )
            if not task.names or not task.names[place].endswith("running_var")
        ]
        flat = np.concatenate([array.ravel() for array in noise])
        seen.append((task.phase, task.server_round, float(flat.std()), flat.size))
        released[name, partition] = sent
        return sent

    monkeypatch.setattr(core, "private_update", watched)
    initial = [value.numpy() for value in small_model().state_dict().values()]
    _, result = Federation(name, 3).run(2, settings=("dp-clip=0.5", "dp-noise=0.02"))
    assert [(r.participants, r.failures) for r in result.rounds] == [(3, 0)] * 2
    strategy = registry.get(name).strategy
    assert {phase for phase, *_ in seen} == {p for p in strategy.reply_arrays if not p.endswith("-again")}
    assert {server_round for _, server_round, *_ in seen} == {1, 2}
    for _, _, std, size in seen:
        assert std == pytest.approx(0.01, rel=6 / math.sqrt(2 * size))


@pytest.mark.parametrize("name", ["fedavg", "fedfomo"])
def test_a_simulation_has_the_same_noise_twice(name: str) -> None:
    settings = ("dp-clip=0.5", "dp-noise=0.1")
    first, second, plain = (
        Federation(name, 3).run(2, settings=chosen)[1].rounds for chosen in (settings, settings, ())
    )
    assert [r.train_loss for r in first] == [r.train_loss for r in second]
    assert [r.train_loss for r in first] != [r.train_loss for r in plain]


@pytest.mark.parametrize("name", ["fedfomo", "ktpfl-weights", "fedavg"])
def test_a_resumed_run_goes_on_from_what_was_sent(name: str, tmp_path: Path) -> None:
    settings = ("dp-clip=0.5", "dp-noise=0.1")

    def run(folder: Path, rounds: int, **more: Any) -> Any:
        nodes = {"node_configs": [{"state-dir": str(folder)}] * 3}
        strategy, result = Federation(name, 3).run(
            rounds, settings=settings, grid=nodes, checkpoint_dir=folder / "checkpoints", **more
        )
        return strategy, result.rounds[-1]

    whole, expected = run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 2)
    resumed, last = run(tmp_path / "parts", 3, resume=True)
    assert (last.train_loss, last.local_accuracy) == (expected.train_loss, expected.local_accuracy)
    states = [strategy.state_arrays() for strategy in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][key])


@pytest.mark.parametrize("name", WITHOUT)
def test_methods_without_weights_refuse_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"dp-clip must be 0 for \w+, whose clients send no weights"):
        Federation(name).strategy("dp-clip=1")


def test_noise_without_a_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp-clip must be > 0 with dp-noise=1"):
        FedAvg(dp_noise=1.0)
    with pytest.raises(ConfigError, match="dp-noise must be >= 0"):
        FedAvg(dp_clip=1.0, dp_noise=-1.0)


def test_a_run_states_its_privacy(monkeypatch: Any) -> None:
    flower_info: list[str] = []
    monkeypatch.setattr(server_run, "log", lambda _, text, *values: flower_info.append(text % values))
    Federation("fedavg", 3).run(2, settings=("dp-clip=0.5", "dp-noise=4"))
    (line,) = [text for text in flower_info if "dp-noise=4" in text]
    assert "2 updates per client" in line
    assert "epsilon" in line


def test_flowers_own_loop_states_its_privacy_so_far(monkeypatch: Any) -> None:
    flower_info: list[str] = []
    monkeypatch.setattr(server_run, "log", lambda _, text, *values: flower_info.append(text % values))
    fed = Federation("fedavg", 3)
    strategy = fed.strategy("dp-clip=0.5", "dp-noise=4")
    with closing(InlineGrid(fed.app(), 3)) as grid:
        Strategy.start(strategy, grid, fed.initial(), num_rounds=3)
    stated = [text for text in flower_info if text.startswith("privacy")]
    config, kind = strategy.config, type(strategy)
    expected = [stated_privacy(config, kind.phases, kind.reply_arrays, rounds) for rounds in (1, 2, 3)]
    assert stated == [
        *(f"privacy up to round 1: {line}" for line in expected[0]),
        f"privacy up to round 2: {expected[1][0]}",
        f"privacy up to round 3: {expected[2][0]}",
    ]
    assert expected[2][0].startswith("3 updates per client with dp-noise=4: epsilon ")


def test_what_is_stated_counts_a_leaders_second_update() -> None:
    kind = registry.get("fedhead").strategy
    config = registry.get("fedhead").config(["dp-clip=1", "dp-noise=3"])
    first, second = stated_privacy(config, kind.phases, kind.reply_arrays, 10)
    assert first.startswith("20 updates per client")
    assert second.startswith("not covered")
    assert stated_privacy(FedProto.config_class(), ("train",), (), 10) == []
    alone, _ = stated_privacy(registry.get("fedavg").config(["dp-clip=1"]), ("train",), {"train"}, 10)
    assert "protects nobody" in alone
    assert releases_per_round(("train", "distill"), {"train"}) == 1


@pytest.mark.parametrize(("least", "passes"), [(1.0, True), (2.0, True), (3.0, False)])
def test_an_owner_sets_the_least_noise(least: float, passes: bool) -> None:
    context = Context(1, 17, {"partition-id": 0, "least-dp-noise": least}, RecordDict(), {})
    client = FedAvgClient(small_model(), blobs(24, 0), context=context, device="cpu")
    strategy = FedAvg(local_epochs=1, dp_clip=1.0, dp_noise=2.0)
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    asked = {**strategy.config.to_wire(), VERSION: WIRE_VERSION}
    refusal = client.get_properties(asked).get(flower_records.REFUSAL)
    message = run.messages.config("train", 1, strategy.template.names)
    if passes:
        assert refusal is None
        client.fit(client.arrays(()), message)
        return
    text = "its node config asks for least-dp-noise=3, and the run has dp-noise=2"
    assert refusal == text
    with pytest.raises(ConfigError, match=text):
        client.fit(client.arrays(()), message)


def test_a_wrong_least_noise_is_named() -> None:
    with pytest.raises(ConfigError, match="least-dp-noise"):
        noise_refusal({"least-dp-noise": "much"}, FedAvg.config_class())


def test_a_client_is_freed_when_it_is_no_longer_referenced() -> None:
    context = Context(1, 17, {"partition-id": 0}, RecordDict(), {})
    client = FedAvgClient(small_model(), blobs(24, 0), context=context, device="cpu")
    strategy = FedAvg(local_epochs=1, dp_clip=1.0, dp_noise=1.0)
    run = strategy.prepare(ArrayRecord(client.model.state_dict()))
    client.fit(client.arrays(()), run.messages.config("train", 1, strategy.template.names))
    reference = weakref.ref(client)
    del client
    # Without the garbage collector: the runner lends its model to the next client.
    assert reference() is None
