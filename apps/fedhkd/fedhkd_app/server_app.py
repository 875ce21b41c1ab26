"""The ServerApp: the strategy, the accuracy of its model, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.experiments.run_config import (
    chosen_method,
    comparison,
    evaluator,
    experiment,
    hyperparameters,
    output_folder,
    phase_timeout,
    strategy_options,
)
from flwr_kd.experiments.runner import check
from flwr_kd.learning.device import one_thread
from flwr_kd.results.files import save

from . import METHODS

app = ServerApp()


# One thread gives the numbers of `flwr-kd simulate`. More threads are faster, but change the rounding.
@app.main()
@one_thread()
def main(grid: Grid, context: Context) -> None:
    method = chosen_method(context, METHODS)
    run = experiment(context).of(method)
    out = output_folder(context)
    config = hyperparameters(method, context.run_config)
    # With your own model or data sets, remove this check, and evaluate_fn if the server has no test data.
    check(run, config, method)
    strategy = method.strategy(config, **strategy_options(context))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(run.build_model().state_dict()),
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
        evaluate_fn=evaluator(context, run),
    )
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="apps/fedhkd"), out)
