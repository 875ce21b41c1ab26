"""FedHKD's ServerApp: the strategy, the global model's accuracy, and the result as JSON."""

import json
import shlex
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.config import ConfigError
from flwr_kd.results import Comparison, RunResult, check_free, save, versions
from flwr_kd.simulation import bundle_of, evaluator, round_result
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDConfig
from flwr_kd.strategy import KDResult

from . import experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = experiment(context, clients=cast(int, context.run_config["min-nodes"]))
    out = Path(str(context.run_config["out"]))
    # Before the work, not after it. An empty text is the relative path ".".
    if context.run_config["out"]:
        if not out.is_absolute():
            raise ConfigError(f"out must be an absolute path, got {str(out)!r}")
        check_free(out, force=False)
    strategy = FedHKD(
        FedHKDConfig.from_wire(context.run_config),
        seed=run.seed,
        fraction_train=run.fraction_train,
        min_available_nodes=run.clients,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(run.build_model().state_dict()),
        num_rounds=run.rounds,
        evaluate_fn=evaluator(run.build_model, bundle_of(run)),
    )
    if context.run_config["out"]:
        save(comparison(context, strategy, result), out)


def comparison(context: Context, strategy: FedHKD, result: KDResult) -> Comparison:
    asked = {client for stats in result.rounds for client in stats.bytes_by_partition}
    shared = experiment(context, clients=len(asked)).shared()
    settings = {name: value for name, value in context.run_config.items() if name != "out"}
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in sorted(settings.items()))
    rounds = tuple(round_result(stats) for stats in result.rounds)
    return Comparison(
        # The run's backend is Flower's; the Experiment's has no part in it.
        config={**shared, "backend": "flwr", "workers": None, "seeds": [strategy.seed]},
        versions=versions(),
        command=shlex.join(["flwr", "run", "apps/fedhkd", "--run-config", values]),
        runs=(RunResult("fedhkd", strategy.seed, rounds, dict(strategy.config.to_wire())),),
    )
