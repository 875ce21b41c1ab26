"""FedHKD's ServerApp: the strategy, the global model's accuracy, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd import registry
from flwr_kd.experiments.run_config import (
    comparison,
    evaluator,
    experiment,
    output_folder,
    phase_timeout,
    strategy_options,
)
from flwr_kd.experiments.runner import check
from flwr_kd.results.files import save
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDConfig

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = experiment(context).of(registry.get("fedhkd"))
    out = output_folder(context)
    config = FedHKDConfig.from_wire(context.run_config)
    # With your own model or data sets, remove this check, and evaluate_fn if the server has no test data.
    check(run, config)
    strategy = FedHKD(config, **strategy_options(context))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(run.build_model().state_dict()),
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
        evaluate_fn=evaluator(context, run),
    )
    if out is not None:
        save(comparison(context, strategy, result, method="fedhkd", app="apps/fedhkd"), out)
