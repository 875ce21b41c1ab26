"""The apps on the clients' own data, at nodes without a partition id, and the options of their strategies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from PIL import Image

from flwr_kd import KDClient, client_app, registry
from flwr_kd.checks import ConfigError
from flwr_kd.data import ArrayDataset, DataError, load
from flwr_kd.experiments import data
from flwr_kd.experiments.data import bundle_of, client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.run_config import (
    client_data,
    common_test_data,
    experiment,
    phase_timeout,
    public_options,
    strategy_options,
)
from flwr_kd.results import files
from flwr_kd.results.schema import RunResult
from flwr_kd.server.checkpoint import CHECKPOINT
from flwr_kd.server.records import VoidRoundsError
from flwr_kd.server.strategy import KDStrategy
from flwr_kd.testing.faults import Fault
from flwr_kd.transport.inline_grid import InlineGrid
from tests.apps.applications import (
    APPLICATIONS,
    CLIENTS,
    FEDDKC,
    FEDHEAD,
    FEDHKD,
    FEDHYB,
    KTPFL,
    ROUNDS,
    SEED,
    App,
    same_rounds,
)

Module = Callable[[str, str], ModuleType]
every = pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)
CLASSES = "three,one,two,zero"
ORDER = ("zero", "one", "two", "three")
IMAGES = {"classes": CLASSES, "input-shape": "1x10x10"}
TABLE = {"classes": CLASSES, "input-shape": "64"}
METHODS = [
    (FEDHKD, {}),
    (FEDDKC, {"model": "resnet4,resnet2"}),
    (FEDHEAD, {"method": "fedhead"}),
    (FEDHEAD, {"method": "fedhead-plus"}),
    (FEDHYB, {"method": "fedhyb"}),
    (FEDHYB, {"method": "fedhyb-star"}),
    (FEDHYB, {"method": "fedhyb-2"}),
    (KTPFL, {"method": "ktpfl", "model": "lenet,mlp"}),
    (KTPFL, {"method": "fedmd", "public-at": "server"}),
]
ON_TABLES = [(app, {**settings, "model": "mlp"}) for app, settings in METHODS if app is not FEDDKC]
NEED_PUBLIC = ("fedhead-plus", "fedhyb", "fedhyb-3", "ktpfl", "sim-pfl", "topk-pfl", "fedmd")


def names(case: Any) -> str:
    return (
        "-".join(str(case.get(key, "")) for key in ("method", "model"))
        if isinstance(case, dict)
        else case.name
    )


def samples(client: int) -> ArrayDataset:
    """Return some of scikit-learn's digits 0 to 3. The second client has no 2."""
    digits = load("digits").train
    rows = np.flatnonzero(digits.y.numpy() < 4)[30 * client : 30 * client + 30]
    return digits.subset([row for row in rows if client != 1 or digits.y[row] != 2])


def write_images(root: Path, data: ArrayDataset) -> None:
    for row, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
        folder = root / ORDER[int(y)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((x[0] * 255).round().to(torch.uint8).numpy()).save(folder / f"{row:03}.png")


def write_table(path: Path, data: ArrayDataset, labels: Sequence[str] = ORDER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        ",".join([*(repr(float(value)) for value in x.flatten()), labels[int(y)]])
        for x, y in zip(data.x, data.y, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def scans(tmp_path: Path) -> list[str]:
    """Return the folders of three clients' images."""
    for client in range(CLIENTS):
        write_images(tmp_path / f"scans-{client}", samples(client))
    return [str(tmp_path / f"scans-{client}") for client in range(CLIENTS)]


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Return the same three clients' tables."""
    for client in range(CLIENTS):
        write_table(tmp_path / f"table-{client}.csv", samples(client))
    return [str(tmp_path / f"table-{client}.csv") for client in range(CLIENTS)]


def hospital(module: Any) -> ClientApp:
    """Return the app for nodes whose config names no partition."""

    def build(context: Context) -> KDClient[Any]:
        for key in ("partition-id", "num-partitions"):
            del context.node_config[key]
        return module.build(context)  # type: ignore[no-any-return]

    return client_app(build)


def run_app(
    app: App,
    module: Module,
    paths: Sequence[str],
    *,
    client_app: ClientApp | None = None,
    nodes: Sequence[Mapping[str, Any]] | None = None,
    **settings: Any,
) -> RunResult:
    """Run an app in this process, and return its result."""
    context = app.context(**{**app.run_config(), "dataset": "none", "partition": "none", **settings})
    configs = [
        {"data-path": path, **node} for path, node in zip(paths, nodes or [{}] * len(paths), strict=True)
    ]
    grid = InlineGrid(
        client_app or hospital(module(app.name, "client_app")),
        len(paths),
        run_config=context.run_config,
        node_configs=configs,
    )
    module(app.name, "server_app").main(grid, context)
    (actual,) = files.load(Path(context.run_config["out"])).runs
    return actual


def node(run_config: Mapping[str, Any] | None = None, app: App = FEDHKD, **config: Any) -> Context:
    context = app.context(**(run_config or {}))
    values = {name.replace("_", "-"): value for name, value in config.items()}
    return Context(1, 7, values, RecordDict(), context.run_config)


# every app runs


def is_whole(actual: RunResult, method: str) -> None:
    """Check that all three clients took part in all rounds, and that the numbers are finite."""
    assert len(actual.rounds) == ROUNDS
    for stats in actual.rounds:
        assert (stats.participants, stats.failures) == (CLIENTS, 0)
        # The keys are Flower's node ids, which are large, and not partitions.
        assert len(stats.clients) == CLIENTS
        assert all(int(key) > 1000 for key in stats.clients)
        assert stats.train_loss is not None
        assert math.isfinite(stats.train_loss)
    assert (actual.rounds[-1].global_accuracy is not None) == registry.get(method).global_model


@pytest.mark.parametrize(("app", "settings"), METHODS, ids=names)
def test_apps_run_on_folders_of_images(
    app: App, settings: dict[str, Any], scans: list[str], module: Module, tmp_path: Path
) -> None:
    write_images(tmp_path / "test", samples(4))
    public = {"public": "digits", "public-limit": 40} if settings.get("method") in NEED_PUBLIC else {}
    method = str(settings.get("method", app.method))
    test = {"test-path": str(tmp_path / "test")} if registry.get(method).global_model else {}
    out = tmp_path / "out"
    actual = run_app(app, module, scans, **{**IMAGES, **public, **test, **settings, "out": str(out)})
    is_whole(actual, method)
    config = files.load(out).config
    assert (config["dataset"], config["partition"], config["clients"]) == ("own", None, CLIENTS)
    assert (config["classes"], config["input_shape"]) == (CLASSES.split(","), [1, 10, 10])


@pytest.mark.parametrize(("app", "settings"), ON_TABLES, ids=names)
def test_apps_run_on_tables(
    app: App, settings: dict[str, Any], tables: list[str], module: Module, tmp_path: Path
) -> None:
    write_table(tmp_path / "test.csv", samples(4))
    write_table(tmp_path / "public.csv", samples(5))
    public = {}
    if settings.get("method") in NEED_PUBLIC:
        public = {"public": str(tmp_path / "public.csv"), "public-limit": 20}
    method = str(settings.get("method", app.method))
    test = {"test-path": str(tmp_path / "test.csv")} if registry.get(method).global_model else {}
    out = str(tmp_path / "out")
    is_whole(run_app(app, module, tables, **{**TABLE, **public, **test, **settings, "out": out}), method)


def test_without_test_data_at_the_server_there_is_no_global_accuracy(
    tables: list[str], module: Module, tmp_path: Path
) -> None:
    actual = run_app(FEDHKD, module, tables, **TABLE, out=str(tmp_path / "out"))
    assert [stats.global_accuracy for stats in actual.rounds] == [None] * ROUNDS
    assert all(stats.local_accuracy is not None for stats in actual.rounds)


# Not FedDKC: its models take images, whose eight bits cannot hold the sixteenths of the digits.
@pytest.mark.parametrize("app", [FEDHKD, FEDHEAD, FEDHYB, KTPFL], ids=lambda app: app.name)
def test_the_numbers_are_those_of_the_same_samples_by_partition(
    app: App, module: Module, tmp_path: Path
) -> None:
    """Only the place of a client's rows differs: they are in two files at a node with the same partition id."""
    # The clients' own data has no common test set.
    common = {**app.run_config(), "model": "mlp", "num-server-rounds": ROUNDS, "measure": "never"}
    digits = Experiment(clients=CLIENTS, seed=SEED, partition="inner-dirichlet:0.1")
    bundle, labels = bundle_of(digits), [str(label) for label in range(10)]
    for client, (train, test) in enumerate(client_splits(digits)):
        write_table(tmp_path / str(client) / "train.csv", bundle.train.subset(train), labels)
        write_table(tmp_path / str(client) / "test.csv", bundle.train.subset(test), labels)
    write_table(tmp_path / "test.csv", bundle.test, labels)
    public = tmp_path / "public.csv"
    if "public" in app.settings:
        held_back = data.public_of(experiment(app.context(**common)))
        write_table(public, held_back, labels)
        # Views of images are turned, rows of tables are not.
        common |= {"degrees": 0.0, "min-scale": 1.0, "max-scale": 1.0} if app is FEDHYB else {}
    context = app.context(**common, out=str(tmp_path / "expected"))
    grid = InlineGrid(module(app.name, "client_app").app, CLIENTS, run_config=context.run_config)
    module(app.name, "server_app").main(grid, context)
    (expected,) = files.load(tmp_path / "expected").runs
    actual = run_app(
        app,
        module,
        [str(tmp_path / str(client)) for client in range(CLIENTS)],
        client_app=module(app.name, "client_app").app,
        **{
            **common,
            **({"public": str(public)} if "public" in app.settings else {}),
            **({"test-path": str(tmp_path / "test.csv")} if "test-path" in app.settings else {}),
            "classes": ",".join(labels),
            "input-shape": "64",
            "out": str(tmp_path / "actual"),
        },
    )
    same_rounds(actual, expected)


@every
def test_an_image_set_and_a_folder_of_its_images_give_the_same_model(
    app: App, scans: list[str], tmp_path: Path
) -> None:
    own = {"classes": ",".join(map(str, range(10))), "input-shape": "1x8x8"}
    for label in range(10):
        write_images(tmp_path / "digits", ArrayDataset(torch.zeros(1, 1, 8, 8), torch.tensor([0])))
        (tmp_path / "digits" / "zero").rename(tmp_path / "digits" / str(label))
    mine = client_data(node(own, app, data_path=str(tmp_path / "digits")))
    theirs = client_data(node({}, app, partition_id=0, num_partitions=2))
    ours, other = mine.model.state_dict(), theirs.model.state_dict()
    assert list(ours) == list(other)
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert mine.train_set.x.shape[1:] == theirs.train_set.x.shape[1:]


# a client's model and data


def test_a_client_has_what_its_node_names(scans: list[str]) -> None:
    own = client_data(node(IMAGES, data_path=scans[1]))
    again = client_data(node(IMAGES, data_path=scans[1]))
    other = client_data(node(IMAGES, data_path=scans[0]))
    assert len(own.train_set) + len(own.test_set) == len(samples(1))
    # "two" is the third class, and the second client has none.
    assert 2 not in own.train_set.y.tolist() + own.test_set.y.tolist()
    assert 2 in other.train_set.y.tolist()
    assert torch.equal(own.train_set.x, again.train_set.x)
    assert torch.equal(own.train_set.y, again.train_set.y)
    assert len(own.test_set) == round(len(samples(1)) / 5)
    assert own.model(own.train_set.x[:2]).shape == (2, 4)


def test_a_client_has_common_test_data_where_its_node_names_some(scans: list[str]) -> None:
    mine = common_test_data(node(IMAGES, data_path=scans[1], common_test_path=scans[0]))
    assert mine is not None
    assert len(mine) == len(samples(0))
    assert common_test_data(node(IMAGES, data_path=scans[1])) is None
    assert common_test_data(node({**IMAGES, "measure": "never"}, common_test_path=scans[0])) is None
    shared = common_test_data(node({}, partition_id=0, num_partitions=2))
    assert shared is not None
    assert len(shared) == 359
    with pytest.raises(ConfigError, match="common-test-path in the node config must be an absolute path"):
        common_test_data(node(IMAGES, common_test_path="scans"))
    with pytest.raises(ConfigError, match="common-test-path in the node config: "):
        common_test_data(node(IMAGES, common_test_path=f"{scans[0]}-x"))


def test_the_seed_of_the_run_chooses_the_test_part(scans: list[str]) -> None:
    first, same, other = (
        client_data(node({**IMAGES, "seed": seed}, data_path=scans[0])).test_set.x for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, "lenet"), ({"model": "mlp"}, "mlp"), ({"partition-id": 2, "num-partitions": 3}, "lenet")],
)
def test_own_data_takes_the_model_that_the_node_names_or_the_first(
    config: dict[str, Any], expected: str, scans: list[str]
) -> None:
    settings = {**IMAGES, "model": "lenet, mlp,cnn"}
    actual = client_data(node(settings, KTPFL, data_path=scans[0], **config)).model
    (alone,) = (client_data(node({**settings, "model": expected}, KTPFL, data_path=scans[0])).model,)
    assert actual.state_dict().keys() == alone.state_dict().keys()


def test_parts_of_a_data_set_take_the_models_in_turn_or_the_one_that_is_named() -> None:
    settings = {"model": "mlp,lenet"}
    sizes = {
        (index, name): sum(
            parameter.numel()
            for parameter in client_data(
                node(
                    settings,
                    KTPFL,
                    partition_id=index,
                    num_partitions=3,
                    **({} if name is None else {"model": name}),
                )
            ).model.parameters()
        )
        for index, name in ((0, None), (1, None), (2, None), (1, "mlp"), (0, "lenet"))
    }
    assert sizes[0, None] == sizes[2, None] == sizes[1, "mlp"]
    assert sizes[1, None] == sizes[0, "lenet"] != sizes[0, None]


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (
            {},
            {},
            r"node config must have partition-id from 0 and .*, or data-path .*; got partition-id=None and",
        ),
        ({}, {"partition_id": 0}, r"got partition-id=0 and num-partitions=None"),
        (
            {},
            {"partition_id": 3, "num_partitions": 3},
            r"larger num-partitions.* got partition-id=3 and num-p.*=3",
        ),
        ({}, {"partition_id": -1, "num_partitions": 3}, r"got partition-id=-1"),
        ({}, {"partition_id": "first", "num_partitions": 3}, r"got partition-id='first'"),
        (
            {},
            {"data_path": "/x"},
            r"data-path='/x' in the node config .* run config must name classes.*got classes=''",
        ),
        ({}, {"data_path": "/x", "partition_id": 0, "num_partitions": 2}, r"must name classes"),
        (
            TABLE,
            {},
            r"data-path is not in this SuperNode's node config.* --node-config \"data-path='/absolute",
        ),
        (
            TABLE,
            {"partition_id": 0, "num_partitions": 2},
            r"data-path is not in this SuperNode's node config",
        ),
        (
            TABLE,
            {"data_path": "scans"},
            r"data-path in the node config must be an absolute path, got 'scans'",
        ),
        (TABLE, {"data_path": "~/scans"}, r"must be an absolute path, got '~/scans'"),
        (TABLE, {"data_path": 3}, r"must be an absolute path, got 3"),
        (TABLE, {"data_path": "/no/scans"}, r"data-path in the node config: '/no/scans' does not exist"),
        (
            {**TABLE, "classes": "one"},
            {"data_path": "/x"},
            r"classes must be at least 2 different names, got 'one'",
        ),
        ({**TABLE, "input-shape": ""}, {"data_path": "/x"}, r"input-shape must be CHANNELSx.* got ''"),
        ({**TABLE, "input-shape": 64}, {"data_path": "/x"}, r"input-shape must be of type str, got 64"),
        (
            {"input-shape": "64"},
            {},
            r"input-shape is for data of the clients' own: it needs classes, got '64'",
        ),
        ({"test-path": "/x"}, {}, r"test-path is for data of the clients' own: it needs classes, got '/x'"),
        ({**TABLE, "imbalance": 4.0}, {}, r"imbalance must be 0 with classes: it cuts a data set; got 4.0"),
        ({**TABLE, "test-limit": 4}, {}, r"test-limit must be 0 with classes: it cuts a data set; got 4"),
    ],
)
def test_a_node_that_cannot_take_part_says_what_is_missing(
    settings: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        client_data(node(settings, **config))
    assert "\n" not in str(caught.value)


def test_errors_in_the_data_name_the_key(scans: list[str], tables: list[str], tmp_path: Path) -> None:
    for settings, path, message in (
        (TABLE, scans[0], r"data-path in the node config: '.*scans-0' is a folder of images, .* got '64'"),
        (
            IMAGES,
            tables[0],
            r"data-path in the node config: '.*table-0.csv' is a table, .* '1x10x10'",
        ),
        ({**TABLE, "classes": "one,two"}, tables[0], r"data-path in the node config: .*unknown class 'zero'"),
    ):
        with pytest.raises(ConfigError, match=message):
            client_data(node(settings, data_path=path))
    with pytest.raises(
        ConfigError, match=r"model in the node config: unknown model 'lnet' \(did you mean 'lenet'"
    ):
        client_data(node({**IMAGES, "model": "lenet,mlp"}, KTPFL, data_path=scans[0], model="lnet"))
    with pytest.raises(ConfigError, match=r"model lenet does not fit input-shape=64 with 4 classes: "):
        client_data(node({**TABLE, "model": "lenet"}, data_path=tables[0]))


def test_a_node_without_usable_data_costs_itself_alone(
    tables: list[str], module: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = [*tables[:2], str(tmp_path / "gone.csv")]
    actual = run_app(FEDHKD, module, gone, **{**TABLE, "min-nodes": 2, "out": str(tmp_path / "out")})
    assert [stats.participants for stats in actual.rounds] == [2] * ROUNDS
    assert re.search(r"data-path in the node config: '.*gone\.csv' does not exist", caplog.text)


# public data


def test_the_server_alone_has_the_public_data_where_it_sends_samples(
    tmp_path: Path, tables: list[str]
) -> None:
    write_table(tmp_path / "public.csv", samples(5))
    method = registry.get("ktpfl")
    settings = {**TABLE, "public": str(tmp_path / "public.csv")}
    at_clients = public_options(node(settings, KTPFL, data_path=tables[0]), method)["public_set"]
    assert at_clients.x.shape == (len(samples(5)), 64)
    for name in ("gone.csv", ""):
        elsewhere = {**settings, "public": name and str(tmp_path / name), "public-at": "server"}
        assert public_options(node(elsewhere, KTPFL, data_path=tables[0]), method) == {}
    assert public_options(node(settings, FEDHYB), registry.get("fedhyb")) == {}


@pytest.mark.parametrize("name", NEED_PUBLIC)
def test_a_method_that_needs_public_data_has_no_default_on_own_data(name: str, module: Module) -> None:
    app = next(app for app in (FEDHEAD, FEDHYB, KTPFL) if name in module(app.name, "server_app").METHODS)
    server = module(app.name, "server_app")
    for settings, message in (
        ({}, r"public must be the absolute path .* or an image set: there is no default .* got ''"),
        ({"public": "/gone.csv"}, r"public: '/gone\.csv' does not exist"),
        ({"public": "sst2"}, r"public must be .* got 'sst2' \(texts\)"),
    ):
        with pytest.raises(DataError, match=message):
            server.main(None, app.context(**IMAGES, method=name, **settings))


def test_fedmd_learns_no_labels_of_public_data_on_own_data(module: Module) -> None:
    settings = {**IMAGES, "method": "fedmd", "public": "digits", "warmup-epochs": 2}
    with pytest.raises(ConfigError, match=r"warmup-epochs must be 0 with classes: .*, got 2"):
        module("ktpfl", "server_app").main(None, KTPFL.context(**settings))


def test_own_data_is_not_divided_at_the_server() -> None:
    with pytest.raises(ConfigError, match=r"own=\.\.\."):
        client_splits(experiment(FEDHKD.context(**TABLE)))


# the options of a strategy


def test_the_run_config_says_what_a_strategy_does(tmp_path: Path) -> None:
    settings = {
        "seed": 3,
        "fraction-train": 0.5,
        "min-nodes": 5,
        "min-train-nodes": 4,
        "max-void-rounds": 7,
        "max-examples": 900,
        "aggregation": "krum:1",
        "knowledge-aggregation": "trimmed-mean:0.1",
        "checkpoint-dir": str(tmp_path),
        "resume": True,
        "cores": 3,
        "measure": "every:2",
    }
    expected: dict[str, Any] = {name.replace("-", "_"): value for name, value in settings.items()}
    expected["min_available_nodes"] = expected.pop("min_nodes")
    expected["checkpoint_dir"] = tmp_path
    options = strategy_options(FEDHKD.context(**settings))
    assert [type(each).__name__ for each in options.pop("callbacks")] == ["RoundLines"]
    assert options == expected
    assert phase_timeout(FEDHKD.context(timeout=60)) == 60.0


@every
def test_keys_that_nothing_reads_are_named(app: App, flower_log: list[str]) -> None:
    strategy_options(app.context(**app.run_config()))
    assert not flower_log
    strategy_options(app.context(**{**app.run_config(), "lr": 0.1, "colour": 1, "num-rounds": 3}))
    assert flower_log == [
        "'colour' in the run config is not read",
        "'lr' in the run config is not read: did you mean 'learning-rate'?",
        "'num-rounds' in the run config is not read: did you mean 'num-server-rounds'?",
    ]


@every
def test_the_defaults_of_the_run_config_are_those_of_a_strategy(app: App) -> None:
    """And those of the code, for an app whose pyproject.toml has fewer keys."""
    context = app.context()
    options = strategy_options(context)
    del options["callbacks"]
    # An app measures after its last round, as a simulation does.
    plain = registry.get("fedavg").strategy(measure="last")
    # The attribute max_examples is the bound in use.
    given = {name: getattr(plain, name) for name in options} | {"max_examples": plain.given_max_examples}
    assert given == options
    bare = {name: context.run_config[name] for name in ("dataset", "data-dir", "partition", "model")}
    short = Context(1, 0, {}, RecordDict(), bare)
    assert {name: strategy_options(short)[name] for name in options} == options
    assert phase_timeout(short) == phase_timeout(context) == 3600.0
    assert experiment(short).own is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min-nodes": 0}, r"min-nodes must be a whole number from 1, got 0"),
        ({"min-nodes": 2.5}, r"min-nodes must be a whole number from 1, got 2.5"),
        ({"num-server-rounds": 0}, r"num-server-rounds must be a whole number from 1, got 0"),
        ({"seed": -1}, r"seed must be a whole number from 0, got -1"),
        ({"fraction-train": 0.0}, r"fraction-train must be in \(0, 1\], got 0"),
        ({"fraction-train": 1.5}, r"fraction-train must be in \(0, 1\], got 1.5"),
        ({"min-train-nodes": 0}, r"min-train-nodes must be a whole number from 1, got 0"),
        ({"max-void-rounds": True}, r"max-void-rounds must be a whole number from 1, got True"),
        ({"max-examples": "all"}, r"max-examples must be a whole number from 0, got 'all'"),
        ({"max-examples": -5}, r"max-examples must be a whole number from 0, got -5"),
        ({"timeout": 0}, r"timeout must be a finite number above 0, got 0"),
        ({"timeout": math.inf}, r"timeout must be a finite number above 0, got inf"),
        ({"timeout": "1h"}, r"timeout must be a finite number above 0, got '1h'"),
        ({"resume": 1}, r"resume must be of type bool, got 1"),
        ({"resume": True}, r"resume=true needs checkpoint-dir, an absolute path; got ''"),
        ({"checkpoint-dir": "here"}, r"checkpoint-dir must be an absolute path, got 'here'"),
        ({"checkpoint-dir": 3}, r"checkpoint-dir must be of type str, got 3"),
        ({"input-shape": "64"}, r"input-shape .* needs classes"),
        ({**TABLE, "classes": "a,a"}, r"classes must be at least 2 different names"),
        ({**IMAGES, "model": "mlpp"}, r"mlpp.*mlp"),
        ({**IMAGES, "model": "bilstm"}, r"model bilstm does not fit input-shape=1x10x10 with 4 classes"),
    ],
)
@every
def test_settings_are_checked_before_the_work(
    app: App, settings: dict[str, Any], message: str, module: Module
) -> None:
    if app is FEDDKC and "classes" in settings:
        # The default is for ten classes.
        settings = {"target-peak": 0.3, **settings}
    with pytest.raises(ValueError, match=message):
        module(app.name, "server_app").main(None, app.context(**settings))


def test_fedhkd_has_one_model(module: Module) -> None:
    with pytest.raises(ConfigError, match=r"fedhkd needs one model for all clients"):
        module("fedhkd", "server_app").main(None, FEDHKD.context(model="mlp,lenet"))


@pytest.mark.parametrize("app", [FEDHKD, FEDHEAD, FEDHYB], ids=lambda app: app.name)
def test_test_data_is_read_before_the_work(app: App, module: Module, tmp_path: Path) -> None:
    # Methods that need no public data.
    methods = {"fedhead": {"method": "fedhead"}, "fedhyb": {"method": "fedhyb-2"}}
    own = {**TABLE, **methods.get(app.name, {})}
    for path, message in (
        ("test.csv", r"test-path must be an absolute path, got 'test.csv'"),
        ("/gone.csv", r"test-path: '/gone.csv' does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            module(app.name, "server_app").main(None, app.context(**own, **{"test-path": path}))


@every
def test_every_app_tells_its_strategy(
    app: App, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[KDStrategy, float]] = []
    start = KDStrategy.start

    def watched(self: KDStrategy, *args: Any, timeout: float, **kwargs: Any) -> Any:
        started.append((self, timeout))
        return start(self, *args, timeout=timeout, **kwargs)

    monkeypatch.setattr(KDStrategy, "start", watched)
    folder = tmp_path / "state"
    settings = {"min-train-nodes": 2, "max-void-rounds": 5, "max-examples": 77, "checkpoint-dir": str(folder)}
    context = app.context(**settings, timeout=123, num_server_rounds=1, model="mlp", fraction_train=0.9)
    grid = InlineGrid(module(app.name, "client_app").app, 2, run_config=context.run_config)
    module(app.name, "server_app").main(grid, context)
    ((strategy, timeout),) = started
    assert timeout == 123.0
    options = strategy_options(context)
    del options["callbacks"]
    assert {name: getattr(strategy, name) for name in options} == options
    assert (folder / CHECKPOINT).exists()


def test_a_run_goes_on_after_its_last_round(module: Module, tmp_path: Path) -> None:
    def run(out: str, rounds: int, **settings: Any) -> RunResult:
        given = {**FEDHKD.run_config(), "num-server-rounds": rounds, "out": str(tmp_path / out), **settings}
        context = FEDHKD.context(**given)
        grid = InlineGrid(module("fedhkd", "client_app").app, CLIENTS, run_config=context.run_config)
        module("fedhkd", "server_app").main(grid, context)
        (actual,) = files.load(tmp_path / out).runs
        return actual

    folder = {"checkpoint-dir": str(tmp_path / "state")}
    whole = run("whole", 3)
    run("first", 1, **folder)
    rest = run("rest", 3, **folder, resume=True)
    assert [stats.round for stats in rest.rounds] == [2, 3]
    for ours, theirs in zip(rest.rounds, whole.rounds[1:], strict=True):
        assert (ours.global_accuracy, ours.clients) == (theirs.global_accuracy, theirs.clients)
    # There is nothing left to do, and the result says so.
    assert run("done", 3, **folder, resume=True).rounds == ()


def test_rounds_with_too_few_answers_end_the_run(module: Module, tmp_path: Path) -> None:
    context = FEDHKD.context(**FEDHKD.run_config(), min_train_nodes=3, max_void_rounds=2)
    context.run_config["num-server-rounds"] = 9
    grid = InlineGrid(
        module("fedhkd", "client_app").app,
        CLIENTS,
        run_config=context.run_config,
        faults={1: Fault("raise")},
    )
    with pytest.raises(VoidRoundsError, match=r"\b2\b"):
        module("fedhkd", "server_app").main(grid, context)
