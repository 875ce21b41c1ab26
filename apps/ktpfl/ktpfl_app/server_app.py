"""The ServerApp: the method's strategy, which mixes the clients' soft predictions, and the result as JSON."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd import registry
from flwr_kd.app import check, comparison, experiment, hyperparameters, output_folder
from flwr_kd.config import ConfigError
from flwr_kd.results import save
from flwr_kd.simulation import server_options

METHODS = ("ktpfl", "sim-pfl", "topk-pfl", "fedmd")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    name = str(context.run_config["method"])
    if name not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    method = registry.get(name)
    run = experiment(context).of(method)
    out = output_folder(context)
    config = hyperparameters(method, context.run_config)
    # With data of your own, leave this out.
    check(run, config, method)
    # So that the numbers are those of `flwr-kd simulate`: more threads are faster, and round otherwise.
    torch.set_num_threads(1)
    strategy = method.strategy(
        config,
        # With data of your own, leave this out, too: the server needs no public data, and expects the set that most
        # clients have. With public-data="server" it is public_set=..., of which samples are sent.
        **server_options(method, run),
        seed=run.seed,
        fraction_train=run.fraction_train,
        min_available_nodes=run.clients,
    )
    # No arrays and no evaluate_fn: the models stay at the clients.
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=run.rounds)
    if out is not None:
        save(comparison(context, strategy, result, method=name, app="apps/ktpfl"), out)
