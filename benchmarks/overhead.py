"""What a round costs beside its SGD steps: Flower's Ray simulation against a bare PyTorch loop.

The bare loop has the same number of processes, each with its share of the clients' data in memory and one
thread. It makes the same number of steps on batches of the same size, with the same optimiser, and nothing
else; for KT-pFL, whose clients also distil, as many steps more.

``ratio`` is a round of the method without any evaluation over a round of the bare loop;
``ratio_with_evaluation`` is a round as `flwr-kd simulate` runs it, with each client's test split and the common
test set. Both are medians over pairs: in each repetition the bare loop and the method run one after the other.
Round 1, in which processes load data and warm up, is left out.

``flower`` is FedAvg written by hand for plain Flower, as in its tutorials, without any evaluation: what Flower
and Ray themselves cost on this machine.

Usage: python benchmarks/overhead.py [--quick] [--settings NAME,...] [--json FILE]   (the whole: an hour on 2 cores)
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from noting import Noting, noted
from torch import Tensor, nn

from flwr_kd import registry
from flwr_kd.client.client import KDClient
from flwr_kd.client.personal_state import PersonalState
from flwr_kd.config import MethodConfig
from flwr_kd.experiments import evaluation, runner
from flwr_kd.experiments.data import bundle_of, client_splits
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.learning import loop
from flwr_kd.learning.batches import Batches, into_batches
from flwr_kd.learning.device import one_thread
from flwr_kd.results.provenance import versions
from flwr_kd.transport.payload import Payload

PLAIN = "flower"
METHODS = (
    PLAIN,
    *(name for name, method in registry.methods().items() if "overhead" in method.benchmarks),
)
AIMS = {"fedavg": 1.05, "fedhkd": 1.15}
WORKERS = 2
PUBLIC = 250
FASHION: dict[str, Any] = {"dataset": "fashion-mnist", "public_limit": PUBLIC}
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"dataset": "digits", "model": "mlp"},
    "cnn": {**FASHION, "model": "cnn", "limit": 13_340, "test_limit": 2_223},
    "large": {**FASHION, "model": "resnet18", "limit": 1_000, "test_limit": 167},
}
"""With a quarter for their tests, clients train on 41, 500 and 37 images."""
BATCH_SIZE = 64
EPOCHS = {"small": 5, "cnn": 2, "large": 1}
PARTS = ("sgd", "data", "evaluation", "knowledge", "state", "payload", "build", "records", "server", "idle")
"""Where a round's time goes, as shares of workers times seconds.

sgd: training steps. data: fetching their batches. evaluation: of clients' test splits. knowledge: what a method
computes besides. state: reading and writing personal models. payload: knowledge to bytes. build: a client's model
and data, anew for each message. records: Flower's records to arrays and back. server: the common test set, in which
the workers are idle. idle: the rest, so Ray, Flower's queues, the server's sums, and waiting for the last client.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small and cnn, fewer images, one repetition")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="some of " + ", ".join(SETTINGS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=4, help="measured rounds of a repetition, after the first"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there; other settings' stay")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    settings, repeats, rounds = options.settings.split(","), options.repeats, options.rounds
    if options.quick:
        settings, repeats, rounds = [name for name in settings if name != "large"], 1, 2
    config = {
        "workers": WORKERS,
        "clients": 20,
        "rounds": rounds,
        "settings": SETTINGS,
        "local_epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
    }
    head = {"config": config, "versions": versions(), "quick": options.quick, "aims": AIMS}
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf-8"))
        if all(earlier.get(key) == value for key, value in head.items()):
            rows = [row for row in earlier["rows"] if row["setting"] not in settings]
    for name in settings:
        values = {
            **SETTINGS[name],
            **({"limit": 4_000, "test_limit": 667} if options.quick and name == "cnn" else {}),
        }
        rows += measured(name, values, options.methods.split(","), repeats, rounds)
        ratio = next(
            (row["ratio"] for row in rows if (row["setting"], row["method"]) == ("cnn", "fedavg")), None
        )
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            rows.sort(key=lambda row: list(SETTINGS).index(row["setting"]))
            results = {**head, "ratio": ratio, "rows": rows}
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    show(rows)


def measured(
    name: str, values: dict[str, Any], methods: list[str], repeats: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure one setting: the bare loop and each method, in turn, as often as asked."""
    experiment = Experiment(
        partition="iid", clients=20, rounds=rounds + 1, workers=WORKERS, backend="ray", device="cpu", **values
    )
    results: dict[str, dict[str, list[Any]]] = {method: defaultdict(list) for method in methods}
    for repeat in range(repeats):
        for method in methods:
            entry = registry.get("fedavg" if method == PLAIN else method)
            settings = [f"local-epochs={EPOCHS[name]}", f"batch-size={BATCH_SIZE}"]
            extra = PUBLIC if entry.public_at == "clients" else 0
            config = entry.config(settings + ([f"public-samples={PUBLIC}"] if extra else []))
            bare = bare_round(experiment, config, extra, rounds)
            each = results[method]
            if method == PLAIN:
                plain = hand_written(experiment, config)
                each["bare"].append(bare)
                each["seconds"].append(plain)
                print(f"{name} {method} {repeat + 1}/{repeats}: {plain / bare:.3f}", file=sys.stderr)
                continue
            plain, parts = simulated(entry, experiment, config, evaluate=False)
            whole, with_evaluation = simulated(entry, experiment, config, evaluate=True)
            each["bare"].append(bare)
            each["seconds"].append(plain)
            each["seconds_with_evaluation"].append(whole)
            each["parts"].append(parts)
            each["parts_with_evaluation"].append(with_evaluation)
            print(
                f"{name} {method} {repeat + 1}/{repeats}: bare {bare:.2f} s, {plain / bare:.3f}, with evaluation "
                f"{whole / bare:.3f}",
                file=sys.stderr,
            )
    return [row(name, method, each) for method, each in results.items()]


def row(name: str, method: str, each: dict[str, list[Any]]) -> dict[str, Any]:
    def ratio(key: str) -> list[float]:
        return [round(a / b, 4) for a, b in zip(each[key], each["bare"], strict=True)]

    def shares(key: str) -> dict[str, float]:
        return {part: round(statistics.median(one[part] for one in each[key]), 4) for part in PARTS}

    shown = {
        "setting": name,
        "method": method,
        "bare_seconds": round(statistics.median(each["bare"]), 4),
        "seconds": round(statistics.median(each["seconds"]), 4),
        "ratio": round(statistics.median(ratio("seconds")), 4),
        "ratios": ratio("seconds"),
    }
    if method == PLAIN:
        return shown
    return {
        **shown,
        "seconds_with_evaluation": round(statistics.median(each["seconds_with_evaluation"]), 4),
        "ratio_with_evaluation": round(statistics.median(ratio("seconds_with_evaluation")), 4),
        "ratios_with_evaluation": ratio("seconds_with_evaluation"),
        "parts": shares("parts"),
        "parts_with_evaluation": shares("parts_with_evaluation"),
    }


# ---------------------------------------------------------------------- the bare loop


def bare_round(experiment: Experiment, config: MethodConfig, extra: int, rounds: int) -> float:
    """Return the median seconds of a round in which each process trains its share of the clients."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(WORKERS):
        ours, theirs = context.Pipe()
        mine = list(range(experiment.clients))[index::WORKERS]
        process = context.Process(target=_bare, args=(theirs, experiment, config, extra, mine), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()
        seconds.append(time.perf_counter() - begun)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    return statistics.median(seconds[1:])


@one_thread()
def _bare(pipe: Any, experiment: Experiment, config: MethodConfig, extra: int, clients: list[int]) -> None:
    bundle, splits = bundle_of(experiment), client_splits(experiment)
    data = [(bundle.train.x[splits[i][0]], bundle.train.y[splits[i][0]]) for i in clients]
    models = [experiment.build_model(i) for i in clients]
    generator = torch.Generator().manual_seed(0)
    pipe.send(True)
    while pipe.recv():
        for model, (x, y) in zip(models, data, strict=True):
            _steps(model, x, y, config, extra, generator)
        pipe.send(True)


def _steps(
    model: nn.Module, x: Tensor, y: Tensor, config: MethodConfig, extra: int, generator: torch.Generator
) -> None:
    """Train as a tutorial does; then as many samples again as a client distils, of its own."""
    model.train()
    optimizer = loop.make_optimizer(model, config, config.learning_rate)
    for _ in range(config.local_epochs):
        for chunk in into_batches(torch.randperm(len(x), generator=generator), config.batch_size):
            _step(model, optimizer, x[chunk], y[chunk])
    for chunk in into_batches(torch.arange(extra) % len(x), config.batch_size):
        _step(model, optimizer, x[chunk], y[chunk])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


# ---------------------------------------------------------------------- the simulation, with its times


class TimedApp(Noting):
    """Notes where the time of each message goes."""

    def __init__(self, client_fn: Callable[[Context], Any], folder: str, evaluate: bool) -> None:
        self.client_fn, self.evaluate_splits = client_fn, evaluate
        super().__init__(self._client, folder)

    def _client(self, context: Context) -> Any:
        with _Clock("build"):
            client = self.client_fn(context)
        if not self.evaluate_splits:
            client.numpy_client.test_batches = None
        return client

    def note(self) -> dict[str, Any]:
        return _Clock.spent

    def __call__(self, message: Message, context: Context) -> Message:
        _instrument()
        _Clock.spent.clear()
        return super().__call__(message, context)


class _Clock:
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


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Clock(name):
            return function(*args, **kwargs)

    call.__name__ = "timed"
    return call


def _fetched(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        items = function(*args, **kwargs)
        while True:
            with _Clock("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    call.__name__ = "timed"
    return call


def _instrument() -> None:
    """Put clocks around the functions whose time is asked for, once per worker process."""
    if KDClient.measure.__name__ == "timed":
        return
    real = loop.fit
    fit = _timed("sgd", real)
    for name, module in list(sys.modules.items()):
        if name.startswith("flwr_kd") and getattr(module, "fit", None) is real:
            module.fit = fit  # type: ignore[attr-defined]
    Batches._fetch = _fetched(Batches._fetch)  # type: ignore[method-assign]
    KDClient.measure = _timed("evaluation", KDClient.measure)  # type: ignore[method-assign]
    KDClient.fit = _timed("knowledge", KDClient.fit)  # type: ignore[method-assign]
    Payload.to_bytes = _timed("payload", Payload.to_bytes)  # type: ignore[method-assign]
    for name in ("load", "save", "at", "check"):
        setattr(PersonalState, name, _timed("state", getattr(PersonalState, name)))


def simulated(
    entry: registry.Method, experiment: Experiment, config: MethodConfig, *, evaluate: bool
) -> tuple[float, dict[str, float]]:
    """Return the median seconds of a round after the first, and where they went."""
    ends: list[float] = []
    at_server: dict[int, float] = {}
    real_evaluator = evaluation.evaluator

    def timed_evaluator(*args: Any, **kwargs: Any) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        function = real_evaluator(*args, **kwargs)

        def call(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            begun = time.perf_counter()
            result = function(server_round, arrays) if evaluate else None
            at_server[server_round] = time.perf_counter() - begun
            return result

        return call

    evaluation.evaluator = timed_evaluator
    try:
        with noted(lambda client_fn, folder: TimedApp(client_fn, folder, evaluate)) as lines:
            runner.run(
                entry,
                replace(experiment, seed=0),
                config,
                on_round=lambda _: ends.append(time.perf_counter()),
            )
    finally:
        evaluation.evaluator = real_evaluator
    # From the end of one round to the end of the next, so that nothing between rounds is left out.
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    of_rounds: dict[str, list[float]] = {part: [] for part in PARTS}
    for server_round, whole in enumerate(seconds, start=2):
        mine = [line for line in lines if line["round"] == str(server_round)]
        spent = {part: sum(line.get(part, 0.0) for line in mine) for part in PARTS}
        calls = sum(line["call"] for line in mine)
        spent["records"] = calls - sum(spent.values())
        spent["server"] = WORKERS * at_server.get(server_round, 0.0)
        spent["idle"] = WORKERS * whole - calls - spent["server"]
        for part in PARTS:
            of_rounds[part].append(spent[part] / (WORKERS * whole))
    return statistics.median(seconds), {part: statistics.median(shares) for part, shares in of_rounds.items()}


# ---------------------------------------------------------------------- FedAvg on plain Flower


def hand_written(experiment: Experiment, config: MethodConfig) -> float:
    """Return the median seconds of a round after the first of FedAvg on plain Flower."""
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    ends: list[float] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        train_set, rows = bundle_of(experiment).train, client_splits(experiment)[index][0]
        x, y = train_set.x[rows], train_set.y[rows]
        model = experiment.build_model(index)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        _steps(model, x, y, config, 0, torch.Generator().manual_seed(index))
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
        return Message(RecordDict(content), reply_to=message)

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=experiment.clients)
        initial = ArrayRecord(experiment.build_model().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=experiment.rounds, evaluate_fn=evaluate)

    os.environ["OMP_NUM_THREADS"] = "1"
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=experiment.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": WORKERS, "include_dashboard": False, "log_to_driver": False},
        },
    )
    # The first is before round 1.
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[1:]))


def show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        title="seconds per round over a bare loop's; shares of a round with evaluation, %",
    )
    for header in ("setting", "method", "bare s", "ratio", "with\nevaluation", *PARTS):
        table.add_column(header, justify="left" if header in ("setting", "method") else "right")
    for each in rows:
        table.add_row(
            each["setting"],
            each["method"],
            f"{each['bare_seconds']:.2f}",
            f"{each['ratio']:.3f}",
            *(
                [f"{each['ratio_with_evaluation']:.3f}"]
                + [f"{100 * each['parts_with_evaluation'][part]:.1f}" for part in PARTS]
                if "parts" in each
                else []
            ),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
