"""What a table costs: samples as they are divided, and what methods do beside their local training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flwr_kd import ExperimentOptions
from flwr_kd.experiments.data import client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.papers import estimate, library, rules
from flwr_kd.experiments.papers.schema import PaperCell, PaperExperiment


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "seconds_per_sample", lambda *args: 0.001)


def form(methods: tuple[str, ...], **settings: object) -> PaperExperiment:
    base = library.find("fedhkd/table-1")[1]
    return replace(
        base, methods=methods, controls=(), named={}, hyperparameters={}, inferred=(), settings=dict(settings)
    )


def cost(methods: tuple[str, ...], **settings: object) -> estimate.Cost:
    made = form(methods, **{"dataset": "digits", "clients": 4, "rounds": 3, **settings})
    return estimate.cost_of(made, [PaperCell(id="a")], 1)


@pytest.mark.parametrize("division", ["iid", "ktpfl-1:12", "ktpfl-1:30", "ktpfl-2:25", "inner-dirichlet:0.5"])
@pytest.mark.parametrize("clients", [4, 10])
def test_samples_are_counted_as_they_are_divided(division: str, clients: int) -> None:
    if division == "ktpfl-1:30" and clients == 10:
        pytest.skip("digits has too few samples")
    options = ExperimentOptions(dataset="digits", partition=division, clients=clients, limit=1000)
    sizes = [len(train) for train, _ in client_splits(Experiment.from_options(options, 0))]
    found = cost(("fedavg",), partition=division, clients=clients, limit=1000)
    batch, epochs = 64, 5
    batches = clients * -(-sum(sizes) // clients // batch)
    assert found.steps == pytest.approx(3 * epochs * batches, rel=0.25)


@pytest.mark.parametrize("classes", ["5", "2,5-7"])
def test_only_the_classes_that_are_used_are_counted(classes: str) -> None:
    options = ExperimentOptions(dataset="digits", partition="iid", clients=4, classes=classes)
    sizes = [len(train) for train, _ in client_splits(Experiment.from_options(options, 0))]
    one = form(("fedavg",), dataset="digits", clients=4, rounds=1, partition="iid", classes=classes)
    one = replace(one, hyperparameters={"all": {"batch-size": 1, "local-epochs": 1}})
    assert estimate.cost_of(one, [PaperCell(id="a")], 1).steps == pytest.approx(sum(sizes), rel=0.05)


def test_a_methods_own_work_and_each_reply_cost_time() -> None:
    plain, heavy = cost(("fedavg",)), cost(("dafkd",))
    assert plain.steps == heavy.steps
    assert plain.seconds is not None
    assert heavy.seconds is not None
    assert heavy.seconds > 4 * plain.seconds
    # Three replies of each of 4 clients, beside 5 passes over a quarter of the digits each.
    assert plain.seconds > 3 * 4 * 0.001 * 5 * 0.75 * 1079 / 4


def test_public_samples_and_a_warm_up_cost_time() -> None:
    made = form(("fedmd",), dataset="digits", public="digits", clients=4, rounds=3)
    longer = replace(made, hyperparameters={"fedmd": {"warmup-epochs": 10}})
    first, second = (estimate.cost_of(each, [PaperCell(id="a")], 1) for each in (made, longer))
    assert first.seconds is not None
    assert second.seconds is not None
    # Ten passes of 4 clients over a fifth of the digits.
    assert second.seconds - first.seconds == pytest.approx(10 * 4 * (1079 // 5) * 0.001)


def test_no_small_version_takes_longer_than_two_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the times of a step as they were measured on one core of a small machine."""
    per_sample = {"mlp": 4e-5, "mlp4": 8e-5, "lenet": 2e-4, "cnn": 3e-4, "resnet8": 3e-4, "bilstm": 1e-2}
    monkeypatch.setattr(
        estimate,
        "seconds_per_sample",
        lambda model, size, side=None: per_sample.get(model, 3e-4 if size.shape[-1] == 8 else 1.2e-3),
    )
    for paper, experiment in library.every():
        if experiment.trained and not experiment.runs_of and experiment.small is not None:
            small = rules.small_form(experiment)
            seconds = estimate.cost_of(small, small.run, 3).seconds
            assert seconds is not None
            assert seconds < 2 * 3600, f"{paper.id}/{experiment.id}: {seconds / 60:.0f} min"
