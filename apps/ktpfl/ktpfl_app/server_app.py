"""The ServerApp: the strategy, its public data, the accuracy of its model, and the result as JSON."""

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
from flwr_kd.experiments.runner import check, server_options
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
    # With your own data sets, replace server_options by public_set=... or remove it: the server then expects the
    # set that most clients have. With public-at="server" the set is required, and its samples are sent.
    strategy = method.strategy(config, **server_options(method, run), **strategy_options(context))
    result = strategy.start(
        grid=grid,
        # There is no global model.
        initial_arrays=ArrayRecord(),
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
        evaluate_fn=evaluator(context, run),
    )
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="apps/ktpfl"), out)
