"""What a round costs beside its SGD steps: each backend against a bare PyTorch loop.

The bare loop trains one client after the other in this process, with one thread: the same number of steps on
batches of the same size, with the same kind of optimiser as a tutorial has it, and nothing else; for KT-pFL, whose
clients also distil, as many steps more.

``cpu`` is the CPU time of a round, of all processes, over that of the bare loop; ``wall`` the seconds of a round
over the bare loop's divided by the number of workers. Each is a median over repetitions, with its range: in each
repetition the bare loop and the method run one after the other, and round 1, in which processes load data and warm
up, is left out. ``with evaluation`` is a round as ``flwr-kd simulate`` runs it, with each client's test split and
the common test set.

``flower`` is FedAvg written by hand for plain Flower, as in its tutorials, without any evaluation: what Flower and
Ray themselves cost on this machine.

Usage: python benchmarks/overhead.py [--settings NAME,...] [--methods NAME,...] [--backends NAME,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flwr_kd import registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.personal_state import PersonalState
from flwr_kd.config import MethodConfig
from flwr_kd.experiments import runner
from flwr_kd.experiments.data import bundle_of, client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning import loop
from flwr_kd.learning.batches import Batches, into_batches
from flwr_kd.learning.device import one_thread
from flwr_kd.results.provenance import versions
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.transport.payload import Payload

PLAIN = "flower"
METHODS = (
    PLAIN,
    *(name for name, method in registry.methods().items() if "overhead" in method.benchmarks),
)
BACKENDS = {"inline": 1, "processes": 2, "ray": 2}
"""Number of workers of each."""
PUBLIC = 250
FASHION: dict[str, Any] = {"dataset": "fashion-mnist", "public_limit": PUBLIC, "clients": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {"dataset": "digits", "model": "mlp", "clients": 100},
    "lenet": {**FASHION, "model": "lenet", "limit": 13_340, "test_limit": 2_223},
    "cnn": {**FASHION, "model": "cnn", "limit": 13_340, "test_limit": 2_223},
    "resnet18": {**FASHION, "model": "resnet18", "limit": 1_000, "test_limit": 167},
}
"""With a quarter for their tests, clients train on 14, 500, 500 and 37 images."""
BATCH_SIZE = 64
EPOCHS = {"mlp": 5, "lenet": 1, "cnn": 1, "resnet18": 1}
AIMS = {
    "mlp": {"cpu": 1.7},
    "lenet": {"cpu": 1.0},
    "cnn": {"cpu": 1.0, "cpu_with_evaluation": 1.1},
    "resnet18": {"cpu": 1.25},
}
"""The aims are for FedAvg in one process."""
PARTS = (
    "sgd",
    "data",
    "evaluation",
    "knowledge",
    "state",
    "payload",
    "build",
    "records",
    "common test set",
    "server",
)
"""Where the seconds of a round go with one worker in one process, as shares.

sgd: training steps. data: fetching their batches. evaluation: the clients' test splits. knowledge: what a method
computes besides. state: reading and writing personal models. payload: knowledge to bytes. build: a client's model
and data, for each message. records: Flower's records to arrays and back, and all else of a message at the client.
common test set: its evaluation. server: the rest.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=2, help="measured rounds of a repetition, after the first"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there; other rows stay")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {
        "rounds": options.rounds,
        "repeats": options.repeats,
        "workers": BACKENDS,
        "settings": SETTINGS,
        "local_epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
    }
    head = {"config": config, "versions": versions(), "aims": AIMS}
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf-8"))
        if all(earlier.get(key) == value for key, value in head.items()):
            rows = earlier["rows"]
    for setting, method, backend in itertools.product(
        options.settings.split(","), options.methods.split(","), options.backends.split(",")
    ):
        # Other methods differ from FedAvg by what they compute, which is the same in all backends.
        if (method == PLAIN and backend != "ray") or (
            method not in (PLAIN, "fedavg") and backend != "inline"
        ):
            continue
        key = (setting, method, backend)
        rows = [row for row in rows if (row["setting"], row["method"], row["backend"]) != key]
        rows.append(measured(*key, repeats=options.repeats, rounds=options.rounds))
        rows.sort(key=lambda row: (list(SETTINGS).index(row["setting"]), METHODS.index(row["method"])))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**head, "rows": rows}, indent=2)
            options.json.write_text(text + "\n", encoding="utf-8")
    show(rows)


def measured(setting: str, method: str, backend: str, *, repeats: int, rounds: int) -> dict[str, Any]:
    """Measure the bare loop and a method in turn, as often as asked."""
    experiment = Experiment(
        partition="iid",
        rounds=rounds + 1,
        workers=BACKENDS[backend],
        backend=backend,
        device="cpu",
        **SETTINGS[setting],
    )
    entry = registry.get("fedavg" if method == PLAIN else method)
    extra = PUBLIC if entry.public_at == "clients" else 0
    settings = [f"local-epochs={EPOCHS[setting]}", f"batch-size={BATCH_SIZE}"]
    config = entry.config(settings + ([f"public-samples={PUBLIC}"] if extra else []))
    ratios: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    parts: list[dict[str, float]] = []
    for repeat in range(repeats):
        bare = bare_round(experiment, config, extra, rounds)
        if method == PLAIN:
            runs = {"": hand_written(experiment, config)}
        else:
            runs = {
                suffix: simulated(entry, experiment, config, evaluate=bool(suffix))
                for suffix in ("", "_with_evaluation")
            }
        for suffix, spent in runs.items():
            ratios[f"cpu{suffix}"].append(spent.cpu / bare.cpu)
            ratios[f"wall{suffix}"].append(spent.wall / (bare.wall / experiment.workers))
            seconds[f"seconds{suffix}"].append(spent.wall)
            seconds[f"cpu_seconds{suffix}"].append(spent.cpu)
        seconds["bare_seconds"].append(bare.wall)
        if method != PLAIN and backend == "inline":
            parts.append(shares(entry, experiment, config))
        line = ", ".join(f"{name} {values[-1]:.3f}" for name, values in ratios.items())
        print(f"{setting} {method} {backend} {repeat + 1}/{repeats}: {line}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"setting": setting, "method": method, "backend": backend}
    row |= {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    for name, values in ratios.items():
        row[name] = round(statistics.median(values), 4)
        row[f"{name}_range"] = [round(min(values), 4), round(max(values), 4)]
    if parts:
        row["parts"] = {part: round(statistics.median(one[part] for one in parts), 4) for part in PARTS}
    return row


class Spent:
    """Seconds of the wall clock and of the CPU, of this process and its children; the median of several rounds."""

    def __init__(self) -> None:
        self._marks = [self._now()]

    @staticmethod
    def _now() -> tuple[float, float]:
        cpu = 0.0
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            cpu += times.user + times.system
        return time.perf_counter(), cpu

    def mark(self, *_: object) -> None:
        """Note the end of a round."""
        self._marks.append(self._now())

    def _median(self, kind: int) -> float:
        # From the end of one round to the end of the next, so that nothing between rounds is left out.
        return statistics.median(b[kind] - a[kind] for a, b in itertools.pairwise(self._marks[1:]))

    @property
    def wall(self) -> float:
        return self._median(0)

    @property
    def cpu(self) -> float:
        return self._median(1)


# ---------------------------------------------------------------------- the bare loop


@one_thread()
def bare_round(experiment: Experiment, config: MethodConfig, extra: int, rounds: int) -> Spent:
    """Train all clients in turn, some rounds."""
    bundle, splits = bundle_of(experiment), client_splits(experiment)
    data = [(bundle.train.x[rows], bundle.train.y[rows]) for rows, _ in splits]
    models = [experiment.build_model(i) for i in range(experiment.clients)]
    generator = torch.Generator().manual_seed(0)
    spent = Spent()
    for _ in range(rounds + 1):
        for model, (x, y) in zip(models, data, strict=True):
            steps(model, x, y, config, extra, generator)
        spent.mark()
    return spent


def steps(
    model: nn.Module, x: Tensor, y: Tensor, config: MethodConfig, extra: int, generator: torch.Generator
) -> None:
    """Train as a tutorial does; then as many samples again as a client distils, of its own."""
    model.train()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=config.learning_rate)
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=config.learning_rate, momentum=config.momentum)
    for _ in range(config.local_epochs):
        for chunk in into_batches(torch.randperm(len(x), generator=generator), config.batch_size):
            step(model, optimizer, x[chunk], y[chunk])
    for chunk in into_batches(torch.arange(extra) % len(x), config.batch_size):
        step(model, optimizer, x[chunk], y[chunk])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


# ---------------------------------------------------------------------- the simulation


class NoTestData:
    """Builds clients that do not evaluate, in any process."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, *arguments: Any) -> Any:
        client = self._build(*arguments)
        client.numpy_client.test_batches = None
        return client


@contextmanager
def no_evaluation() -> Iterator[None]:
    """Leave out the evaluation at clients and server within the block."""
    build, evaluator = runner.build_client, runner.evaluator
    runner.build_client = NoTestData(build)  # type: ignore[assignment]
    runner.evaluator = lambda *_, **__: lambda *_: None
    try:
        yield
    finally:
        runner.build_client, runner.evaluator = build, evaluator


def simulated(
    entry: registry.Method, experiment: Experiment, config: MethodConfig, *, evaluate: bool
) -> Spent:
    """Run an experiment, and return what its rounds took."""
    spent = Spent()
    if evaluate:
        runner.run(entry, experiment, config, on_round=spent.mark)
    else:
        with no_evaluation():
            runner.run(entry, experiment, config, on_round=spent.mark)
    return spent


# ---------------------------------------------------------------------- where the time goes


class Clock:
    """Adds up the time inside a block; what runs inside another block is not counted there."""

    spent: ClassVar[dict[str, float]] = defaultdict(float)
    open: ClassVar[list[list[float]]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.open.append([time.perf_counter(), 0.0])

    def __exit__(self, *_: object) -> None:
        begun, inner = self.open.pop()
        took = time.perf_counter() - begun
        self.spent[self.name] += took - inner
        if self.open:
            self.open[-1][1] += took


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Flower looks at a client_fn's signature.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Clock(name):
            return function(*args, **kwargs)

    return call


def timed_items(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        items = function(*args, **kwargs)
        while True:
            with Clock("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    return call


@contextmanager
def clocks() -> Iterator[None]:
    """Time the functions whose share is asked for, within the block."""
    real = loop.fit
    places: list[tuple[Any, str, str]] = [
        (KDClient, "measure", "evaluation"),
        (KDClient, "fit", "knowledge"),
        (Payload, "to_bytes", "payload"),
        *((PersonalState, name, "state") for name in ("load", "save", "at", "check")),
        (runner, "build_client", "build"),
        (InlineGrid, "_call", "records"),
    ]
    places += [
        (module, "fit", "sgd")
        for name, module in list(sys.modules.items())
        if name.startswith("flwr_kd") and getattr(module, "fit", None) is real
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    fetch, evaluator = Batches._fetch, runner.evaluator
    try:
        for owner, name, part in places:
            setattr(owner, name, timed(part, getattr(owner, name)))
        Batches._fetch = timed_items(fetch)  # type: ignore[method-assign]
        runner.evaluator = lambda *args, **kwargs: timed("common test set", evaluator(*args, **kwargs))
        yield
    finally:
        Batches._fetch, runner.evaluator = fetch, evaluator  # type: ignore[method-assign]
        for owner, name, value in before:
            setattr(owner, name, value)


def shares(entry: registry.Method, experiment: Experiment, config: MethodConfig) -> dict[str, float]:
    """Return where the time of the rounds after the first goes, with evaluation."""
    seconds: list[float] = []
    at_end: list[dict[str, float]] = []

    def note(_: object) -> None:
        seconds.append(time.perf_counter())
        at_end.append(dict(Clock.spent))

    Clock.spent.clear()
    with clocks():
        runner.run(entry, experiment, config, on_round=note)
    whole = seconds[-1] - seconds[0]
    share = {
        part: (at_end[-1].get(part, 0.0) - at_end[0].get(part, 0.0)) / whole
        for part in PARTS
        if part != "server"
    }
    return {**share, "server": 1 - sum(share.values())}


# ---------------------------------------------------------------------- FedAvg on plain Flower


def hand_written(experiment: Experiment, config: MethodConfig) -> Spent:
    """Run FedAvg on plain Flower, and return what its rounds took."""
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    spent = Spent()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        index = int(context.node_config["partition-id"])
        train_set, rows = bundle_of(experiment).train, client_splits(experiment)[index][0]
        x, y = train_set.x[rows], train_set.y[rows]
        model = experiment.build_model(index)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        steps(model, x, y, config, 0, torch.Generator().manual_seed(index))
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
        return Message(RecordDict(content), reply_to=message)

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        # The first call is before round 1.
        if server_round:
            spent.mark()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=experiment.clients)
        initial = ArrayRecord(experiment.build_model().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=experiment.rounds, evaluate_fn=evaluate)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=experiment.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": experiment.workers, "include_dashboard": False, "log_to_driver": False},
        },
    )
    return spent


HEADER = ("setting", "method", "backend", "bare s", "round s", "CPU", "wall", "CPU, eval.", "wall, eval.")


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table; the page shows the same."""

    def ratio(name: str) -> str:
        if name not in row:
            return "–"
        low, high = row[f"{name}_range"]
        return f"{row[name]:.2f} ({low:.2f} to {high:.2f})"

    ratios = [ratio(name + suffix) for suffix in ("", "_with_evaluation") for name in ("cpu", "wall")]
    head = [row["setting"], row["method"], row["backend"]]
    return [*head, f"{row['bare_seconds']:.2f}", f"{row['seconds']:.2f}", *ratios]


def show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title="a round over a bare loop's: medians, and ranges over repetitions"
    )
    for name in HEADER:
        table.add_column(name, justify="left" if name in HEADER[:3] else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
