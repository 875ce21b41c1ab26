"""The ServerApp: the method's strategy, which mixes the clients' soft predictions, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.checks import ConfigError
from flwr_kd.experiments.run_config import (
    chosen_method,
    comparison,
    experiment,
    hyperparameters,
    output_folder,
    phase_timeout,
    strategy_options,
)
from flwr_kd.experiments.runner import check, server_options
from flwr_kd.learning.device import one_thread
from flwr_kd.results.files import save

METHODS = ("ktpfl", "sim-pfl", "topk-pfl", "fedmd")
app = ServerApp()


# One thread gives the numbers of `flwr-kd simulate`. More threads are faster, but change the rounding.
@app.main()
@one_thread()
def main(grid: Grid, context: Context) -> None:
    method = chosen_method(context, METHODS)
    run = experiment(context).of(method)
    out = output_folder(context)
    config = hyperparameters(method, context.run_config)
    warm_up = config.to_wire().get("warmup-epochs", 0)
    if run.own is not None and warm_up:
        raise ConfigError(
            f"warmup-epochs must be 0 with classes: public data has no labels then, got {warm_up}"
        )
    # With your own models or data sets, remove this check.
    check(run, config, method)
    # With your own data sets, replace server_options by public_set=... or remove it: the server then expects the
    # set that most clients have. With public-at="server" the set is required, and its samples are sent.
    strategy = method.strategy(config, **server_options(method, run), **strategy_options(context))
    # No arrays and no evaluate_fn: the models stay at the clients.
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(),
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
    )
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="apps/ktpfl"), out)
