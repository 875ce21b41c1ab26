"""What holds for every app. ``flwr run`` gives the numbers of ``flwr-kd simulate``."""

from __future__ import annotations

import re
import shlex
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args

from flwr_kd import KDClient, client_app, registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments import run_config
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.run_config import hyperparameters
from flwr_kd.experiments.runner import run
from flwr_kd.results import files
from flwr_kd.results.errors import ResultExistsError
from flwr_kd.server.records import HandshakeError
from flwr_kd.strategies.fedhead import FedHEAD, FedHEADConfig
from flwr_kd.strategies.fedhyb import FedHybConfig
from flwr_kd.transport.inline_grid import InlineGrid
from tests.apps.applications import (
    APPLICATIONS,
    APPS,
    CLIENTS,
    FEDDKC,
    FEDHEAD,
    FEDHKD,
    FEDHYB,
    KTPFL,
    ROUNDS,
    SEED,
    App,
    same_as_simulated,
    same_rounds,
    slow_but,
)

Module = Callable[[str, str], ModuleType]
every = pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)


def test_every_app_is_tested() -> None:
    assert {app.name for app in APPLICATIONS} == {path.parent.name for path in APPS.glob("*/pyproject.toml")}


@pytest.mark.parametrize("app", slow_but([FEDHKD]))
@pytest.mark.flwr_run
@pytest.mark.xdist_group("simulation")
def test_flwr_run_gives_the_numbers_of_the_simulation(app: App, superlink: Any) -> None:
    same_as_simulated(app, superlink.run(app.folder, app.run_config(), CLIENTS))


@every
def test_the_result_is_what_was_run(app: App, module: Module, tmp_path: Path) -> None:
    context = app.context(num_server_rounds=1, model="mlp", seed=SEED, out=str(tmp_path))
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    module(app.name, "server_app").main(grid, context)
    comparison = files.load(tmp_path)
    (actual,) = comparison.runs
    assert registry.get(actual.method).name.startswith(app.name)
    assert actual.hyperparameters.get("refinement", "") in actual.method
    (stats,) = actual.rounds
    assert set(stats.clients) == {"0", "1"}
    assert stats.local_top5 is not None
    assert (comparison.config["backend"], comparison.config["seeds"]) == ("flwr", [SEED])
    *words, values = shlex.split(comparison.command)
    assert words == ["flwr", "run", f"apps/{app.name}", "--run-config"]
    assert {**parse_config_args([values]), "out": str(tmp_path)} == context.run_config


@every
def test_nothing_is_written_with_out_none(app: App, module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    context = app.context(num_server_rounds=1, model="mlp", out="none")
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    server = module(app.name, "server_app")
    monkeypatch.setattr(server, "save", None)
    server.main(grid, context)


@every
def test_the_apps_defaults_are_the_methods(app: App) -> None:
    for method in (app.method, *app.others):
        defaults = registry.get(method).config_class().to_wire()
        listed = {name: value for name, value in app.settings.items() if name in defaults}
        assert listed == {name: defaults[name] for name in listed}
    # All methods of the app that have one of these fix it.
    fixed = {FEDDKC.name: {"refinement"}, KTPFL.name: {"coefficients"}}
    assert app.hyperparameters - set(app.settings) == fixed.get(app.name, set())
    assert app.settings["model"] == registry.get(app.method).model


@every
def test_the_readme_explains_every_setting(app: App) -> None:
    pages = [
        app.page,
        *(other.page for other in (FEDHKD,) if f"../{other.name}/README.md#settings" in app.page),
    ]
    rows = re.findall(r"^\| (`.*?) \|", "\n".join(pages), flags=re.MULTILINE)
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert {name for name in app.settings if name not in app.hyperparameters} <= explained


@every
def test_the_commands_of_the_readme_set_what_there_is(app: App) -> None:
    """The test reads them as Flower does: ``flwr run`` refuses a key that is not in ``pyproject.toml``."""
    commands = re.findall(
        rf"^flwr run apps/{app.name} .*$", app.page.replace("\\\n", " "), flags=re.MULTILINE
    )
    words = [shlex.split(command) for command in commands]
    given = [parse_config_args([line[line.index("-c") + 1]]) for line in words if "-c" in line]
    assert given
    for settings in given:
        assert settings.keys() <= app.settings.keys()
        assert all(type(value) is type(app.settings[name]) for name, value in settings.items())


def test_the_node_configs_of_the_readmes_can_be_read() -> None:
    """A string needs its own quotes inside those of the shell."""
    known = {"partition-id", "num-partitions", "data-path", "model", "sector", "state-dir"}
    pages = "".join(app.page for app in APPLICATIONS)
    given = re.findall(r'--node-config "([^"]+)"', pages)
    assert len(given) == pages.count("--node-config") > len(APPLICATIONS)
    for text in given:
        assert parse_config_args([text]).keys() <= known, text


@every
def test_a_relative_out_is_refused_before_the_work(app: App, module: Module) -> None:
    with pytest.raises(ConfigError, match=r"out must be an absolute path, got 'runs/here'"):
        module(app.name, "server_app").main(None, app.context(out="runs/here"))


@every
def test_a_result_is_not_overwritten(app: App, module: Module, tmp_path: Path) -> None:
    (tmp_path / files.FILE_NAME).write_text("{}")
    with pytest.raises(ResultExistsError, match=re.escape(str(tmp_path))):
        module(app.name, "server_app").main(None, app.context(out=str(tmp_path)))


@every
def test_settings_are_checked_before_the_work(app: App, module: Module) -> None:
    server = module(app.name, "server_app")
    everywhere: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model": "mlpp"}, r"mlpp.*mlp"),
        ({"min_nodes": 0}, r"min-nodes must be a whole number from 1, got 0"),
        ({"partition": "diriclet:0.1"}, r"diriclet"),
    )
    for settings, message in (*everywhere, *app.wrong):
        with pytest.raises(ValueError, match=message):
            server.main(None, app.context(**settings))


@pytest.fixture
def own_images(tmp_path: Path) -> str:
    """Return a folder with a small Fashion-MNIST, of which no public samples are held back by default."""
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
    comparison = files.load(out)
    (actual,) = comparison.runs
    assert (actual.method, actual.hyperparameters) == (name, expected.hyperparameters)
    assert (comparison.config["public"], comparison.config["public_limit"]) == (data["dataset"], limit)
    same_rounds(actual, expected)


def test_fedheads_clients_name_their_sectors(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lines of the page's SuperNodes are read as Flower does."""
    lines = re.findall(r"^FLWR_HOME=\S+ flower-supernode .*$", FEDHEAD.page, flags=re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    nodes = [parse_config_args([line[line.index("--node-config") + 1]]) for line in words]
    assert [node["partition-id"] for node in nodes] == list(range(nodes[0]["num-partitions"]))
    strategies, begin = [], FedHEAD.begin

    def watched(self: FedHEAD, nodes: Any) -> None:
        strategies.append(self)
        begin(self, nodes)

    monkeypatch.setattr(FedHEAD, "begin", watched)
    settings = {**FEDHEAD.set, "method": "fedhead", "assignment": "client"}
    context = FEDHEAD.context(**settings, num_server_rounds=1, min_nodes=len(nodes))
    app = module("fedhead", "client_app").app
    grid = InlineGrid(app, len(nodes), node_configs=nodes, run_config=context.run_config)
    module("fedhead", "server_app").main(grid, context)
    (strategy,) = strategies
    assert strategy.sectors == {node["partition-id"]: node["sector"] for node in nodes}
    assert set(strategy.leaders) == {"north", "south"}


def test_fedhybs_app_has_all_of_its_methods(module: Module) -> None:
    registered = {name for name, method in registry.methods().items() if method.config_class is FedHybConfig}
    assert set(module("fedhyb", "server_app").METHODS) == registered


@pytest.mark.parametrize("name", ["fedhyb", "fedhyb-star", "fedhyb-1", "fedhyb-2", "fedhyb-3"])
def test_fedhybs_methods_give_the_numbers_of_the_simulation(
    name: str, module: Module, tmp_path: Path
) -> None:
    """A value that the method fixes replaces the default that the app lists."""
    shared = {"num_server_rounds": ROUNDS, "min_nodes": CLIENTS, "seed": SEED, "out": str(tmp_path)}
    context = FEDHYB.context(**FEDHYB.set, **shared, method=name, limit=600, test_limit=40, imbalance=4.0)
    grid = InlineGrid(module("fedhyb", "client_app").app, CLIENTS, run_config=context.run_config)
    module("fedhyb", "server_app").main(grid, context)
    method = registry.get(name)
    expected = run(
        method,
        Experiment(
            **{"clients": CLIENTS, "rounds": ROUNDS, "seed": SEED, "backend": "inline", "device": "cpu"},
            **{"limit": 600, "test_limit": 40, "imbalance": 4.0},
        ),
        method.config(f"{setting}={value}" for setting, value in FEDHYB.set.items()),
    )
    comparison = files.load(tmp_path)
    (actual,) = comparison.runs
    assert (actual.method, actual.hyperparameters) == (name, expected.hyperparameters)
    assert method.fixed.items() <= {k.replace("-", "_"): v for k, v in actual.hyperparameters.items()}.items()
    assert {key: comparison.config[key] for key in ("limit", "test_limit", "imbalance")} == {
        "limit": 600,
        "test_limit": 40,
        "imbalance": 4.0,
    }
    same_rounds(actual, expected)


@pytest.mark.parametrize("name", list(registry.methods()))
def test_what_a_method_fixes_replaces_the_default_and_refuses_all_else(name: str) -> None:
    method = registry.get(name)
    kind, fixed = method.config_class, {key.replace("_", "-"): value for key, value in method.fixed.items()}
    settings, expected = {**kind().to_wire(), "dataset": "digits"}, kind(**method.fixed)
    for given in ({}, settings, {**settings, **fixed}):
        assert hyperparameters(method, given) == expected
    assert hyperparameters(method, {**settings, "batch-size": 7}) == replace(expected, batch_size=7)
    with pytest.raises(ConfigError, match=r"batch-size must be >= 1, got 0"):
        hyperparameters(method, {**settings, "batch-size": 0})
    for key, value in fixed.items():
        others: list[Any] = [f"{value}s", 7]
        if not isinstance(value, str):
            others += [int(value)] if isinstance(value, bool) else [value + 1, bool(value)]
        if value == settings[key] and isinstance(value, bool):
            others.append(not value)
        for other in others:
            message = f"{key} is fixed at {value!r} by {name}, got {other!r}"
            with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
                hyperparameters(method, {**settings, key: other})


def test_ktpfls_app_has_all_methods_of_its_kind(module: Module) -> None:
    registered = {name for name, method in registry.methods().items() if method.public_at == "clients"}
    assert set(module("ktpfl", "server_app").METHODS) == registered
    for name in ("ktpfl-weights", "pfeddf"):
        assert registry.get(name)
        assert f"`{name}`" in KTPFL.page


def run_ktpfl(
    module: Module, out: Path, app: ClientApp | None = None, grid: Any = None, **settings: Any
) -> Any:
    """Run the app in this process with the settings of its run on a SuperLink, and return the result."""
    shared = {"num_server_rounds": ROUNDS, "min_nodes": CLIENTS, "seed": SEED, "out": str(out)}
    context = KTPFL.context(**{**KTPFL.set, **shared, **settings})
    nodes = InlineGrid(
        app or module("ktpfl", "client_app").app, CLIENTS, run_config=context.run_config, **(grid or {})
    )
    module("ktpfl", "server_app").main(nodes, context)
    (actual,) = files.load(out).runs
    return actual


@pytest.mark.parametrize("where", ["clients", "server"])
@pytest.mark.parametrize("name", ["ktpfl", "sim-pfl", "topk-pfl", "fedmd"])
def test_ktpfls_methods_give_the_numbers_of_the_simulation(
    name: str, where: str, module: Module, tmp_path: Path
) -> None:
    """The models are heterogeneous. A value that the method fixes replaces the default that the app lists."""
    special = {"top-k": 2, "warmup-epochs": 2 if name == "fedmd" and where == "clients" else 0}
    hyper = {**KTPFL.set, **special, "public-at": where, "precision": "float16"}
    actual = run_ktpfl(module, tmp_path, **hyper, method=name, model="mlp,lenet", public_limit=80)
    method = registry.get(name)
    expected = run(
        method,
        Experiment(
            clients=CLIENTS,
            rounds=ROUNDS,
            seed=SEED,
            model="mlp,lenet",
            public_limit=80,
            backend="inline",
            device="cpu",
        ),
        method.config(
            f"{setting}={value}"
            for setting, value in hyper.items()
            if setting in method.config_class().to_wire()
        ),
    )
    assert (actual.method, actual.hyperparameters) == (name, expected.hyperparameters)
    assert method.fixed.items() <= {k.replace("-", "_"): v for k, v in actual.hyperparameters.items()}.items()
    same_rounds(actual, expected)


def test_ktpfls_clients_need_no_public_data_where_the_server_has_it(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = module("ktpfl", "client_app")
    monkeypatch.setattr(run_config, "public_of", lambda run: 1 / 0)
    actual = run_ktpfl(module, tmp_path, public_at="server")
    assert [stats.failures for stats in actual.rounds] == [0] * ROUNDS
    context = KTPFL.context()
    context.node_config = {"partition-id": 0, "num-partitions": CLIENTS}
    with pytest.raises(ZeroDivisionError):
        client.build(context)


def test_ktpfls_client_with_other_public_data_is_refused(
    module: Module, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The refusal has the page's words. The run ends with too few clients, or goes on with the others."""
    build = module("ktpfl", "client_app").build

    def other(context: Context) -> KDClient[Any]:
        limit = 50 if context.node_config["partition-id"] == 2 else 80
        own = {**context.run_config, "public-limit": limit}
        changed = Context(context.run_id, context.node_id, context.node_config, context.state, run_config=own)
        return build(changed)  # type: ignore[no-any-return]

    app = client_app(other)
    with pytest.raises(HandshakeError, match=r"2 clients fit, 3 are needed; refused: node \d+: its public"):
        run_ktpfl(module, tmp_path, app, public_limit=80)
    caplog.clear()
    actual = run_ktpfl(module, tmp_path, app, public_limit=80, min_nodes=2)
    assert [set(stats.clients) for stats in actual.rounds] == [{"0", "1"}] * ROUNDS
    assert [stats.failures for stats in actual.rounds] == [0] * ROUNDS
    (refusal,) = {text for text in caplog.messages if "is refused" in text}
    (shown,) = re.findall(r"^node \d+ is refused: .*$", KTPFL.page, flags=re.MULTILINE)
    values = r"\b(\d+|[0-9a-f]{12})\b"
    assert re.sub(values, "*", refusal) == re.sub(values, "*", shown)
    assert " 50 samples with digest " in refusal


@pytest.mark.parametrize(
    ("before", "state_dir"),
    [({3, 4}, False), ({4}, False), ({4}, True)],
    ids=["inside", "between", "state-dir"],
)
def test_ktpfls_client_that_lost_its_state(
    before: set[int], state_dir: bool, module: Module, tmp_path: Path
) -> None:
    """Each client gets one message for the handshake, and in each round one to train and one to distil.

    Inside a round the state is lost twice, since a message that fails does not change it, as in a simulation.
    """
    build, seen = module("ktpfl", "client_app").build, Counter[Any]()

    def restarted(context: Context) -> KDClient[Any]:
        index = context.node_config["partition-id"]
        seen[index] += 1
        if index == 1 and seen[index] in before:
            context.state = RecordDict()
        return build(context)  # type: ignore[no-any-return]

    config: dict[str, Any] = {}
    if state_dir:
        (line,) = re.findall(r"^flower-supernode .*$", KTPFL.page, flags=re.MULTILINE)
        shown = parse_config_args([shlex.split(line)[-1]])
        config = {
            name: str(tmp_path / "state") for name in shown if not name.startswith(("partition", "num"))
        }
    undisturbed = run_ktpfl(module, tmp_path / "undisturbed")
    grid = {"node_configs": [config] * CLIENTS}
    actual = run_ktpfl(module, tmp_path / "actual", client_app(restarted), grid)
    assert seen[1] == 1 + 2 * ROUNDS
    if state_dir:
        same_rounds(actual, undisturbed)
        kept = [path.name for path in (tmp_path / "state").iterdir()]
        assert {re.findall(r"node-(\d+)", name)[0] for name in kept} == {str(i) for i in range(CLIENTS)}
        return
    first, second = actual.rounds
    assert first.failures == (3 in before)
    # A client that lost its state after its training has no accuracy after the distillation.
    distilled = {key for key, values in first.clients.items() if values["local_accuracy"] is not None}
    assert distilled == ({"0", "2"} if 3 in before else {"0", "1", "2"})
    # It begins anew: the loss is that of an untrained model.
    assert (second.participants, second.failures) == (CLIENTS, 0)
    assert second.train_loss > undisturbed.rounds[1].train_loss + 0.05
