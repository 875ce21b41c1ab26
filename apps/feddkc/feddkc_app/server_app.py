"""FedDKC's ServerApp: the strategy, which trains a predictor on the clients' features, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.experiments.run_config import (
    comparison,
    experiment,
    output_folder,
    phase_timeout,
    strategy_options,
)
from flwr_kd.experiments.runner import check
from flwr_kd.learning.device import one_thread
from flwr_kd.results.files import save
from flwr_kd.strategies.feddkc import FedDKC, FedDKCConfig

app = ServerApp()


# One thread gives the numbers of `flwr-kd simulate`. More threads are faster, but change the rounding.
@app.main()
@one_thread()
def main(grid: Grid, context: Context) -> None:
    run = experiment(context)
    out = output_folder(context)
    config = FedDKCConfig.from_wire(context.run_config)
    # With your own models or data sets, remove this check: the server needs neither.
    check(run, config)
    # `device` is where the predictor is trained. server_model=... sets your own predictor.
    strategy = FedDKC(config, device=run.device, **strategy_options(context))
    # No arrays and no evaluate_fn: the models stay at the clients.
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(),
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
    )
    if out is not None:
        method = f"feddkc-{config.refinement}"
        save(comparison(context, strategy, result, method=method, app="apps/feddkc"), out)
