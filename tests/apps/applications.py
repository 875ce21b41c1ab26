"""The apps, the settings of their runs on a SuperLink, and the numbers that these runs must have."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flwr_kd import registry
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.results import schema

APPS = Path(__file__).resolve().parents[2] / "apps"
CLIENTS, ROUNDS, SEED = 3, 2, 5


@dataclass(frozen=True)
class App:
    """An app, the settings of its run on a SuperLink, and settings that it must refuse."""

    name: str
    method: str
    set: dict[str, Any]
    wrong: tuple[tuple[dict[str, Any], str], ...]
    others: tuple[str, ...] = ()
    """Methods with further hyper-parameters, which its ``pyproject.toml`` also has."""

    @property
    def folder(self) -> Path:
        return APPS / self.name

    @property
    def settings(self) -> dict[str, Any]:
        project = tomllib.loads((self.folder / "pyproject.toml").read_text("utf-8"))
        return dict(project["tool"]["flwr"]["app"]["config"])

    @property
    def page(self) -> str:
        return (self.folder / "README.md").read_text("utf-8")

    @property
    def defaults(self) -> dict[str, Any]:
        """The method's own hyper-parameters."""
        return registry.get(self.method).config_class().to_wire()

    @property
    def hyperparameters(self) -> frozenset[str]:
        """The names of all methods' hyper-parameters."""
        names = (self.method, *self.others)
        return frozenset().union(*(registry.get(name).config_class().to_wire() for name in names))

    def run_config(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of its run on a SuperLink, without ``out``."""
        shared = {"num-server-rounds": ROUNDS, "min-nodes": CLIENTS, "seed": SEED}
        return {**shared, **self.set, **settings}

    def context(self, **settings: Any) -> Context:
        changed = {name.replace("_", "-"): value for name, value in settings.items()}
        config = {**self.settings, **changed}
        return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)


FEDHKD = App(
    name="fedhkd",
    method="fedhkd",
    set={"local-epochs": 2, "gamma": 0.2, "sigma": 0.5, "reproducible-noise": True},
    wrong=(({"gamma": -1.0}, r"gamma must be >= 0, got -1"),),
)
FEDDKC = App(
    name="feddkc",
    method="feddkc-skr",
    set={"batch-size": 32, "method": "feddkc-skr", "target-entropy": 1.2, "send-test-features": True},
    wrong=(
        ({"beta": -1.0}, r"beta must be >= 0, got -1"),
        ({"method": "feddkc-krr"}, r"method must be one of feddkc-kkr, feddkc-skr, got 'feddkc-krr'"),
        ({"refinement": "skr"}, r"refinement is fixed at 'kkr' by feddkc-kkr, got 'skr'"),
        ({"target_peak": 0.05}, r"target-peak .*0\.05"),
        # The defaults are for 10 classes; the error names a value for fewer.
        (
            {"classes": "a,b,c", "input_shape": "1x8x8"},
            r"target-peak .* C = 3 classes, got 0\.12; target-peak=0\.4 in the run config is for 3 classes",
        ),
        (
            {"method": "feddkc-skr", "classes": "a,b,c", "input_shape": "1x8x8"},
            r"target-entropy .* C = 3 classes, got 3\.2; target-entropy=1\.53 in the run config is for 3 classes",
        ),
        ({"method": "feddkc-skr", "target_entropy": 9.0}, r"target-entropy .*9"),
        ({"model": "resnet2,resnt4"}, r"resnt4.*resnet4"),
    ),
)
FEDHEAD = App(
    name="fedhead",
    method="fedhead-plus",
    set={
        "method": "fedhead-plus",
        "local-epochs": 2,
        "sectors": 2,
        "sector-epochs": 2,
        "server-epochs": 2,
    },
    wrong=(
        ({"sectors": 0}, r"sectors must be >= 1, got 0"),
        ({"assignment": "clients"}, r"assignment must be one of random, client, got 'clients'"),
        ({"method": "fedavg"}, r"method must be one of fedhead, fedhead-plus, got 'fedavg'"),
        ({"method": "fedhead-plus", "public": "mnst"}, r"mnst.*mnist"),
        ({"method": "fedhead-plus", "public": "sst2"}, r"'sst2' \(texts\) .* 'digits' \(images\)"),
        ({"public_limit": 0}, r"public-limit must be a whole number from 1, got 0"),
        ({"model": "mlp,lenet"}, r"fedhead needs one model for all clients"),
    ),
)
FEDHYB = App(
    name="fedhyb",
    method="fedhyb",
    set={
        "batch-size": 32,
        "local-epochs": 2,
        "server-epochs": 2,
        "sub-networks": 1,
        "min-width": 0.6,
        "generator-steps": 3,
        "synthetic-samples": 60,
    },
    wrong=(
        ({"method": "fedhyb-9"}, r"method must be one of fedhyb, fedhyb-star, .*, got 'fedhyb-9'"),
        ({"min_width": 0.0}, r"min-width must be > 0 and <= 1, got 0"),
        ({"min_scale": 3.0}, r"min-scale must be at most max-scale, got 3.0 and"),
        ({"dynamic_weighting": 1}, r"dynamic-weighting must be of type bool, got 1"),
        ({"imbalance": 0.5}, r"imbalance must be a finite number from 1, got 0.5"),
        ({"public": "mnst"}, r"mnst.*mnist"),
        (
            {"dataset": "csv:letter.csv", "public": "mnist"},
            r"'mnist' \(images\) .* 'csv:letter.csv' \(tables\)",
        ),
        ({"method": "fedhyb-3", "self_weight": 7.0}, r"self-weight is fixed at 0.0 by fedhyb-3, got 7.0"),
        (
            {"method": "fedhyb-2", "dynamic_weighting": False},
            r"dynamic-weighting is fixed at True by fedhyb-2, got False",
        ),
        ({"method": "fedhyb-star", "model": "mlp,lenet"}, r"fedhyb-star needs one model for all clients"),
    ),
)
KTPFL = App(
    name="ktpfl",
    method="ktpfl",
    others=("fedmd",),
    set={
        "batch-size": 32,
        "local-epochs": 2,
        "learning-rate": 0.05,
        "public-samples": 50,
        "distill-epochs": 2,
        "coefficient-learning-rate": 0.02,
    },
    wrong=(
        ({"method": "ktpfl-weights"}, r"method must be one of ktpfl, sim-pfl, .*, got 'ktpfl-weights'"),
        ({"public_at": "everywhere"}, r"public-at must be one of clients, server, got 'everywhere'"),
        ({"public": "mnst"}, r"mnst.*mnist"),
        ({"public": "sst2"}, r"'sst2' \(texts\) .* 'digits' \(images\)"),
        ({"public_limit": 0}, r"public-limit must be a whole number from 1, got 0"),
        ({"rho": 60.0}, r"coefficient-learning-rate times rho must be <= 0.5.* got 0.01 times 60"),
        ({"coefficients": "cosine"}, r"coefficients is fixed at 'learned' by ktpfl, got 'cosine'"),
        (
            {"method": "topk-pfl", "coefficients": "cosine"},
            r"coefficients is fixed at 'top-k' by topk-pfl, got 'cosine'",
        ),
        ({"model": "mlp,lenett"}, r"lenett.*lenet"),
        ({"model": "mlp,bilstm"}, r"model bilstm does not fit digits"),
        (
            {"method": "fedmd", "warmup_epochs": 1, "public_at": "server"},
            r"warmup-epochs must be 0 where public-at=server",
        ),
    ),
)
APPLICATIONS = (FEDHKD, FEDDKC, FEDHEAD, FEDHYB, KTPFL)


def slow_but(quick: Collection[App]) -> list[Any]:
    """Return all apps as parameters of a test, of which those that are not ``quick`` are in the slow tier."""
    return [
        pytest.param(app, id=app.name, marks=() if app in quick else pytest.mark.slow) for app in APPLICATIONS
    ]


def same_rounds(actual: schema.RunResult, expected: schema.RunResult) -> None:
    assert len(actual.rounds) == ROUNDS
    for ours, theirs in zip(actual.rounds, expected.rounds, strict=True):
        assert (ours.participants, ours.failures) == (CLIENTS, 0), f"round {ours.round}"
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        for name in ("local_accuracy", "local_top5", "global_accuracy", "server_accuracy", "train_loss"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6), name
        assert ours.clients == theirs.clients


def same_as_simulated(app: App, comparison: schema.Comparison) -> None:
    """Compare the result of a run with :meth:`App.run_config` with that of the inline backend."""
    method = registry.get(app.method)
    expected = run(
        method,
        Experiment(clients=CLIENTS, rounds=ROUNDS, seed=SEED, backend="inline", device="cpu"),
        method.config(
            f"{name}={value}"
            for name, value in app.set.items()
            if name in app.defaults and name not in method.fixed
        ),
    )
    (actual,) = comparison.runs
    assert (actual.method, actual.seed) == (app.method, SEED)
    assert actual.hyperparameters == expected.hyperparameters
    assert comparison.config["clients"] == CLIENTS
    assert f"seed={SEED}" in comparison.command
    same_rounds(actual, expected)
