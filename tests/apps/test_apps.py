"""What holds for every app, and that ``flwr run`` gives the numbers of ``flwr-kd simulate``."""

from __future__ import annotations

import json
import re
import shlex
import struct
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from flwr_kd import registry, results
from flwr_kd.config import ConfigError
from flwr_kd.inline import InlineGrid
from flwr_kd.simulation import Experiment, run
from flwr_kd.strategies.fedhead import FedHEADConfig
from flwr_kd.strategies.fedhyb import FedHybConfig

APPS = Path(__file__).resolve().parents[2] / "apps"
CLIENTS, ROUNDS, SEED = 3, 2, 5
Module = Callable[[str, str], ModuleType]


@dataclass(frozen=True)
class App:
    """An app, what is set in its run on a SuperLink, and settings that it must refuse."""

    name: str
    method: str
    listed: frozenset[str]
    """Hyper-parameters that its ``pyproject.toml`` must have."""
    set: dict[str, Any]
    wrong: tuple[tuple[dict[str, Any], str], ...]

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

    def context(self, **settings: Any) -> Context:
        changed = {name.replace("_", "-"): value for name, value in settings.items()}
        config = {**self.settings, **changed}
        return Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)


FEDHKD = App(
    name="fedhkd",
    method="fedhkd",
    listed=frozenset({"gamma", "classifier-weight", "noise", "sigma", "clip", "local-epochs"}),
    set={"local-epochs": 2, "gamma": 0.2, "sigma": 0.5, "reproducible-noise": True},
    wrong=(({"gamma": -1.0}, r"gamma must be >= 0, got -1"),),
)
FEDDKC = App(
    name="feddkc",
    method="feddkc-skr",
    listed=frozenset({"refinement", "target-peak", "target-entropy", "beta", "send-test-features"}),
    set={"batch-size": 32, "refinement": "skr", "target-entropy": 1.2, "send-test-features": True},
    wrong=(
        ({"beta": -1.0}, r"beta must be >= 0, got -1"),
        ({"refinement": "krr"}, r"refinement must be one of kkr, skr, got 'krr'"),
        ({"target_peak": 0.05}, r"target-peak .*0\.05"),
        ({"refinement": "skr", "target_entropy": 9.0}, r"target-entropy .*9"),
        ({"model": "resnet2,resnt4"}, r"resnt4.*resnet4"),
    ),
)
FEDHEAD = App(
    name="fedhead",
    method="fedhead-plus",
    listed=frozenset(FedHEADConfig().to_wire()),
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
        ({"public_limit": 0}, r"public_limit must be a whole number from 1, got 0"),
        ({"model": "mlp,lenet"}, r"fedhead needs one model for all clients"),
    ),
)
FEDHYB = App(
    name="fedhyb",
    method="fedhyb",
    listed=frozenset(FedHybConfig().to_wire()),
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
APPLICATIONS = (FEDHKD, FEDDKC, FEDHEAD, FEDHYB)
every = pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)


def same_rounds(found: results.RunResult, expected: results.RunResult) -> None:
    assert len(found.rounds) == ROUNDS
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert (ours.participants, ours.failures) == (CLIENTS, 0)
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        for name in ("local_accuracy", "local_top5", "global_accuracy", "server_accuracy", "train_loss"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6), name
        assert ours.clients == theirs.clients


def test_every_app_is_tested() -> None:
    assert {app.name for app in APPLICATIONS} == {path.parent.name for path in APPS.glob("*/pyproject.toml")}


@every
@pytest.mark.flwr_run
@pytest.mark.timeout(420)
def test_flwr_run_gives_the_numbers_of_the_simulation(app: App, superlink: Any, tmp_path: Path) -> None:
    shared = {"num-server-rounds": ROUNDS, "min-nodes": CLIENTS, "seed": SEED, "out": str(tmp_path)}
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in {**shared, **app.set}.items())
    superlink.run(app.folder, CLIENTS, values)

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
    comparison = results.load(tmp_path)
    (found,) = comparison.runs
    assert (found.method, found.seed) == (app.method, SEED)
    assert found.hyperparameters == expected.hyperparameters
    assert comparison.config["clients"] == CLIENTS
    assert f"seed={SEED}" in comparison.command
    same_rounds(found, expected)


@every
def test_the_result_is_what_was_run(app: App, module: Module, tmp_path: Path) -> None:
    context = app.context(num_server_rounds=1, model="mlp", seed=SEED, out=str(tmp_path))
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    module(app.name, "server_app").main(grid, context)
    comparison = results.load(tmp_path)
    (found,) = comparison.runs
    assert registry.get(found.method).name.startswith(app.name)
    assert found.hyperparameters.get("refinement", "") in found.method
    (stats,) = found.rounds
    assert set(stats.clients) == {"0", "1"}
    assert stats.local_top5 is not None
    assert (comparison.config["backend"], comparison.config["seeds"]) == ("flwr", [SEED])
    *words, values = shlex.split(comparison.command)
    assert words == ["flwr", "run", f"apps/{app.name}", "--run-config"]
    assert {**parse_config_args([values]), "out": str(tmp_path)} == context.run_config


@every
def test_nothing_is_written_without_out(app: App, module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    context = app.context(num_server_rounds=1, model="mlp")
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    server = module(app.name, "server_app")
    monkeypatch.setattr(server, "save", None)
    server.main(grid, context)


@every
def test_the_apps_defaults_are_the_methods(app: App) -> None:
    listed = {name: value for name, value in app.settings.items() if name in app.defaults}
    assert listed == {name: app.defaults[name] for name in listed}
    assert app.listed <= set(listed)
    assert app.settings["model"] == registry.get(app.method).model


@every
def test_the_readme_explains_every_setting(app: App) -> None:
    pages = [
        app.page,
        *(other.page for other in (FEDHKD,) if f"../{other.name}/README.md#settings" in app.page),
    ]
    rows = re.findall(r"^\| (`.*?) \|", "\n".join(pages), flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert {name for name in app.settings if name not in app.defaults} <= explained


@every
def test_a_relative_out_is_refused_before_the_work(app: App, module: Module) -> None:
    with pytest.raises(ConfigError, match=r"out must be an absolute path, got 'runs/here'"):
        module(app.name, "server_app").main(None, app.context(out="runs/here"))


@every
def test_a_result_is_not_overwritten(app: App, module: Module, tmp_path: Path) -> None:
    (tmp_path / results.FILE_NAME).write_text("{}")
    with pytest.raises(results.ResultExistsError, match=re.escape(str(tmp_path))):
        module(app.name, "server_app").main(None, app.context(out=str(tmp_path)))


@every
def test_settings_are_checked_before_the_work(app: App, module: Module) -> None:
    server = module(app.name, "server_app")
    everywhere: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model": "mlpp"}, r"mlpp.*mlp"),
        ({"min_nodes": 0}, r"clients must be a whole number from 1, got 0"),
        ({"partition": "diriclet:0.1"}, r"diriclet"),
    )
    for settings, message in (*everywhere, *app.wrong):
        with pytest.raises(ValueError, match=message):
            server.main(None, app.context(**settings))


@pytest.fixture
def own_images(tmp_path: Path) -> str:
    """Return a folder with a small Fashion-MNIST, a set of which nothing is held back unless asked for."""
    draw = np.random.default_rng(0)
    for part, size in (("train", 150), ("t10k", 30)):
        labels = (np.arange(size) % 10).astype(np.uint8)
        images = draw.integers(0, 128, (size, 28, 28)) + 12 * labels[:, None, None]
        for name, array in (("images-idx3", images.astype(np.uint8)), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "limit"),
    [
        ("fedhead", {"dataset": "digits", "public": ""}, 5000),
        ("fedhead-plus", {"dataset": "digits", "public": ""}, 100),
        ("fedhead-plus", {"dataset": "fashion-mnist", "public": "fashion-mnist"}, 5000),
    ],
)
def test_fedheads_methods_give_the_numbers_of_the_simulation(
    name: str, data: dict[str, str], limit: int, own_images: str, module: Module, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    context = FEDHEAD.context(
        **{**FEDHEAD.set, **data, "method": name, "public_limit": limit, "data_dir": own_images},
        num_server_rounds=ROUNDS,
        min_nodes=CLIENTS,
        seed=SEED,
        out=str(out),
    )
    grid = InlineGrid(module("fedhead", "client_app").app, CLIENTS, run_config=context.run_config)
    module("fedhead", "server_app").main(grid, context)
    shared = Experiment(
        dataset=data["dataset"],
        public=data["public"] or None,
        public_limit=limit,
        data_dir=own_images,
        clients=CLIENTS,
        rounds=ROUNDS,
        seed=SEED,
        backend="inline",
        device="cpu",
    )
    expected = run(registry.get(name), shared, FedHEADConfig.from_wire(context.run_config))
    comparison = results.load(out)
    (found,) = comparison.runs
    assert (found.method, found.hyperparameters) == (name, expected.hyperparameters)
    assert (comparison.config["public"], comparison.config["public_limit"]) == (data["dataset"], limit)
    same_rounds(found, expected)


def test_fedheads_clients_name_their_sectors(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's SuperNodes, read as Flower reads their command lines."""
    lines = re.findall(r"^flower-supernode .*$", FEDHEAD.page, flags=re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    nodes = [parse_config_args([line[line.index("--node-config") + 1]]) for line in words]
    assert [node["partition-id"] for node in nodes] == list(range(nodes[0]["num-partitions"]))
    server = module("fedhead", "server_app")
    strategies = []

    class Watched(server.FedHEAD):  # type: ignore[misc, name-defined]
        def begin(self, found: Any) -> None:
            strategies.append(self)
            super().begin(found)

    monkeypatch.setattr(server, "FedHEAD", Watched)
    settings = {**FEDHEAD.set, "method": "fedhead", "assignment": "client"}
    context = FEDHEAD.context(**settings, num_server_rounds=1, min_nodes=len(nodes))
    app = module("fedhead", "client_app").app
    grid = InlineGrid(app, len(nodes), node_configs=nodes, run_config=context.run_config)
    server.main(grid, context)
    (strategy,) = strategies
    assert strategy.sectors == {node["partition-id"]: node["sector"] for node in nodes}
    assert set(strategy.leaders) == {"north", "south"}


def test_fedhybs_app_has_all_of_its_methods(module: Module) -> None:
    registered = {name for name, found in registry.methods().items() if found.config_class is FedHybConfig}
    assert set(module("fedhyb", "server_app").METHODS) == registered


@pytest.mark.parametrize("name", ["fedhyb", "fedhyb-star", "fedhyb-1", "fedhyb-2", "fedhyb-3"])
def test_fedhybs_methods_give_the_numbers_of_the_simulation(
    name: str, module: Module, tmp_path: Path
) -> None:
    """A value that the method fixes replaces the default that the app lists."""
    shared = {"num_server_rounds": ROUNDS, "min_nodes": CLIENTS, "seed": SEED, "out": str(tmp_path)}
    context = FEDHYB.context(**FEDHYB.set, **shared, method=name, imbalance=4.0)
    grid = InlineGrid(module("fedhyb", "client_app").app, CLIENTS, run_config=context.run_config)
    module("fedhyb", "server_app").main(grid, context)
    method = registry.get(name)
    expected = run(
        method,
        Experiment(clients=CLIENTS, rounds=ROUNDS, seed=SEED, imbalance=4.0, backend="inline", device="cpu"),
        method.config(f"{setting}={value}" for setting, value in FEDHYB.set.items()),
    )
    comparison = results.load(tmp_path)
    (found,) = comparison.runs
    assert (found.method, found.hyperparameters) == (name, expected.hyperparameters)
    assert method.fixed.items() <= {k.replace("-", "_"): v for k, v in found.hyperparameters.items()}.items()
    assert comparison.config["imbalance"] == 4.0
    same_rounds(found, expected)


def test_fedhybs_fixed_value_may_be_given(module: Module) -> None:
    server = module("fedhyb", "server_app")
    for name in server.METHODS:
        method = registry.get(name)
        given = {**FEDHYB.defaults, **{key.replace("_", "-"): value for key, value in method.fixed.items()}}
        assert server.hyperparameters(method, given) == method.config()
