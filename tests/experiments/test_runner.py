"""Whole experiments: Ray and the in-process grid give the same numbers, and every method runs with its defaults."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.data import DataError, DataSpec, load
from flwr_kd.distillation.student import Distillation
from flwr_kd.experiments import data, runner
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.learning.cores import Cores
from flwr_kd.results.schema import RunResult
from flwr_kd.server.records import RoundStats
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing.synchronisations import DEVICE, CountingDevice

SMALL: dict[str, Any] = {
    "clients": 3, "rounds": 2, "limit": 150, "workers": 2, "backend": "inline", "device": "cpu"
}  # fmt: skip


def untimed(result: RunResult) -> list[dict[str, Any]]:
    rounds = [dataclasses.asdict(each) for each in result.rounds]
    for each in rounds:
        assert each.pop("seconds") > 0
    return rounds


@pytest.fixture(scope="module")
def ray_runs() -> tuple[RunResult, RunResult]:
    """Two runs, one after the other in this process, with different numbers of workers."""
    ours = {"OMP_NUM_THREADS": "3", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "7"}
    method = registry.get("fedhkd")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        first, second = (
            run(method, Experiment(**{**SMALL, "backend": "ray", "workers": workers})) for workers in (2, 1)
        )
        assert {name: os.environ[name] for name in ours} == ours
    return first, second


@pytest.mark.ray
@pytest.mark.xdist_group("ray runs")
def test_ray_and_the_inline_grid_agree_to_the_last_bit(ray_runs: tuple[RunResult, RunResult]) -> None:
    inline = run(registry.get("fedhkd"), Experiment(**SMALL))
    assert untimed(ray_runs[0]) == untimed(inline)
    assert ray_runs[0].histogram == inline.histogram
    assert ray_runs[0].hyperparameters == inline.hyperparameters
    assert all(each.participants == 3 for each in ray_runs[0].rounds)


@pytest.mark.ray
@pytest.mark.xdist_group("ray runs")
def test_a_second_run_in_the_process_gives_the_same_numbers_with_other_workers(
    ray_runs: tuple[RunResult, RunResult],
) -> None:
    first, second = ray_runs
    assert untimed(first) == untimed(second)


@pytest.mark.ray
@pytest.mark.xdist_group("ray runs")
def test_ray_is_gone_after_the_run(ray_runs: tuple[RunResult, RunResult]) -> None:
    import ray

    assert not ray.is_initialized()


@pytest.mark.first_variant
@pytest.mark.parametrize("name", registry.methods())
def test_every_method_runs_with_no_further_option(name: str) -> None:
    method, seen = registry.get(name), list[RoundStats]()
    result = run(method, Experiment(**SMALL), on_round=seen.append)
    assert (result.method, result.seed) == (name, 0)
    assert [each.round for each in result.rounds] == [s.server_round for s in seen] == [1, 2]
    for each in result.rounds:
        assert (each.participants, each.failures) == (3, 0)
        assert each.local_accuracy is not None
        assert 0 < each.local_accuracy <= 1
        assert (each.global_accuracy is not None) == method.global_model
        assert each.bytes_up > 0
        # By default the clients' models are measured on the common test set after the last round, and the global
        # one on theirs.
        assert (each.common_accuracy is not None) == (each.common_top5 is not None) == (each.round == 2)
        assert (each.global_on_clients is not None) == (method.global_model and each.round == 2)
        assert (each.global_top5 is not None) == method.global_model
    assert result.hyperparameters == method.config().to_wire()
    # Every training sample belongs to one client, and the histogram leaves out the test rows.
    assert len(result.histogram) == 3
    splits = client_splits(Experiment(**SMALL))
    assert [sum(row) for row in result.histogram] == [len(train) for train, _ in splits]


def test_another_seed_gives_other_numbers_and_the_same_seed_the_same() -> None:
    method = registry.get("fedavg")
    one, again, other = (run(method, Experiment(**{**SMALL, "seed": seed})) for seed in (1, 1, 2))
    assert untimed(one) == untimed(again)
    assert untimed(one) != untimed(other)
    assert one.histogram != other.histogram


@pytest.mark.program
def test_processes_and_the_inline_grid_agree_to_the_last_bit() -> None:
    inline, processes = (
        run(registry.get("fedhkd"), Experiment(**{**SMALL, "backend": backend}))
        for backend in ("inline", "processes")
    )
    assert untimed(processes) == untimed(inline)
    assert processes.hyperparameters == inline.hyperparameters


def test_the_number_of_workers_and_threads_changes_nothing() -> None:
    method, threads = registry.get("fedhkd"), torch.get_num_threads()
    one, three = (run(method, Experiment(**{**SMALL, "workers": workers})) for workers in (1, 3))
    assert untimed(one) == untimed(three)
    assert torch.get_num_threads() == threads


def test_the_server_computes_on_as_many_cores_as_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers stay the same, also of its own distillation."""
    counts: list[int] = []
    on_cores = Distillation.on_cores

    def noted(self: Distillation, device: torch.device) -> Cores:
        cores = on_cores(self, device)
        counts.append(cores.count)
        return cores

    monkeypatch.setattr(Distillation, "on_cores", noted)
    method = registry.get("fedhyb-star")
    options = {"server_epochs": 1, "generator_steps": 2, "sub_networks": 1, "synthetic_samples": 40}
    config = dataclasses.replace(method.config(), **options)
    small = {**SMALL, "rounds": 1}
    one, three = (run(method, Experiment(**{**small, "workers": workers}), config) for workers in (1, 3))
    assert counts == [1, 1, 3, 3]
    assert untimed(one) == untimed(three)


def test_methods_share_partitions_and_initial_weights() -> None:
    experiment = Experiment(**SMALL)
    first, again = experiment.build_model(0).state_dict(), experiment.build_model(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = Experiment(**{**SMALL, "seed": 1}).build_model().state_dict()
    assert not all(torch.equal(first[name], other[name]) for name in first)
    histograms = {name: run(registry.get(name), experiment).histogram for name in ("fedavg", "fedproto")}
    assert histograms["fedavg"] == histograms["fedproto"]


def test_splits_are_disjoint_and_of_training_rows() -> None:
    splits = client_splits(Experiment(**SMALL))
    rows = [int(row) for pair in splits for part in pair for row in part]
    assert len(rows) == len(set(rows)) <= len(load("digits", seed=0, limit=150).train)


def test_models_are_given_out_in_turn_where_the_method_allows() -> None:
    experiment = Experiment(**{**SMALL, "model": "mlp,lenet", "feature_dim": 16})
    kinds = [sorted(experiment.build_model(index).state_dict()) for index in range(3)]
    assert kinds[0] == kinds[2] != kinds[1]
    result = run(registry.get("fedproto"), experiment)
    assert [each.failures for each in result.rounds] == [0, 0]
    with pytest.raises(ConfigError, match="fedavg needs one model for all clients, got --model mlp,lenet"):
        run(registry.get("fedavg"), experiment)


def test_a_method_brings_its_own_models_and_measures() -> None:
    method = registry.get("fedgkt")
    own = Experiment(**SMALL).of(method)
    assert own.models == ["resnet2", "resnet4", "resnet6", "resnet10", "resnet12"]
    assert Experiment(**{**SMALL, "model": "mlp"}).of(method).models == ["mlp"]
    assert Experiment(**SMALL).of(registry.get("fedavg")).models == Experiment(**SMALL).models == ["mlp"]
    measured = run(method, Experiment(**SMALL))
    assert measured.rounds[-1].server_accuracy is not None
    silent = run(method, Experiment(**SMALL), method.config(["send-test-features=false"]))
    assert silent.rounds[-1].server_accuracy is None
    assert silent.rounds[-1].bytes_up < measured.rounds[-1].bytes_up


def test_each_clients_numbers_are_kept() -> None:
    result = run(registry.get("fedproto"), Experiment(**SMALL))
    for each in result.rounds:
        assert sorted(each.clients) == ["0", "1", "2"]
        for name in ("local_accuracy", "local_top5"):
            values = [client[name] for client in each.clients.values()]
            assert getattr(each, name) == pytest.approx(sum(v for v in values if v is not None) / 3)
        assert each.local_top5 is not None
        assert each.local_accuracy is not None
        assert each.local_accuracy <= each.local_top5


def test_images_can_be_padded_and_augmented() -> None:
    method, options = registry.get("fedavg"), {**SMALL, "model": "cnn", "rounds": 1}
    plain, larger, moved = (
        run(method, Experiment(**options, **more)).rounds[0]
        for more in ({}, {"image_size": 12}, {"augment": "crop"})
    )
    assert larger.bytes_up > plain.bytes_up
    assert moved.bytes_up == plain.bytes_up
    assert moved.train_loss != plain.train_loss


def test_a_long_tail_is_cut_before_the_data_is_divided() -> None:
    options = {**SMALL, "limit": None, "rounds": 1}
    plain, tail = Experiment(**options), Experiment(**options, imbalance=20, partition="inner-dirichlet:0.5")
    whole, cut = data.bundle_of(plain), data.bundle_of(tail)
    assert torch.equal(whole.test.x, cut.test.x)
    assert torch.equal(whole.test.y, cut.test.y)
    assert torch.equal(data.public_of(plain).x, data.public_of(tail).x)
    # Class c keeps 5 x 20 ** (1 - c / 9) samples.
    profile = [100, 72, 51, 37, 26, 19, 14, 10, 7, 5]
    assert torch.bincount(cut.train.y).tolist() == profile
    splits = client_splits(tail)
    rows = np.concatenate([part for pair in splits for part in pair])
    assert sorted(rows.tolist()) == list(range(sum(profile)))
    result = run(registry.get("fedavg"), tail)
    held_out = torch.bincount(cut.train.y[np.concatenate([test for _, test in splits])], minlength=10)
    sums = [sum(column) for column in zip(*result.histogram, strict=True)]
    assert [a + b for a, b in zip(sums, held_out.tolist(), strict=True)] == profile
    # The long tail is cut from the samples that the limit has left.
    limited = data.bundle_of(Experiment(**{**SMALL, "imbalance": 2}))
    assert torch.bincount(limited.train.y).tolist() == [14, 13, 12, 11, 10, 10, 9, 8, 8, 7]
    assert tail.shared()["imbalance"] == 20


def test_clients_have_the_number_of_samples_that_is_asked_for() -> None:
    experiment = Experiment(**{**SMALL, "limit": None, "client_samples": 100})
    assert experiment.limit == 3 * 133
    assert [len(train) for train, _ in client_splits(experiment)] == [100] * 3
    # An experiment that is made anew, for example from a result's config, has both numbers.
    assert Experiment(**dataclasses.asdict(experiment)) == experiment
    uneven = dataclasses.replace(experiment, partition="dirichlet:0.5")
    assert sum(len(train) + len(test) for train, test in client_splits(uneven)) == 3 * 133


def test_a_merged_test_set_leaves_no_global_accuracy_and_all_samples_to_the_clients() -> None:
    experiment = Experiment(**{**SMALL, "limit": None, "merge_test": True, "hold_back": 97, "rounds": 1})
    assert len(data.bundle_of(experiment).test) == 0
    assert sum(len(train) + len(test) for train, test in client_splits(experiment)) == 1700
    assert len(data.public_of(experiment)) == 97
    (only,) = run(registry.get("fedavg"), experiment).rounds
    assert only.global_accuracy is None
    assert only.local_accuracy is not None
    # With a validation part there is something to measure the global model on.
    held = dataclasses.replace(experiment, validation=True)
    assert run(registry.get("fedavg"), held).rounds[0].global_accuracy is not None


def test_some_classes_are_those_of_the_model() -> None:
    experiment = Experiment(**{**SMALL, "limit": None, "classes": "3,8", "rounds": 1})
    result = run(registry.get("fedavg"), experiment)
    assert {len(row) for row in result.histogram} == {2}
    assert experiment.build_model()(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


def test_hyper_parameters_that_do_not_go_with_the_classes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "run_inline", lambda *a, **k: pytest.fail("it ran"))
    method = registry.get("feddkc-kkr")
    with pytest.raises(ConfigError, match=r"target-peak must be in \(1/C, 1\) = \(0\.1, 1\) for C = 10"):
        run(method, Experiment(**SMALL), method.config(["target-peak=0.05"]))


def test_a_failing_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: KDStrategy, *args: Any) -> None:
        raise ArithmeticError("the matrix is singular")

    method = registry.get("fedavg")
    monkeypatch.setattr(method.strategy, "aggregate_phase", fail)
    with pytest.raises(SimulationError, match="fedavg: the server failed: the matrix is singular") as caught:
        run(method, Experiment(**SMALL))
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_a_fraction_of_the_clients() -> None:
    result = run(registry.get("fedavg"), Experiment(**{**SMALL, "fraction_train": 0.34}))
    assert [each.participants for each in result.rounds] == [1, 1]


def test_training_in_reduced_precision() -> None:
    losses = [
        run(registry.get("fedavg"), Experiment(**SMALL, precision=precision)).rounds[0].train_loss
        for precision in ("float32", "bfloat16")
    ]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("name", ["fedavg", "fedgkt", "fedhyb-star", "fedproto", "ktpfl", "ktpfl-weights"])
def test_images_in_channels_last_memory(name: str) -> None:
    """What is sent has the same form, and the numbers differ only in what the order of sums changes."""
    small = {**SMALL, "model": "lenet", "limit": 60, "workers": 1}
    method, config = (
        registry.get(name),
        registry.get(name).config(["local-epochs=1", *registry.get(name).quick]),
    )
    plain, images = (
        run(method, Experiment(**small, channels_last=channels_last), config)
        for channels_last in (False, True)
    )
    assert [each.bytes_up for each in images.rounds] == [each.bytes_up for each in plain.rounds]
    assert [each.train_loss for each in images.rounds] == pytest.approx(
        [each.train_loss for each in plain.rounds], rel=1e-3
    )


def test_cuda_is_deterministic_during_a_run_unless_the_experiment_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        runner, "resolve_device", lambda name: torch.device("cpu" if name == "cpu" else "cuda")
    )
    seen: list[bool] = []
    for nondeterministic in (False, True):
        experiment = Experiment(**{**SMALL, "device": "auto"}, nondeterministic=nondeterministic)
        run(
            registry.get("fedavg"),
            experiment,
            on_round=lambda stats: seen.append(torch.are_deterministic_algorithms_enabled()),
        )
    assert seen == [True, True, False, False]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["fedavg", "ktpfl"])
def test_on_a_device_the_data_is_there_and_the_numbers_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**SMALL, "workers": 1, "attack": "label-flip", "attackers": 1}
    method, device = registry.get(name), CountingDevice()
    expected = run(method, Experiment(**small))
    real = runner.run_inline

    def on_device(app: Any, *rest: Any) -> None:
        def call(message: Any, context: Any) -> Any:
            # A mode of PyTorch is one thread's, and clients have a thread of their own.
            with device:
                return app(message, context)

        real(call, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run_inline", on_device)
    with device:
        experiment = Experiment(**{**small, "device": str(DEVICE)})
        actual = run(method, experiment)
        for samples in (data.training_on_device(experiment), data.public_on_device(experiment)):
            assert samples.x.device == samples.y.device == DEVICE
    # The last digits differ: there is no fused optimiser for this device.
    for number in ("train_loss", "local_accuracy", "global_accuracy"):
        values = [[getattr(each, number) or 0.0 for each in result.rounds] for result in (actual, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), number


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"channels_last": 1}, "channels-last must be of type bool, got 1"),
        ({"clients": 0}, "clients must be a whole number from 1, got 0"),
        ({"rounds": 1.5}, "rounds must be a whole number from 1, got 1.5"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
        ({"workers": True}, "workers must be a whole number from 1, got True"),
        ({"backend": "dask"}, "unknown backend 'dask'; valid: auto, processes, inline, ray"),
        ({"model": "mlp,lenett"}, r"unknown model 'lenett' \(did you mean 'lenet'\?\); valid: .*resnet8"),
        ({"fraction_train": 0.0}, r"fraction-train must be in \(0, 1\], got 0.0"),
        ({"imbalance": 0.5}, "imbalance must be a finite number from 1, got 0.5"),
        ({"imbalance": float("nan")}, "imbalance must be a finite number from 1, got nan"),
        ({"imbalance": True}, "imbalance must be a finite number from 1, got True"),
        ({"client_samples": 0}, "client-samples must be a whole number from 1, got 0"),
        ({"client_samples": 9}, "client-samples=9 makes limit 36 for clients=3: leave limit out, got 150"),
        ({"classes": "1"}, "classes must be a number of classes from 2"),
        ({"class_limit": 0}, "class-limit must be a whole number from 1, got 0"),
        ({"hold_back": -1}, "hold-back must be a whole number from 1, got -1"),
        ({"merge_test": 1}, "merge-test must be true or false, got 1"),
        ({"merge_test": True, "test_fraction": 0}, "test-fraction of 0 with merge-test leaves no sample"),
        (
            {"own": DataSpec(("a", "b"), (4,)), "classes": "2"},
            "classes selects samples of a data set, but the clients have data of their own",
        ),
        ({"feature_dim": 0}, "feature-dim must be a whole number from 1, got 0"),
        ({"device": "tpu"}, "device must be auto, cpu"),
        ({"precision": "float16"}, "precision must be one of float32, bfloat16, got 'float16'"),
    ],
)
def test_what_is_not_allowed_is_refused_at_construction(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, DataError), match=text):
        Experiment(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": "digit"}, "digits"),
        ({"partition": "dirichlet"}, "dirichlet"),
        ({"partition": "pathological:99"}, "99"),
        ({"clients": 5000}, "5000"),
        (
            {"classes": "9-11"},
            r"data set 'digits': classes must be among the data set's 0 \.\. 9, got '9-11'",
        ),
        (
            {"client_samples": 999, "limit": None},
            "client-samples=999 needs 3996 training samples for clients=3 and their test splits, but .* 1079",
        ),
        (
            {"dataset": "mnist", "hold_back": 9},
            'hold-back=9 needs public="mnist": otherwise mnist holds nothing',
        ),
        ({"imbalance": 50}, "imbalance factor 50 needs at least 50 samples of class 0 for one of class 9"),
    ],
)
def test_data_and_partitions_are_refused_before_anything_runs(
    options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_inline", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(DataError, match=text):
        run(registry.get("fedavg"), Experiment(**{**SMALL, **options}))


def test_a_model_that_does_not_take_the_data_is_refused(tmp_path: Any) -> None:
    table = tmp_path / "t.csv"
    table.write_text("\n".join(f"{i % 7},{i % 3},{'ab'[i % 2]}" for i in range(60)))
    with pytest.raises(ConfigError, match="model lenet does not fit csv:"):
        run(registry.get("fedavg"), Experiment(**{**SMALL, "dataset": f"csv:{table}", "model": "lenet"}))
    with pytest.raises(DataError, match=r"augment=crop is for images, csv:.* has \[2\]"):
        run(registry.get("fedavg"), Experiment(**{**SMALL, "dataset": f"csv:{table}", "augment": "crop"}))


def test_a_validation_part_takes_the_place_of_the_test_set() -> None:
    plain = Experiment(seed=3)
    held = dataclasses.replace(plain, validation=True, imbalance=10.0)
    full, cut = data.bundle_of(plain), data.bundle_of(held)
    train, validation = ({tuple(x.flatten().tolist()) for x in part.x} for part in (cut.train, cut.test))
    everything = {tuple(x.flatten().tolist()) for x in full.train.x}
    assert validation < everything
    assert train < everything
    assert not train & validation
    assert len(cut.test) == pytest.approx(len(full.train) / 5, abs=1)
    # Only the clients' samples have a long tail.
    share = torch.bincount(cut.test.y) / len(cut.test)
    assert share.min() > 0.08
    assert torch.bincount(cut.train.y).max() == 10 * torch.bincount(cut.train.y).min()


def test_measured_rounds_change_no_other_number() -> None:
    method = registry.get("fedprox")
    never, always = (
        untimed(run(method, Experiment(**SMALL, measure=measure))) for measure in ("never", "every:1")
    )
    added = ("common_accuracy", "common_top5", "global_on_clients", "global_on_clients_top5")
    for one, other in zip(never, always, strict=True):
        assert all(one[name] is None and other[name] > 0 for name in added)
        same = {name: value for name, value in one.items() if name not in (*added, "clients")}
        assert same.items() <= other.items()
        assert all(set(client) == {"local_accuracy", "local_top5"} for client in one["clients"].values())
        assert other["common_accuracy"] == np.mean([c["common_accuracy"] for c in other["clients"].values()])


def test_without_test_splits_clients_train_on_all_samples_and_common_accuracy_is_measured() -> None:
    method, every = registry.get("fedproto"), Experiment(**SMALL, measure="every:1", test_fraction=0)
    result = run(method, every)
    assert sum(map(sum, result.histogram)) == SMALL["limit"]
    assert all(len(test) == 0 for _, test in client_splits(every))
    for each in result.rounds:
        assert (each.local_accuracy, each.local_top5) == (None, None)
        assert each.common_accuracy is not None
        assert sorted(each.clients) == ["0", "1", "2"]
    half = client_splits(Experiment(**SMALL, test_fraction=0.5))
    assert [len(train) - len(test) in (-1, 0, 1) for train, test in half] == [True] * 3
    for value in (-0.1, 1, "0.25"):
        with pytest.raises(
            ConfigError, match=r"test-fraction must be .* from 0 to below 1|test-fraction must be"
        ):
            Experiment(test_fraction=value)  # type: ignore[arg-type]


def test_client_samples_count_with_the_share_of_the_test_split() -> None:
    for fraction, limit in ((0.25, 2 * 53), (0.0, 2 * 40)):
        assert Experiment(clients=2, client_samples=40, test_fraction=fraction).limit == limit
