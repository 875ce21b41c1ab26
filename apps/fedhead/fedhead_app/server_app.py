"""FedHEAD's ServerApp: the strategy, FedHEAD+'s public data, the global model's accuracy, the result as JSON."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd import registry
from flwr_kd.app import check, comparison, experiment, output_folder
from flwr_kd.config import ConfigError
from flwr_kd.results import save
from flwr_kd.simulation import bundle_of, evaluator, server_options
from flwr_kd.strategies.fedhead import FedHEAD, FedHEADConfig, FedHEADPlus

METHODS = ("fedhead", "fedhead-plus")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    name = str(context.run_config["method"])
    if name not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    method = registry.get(name)
    run = experiment(context).of(method)
    out = output_folder(context)
    config = FedHEADConfig.from_wire(context.run_config)
    # With data of your own, leave this out, and evaluate_fn if the server has no test data.
    check(run, config, method)
    # So that the numbers are those of `flwr-kd simulate`: more threads are faster, and round otherwise.
    torch.set_num_threads(1)
    sampling = {
        "seed": run.seed,
        "fraction_train": run.fraction_train,
        "min_available_nodes": run.clients,
    }
    if method.strategy is FedHEADPlus:
        # With data of your own: model=..., public_data=..., and device=... where the server distils.
        strategy: FedHEAD = FedHEADPlus(config, **server_options(method, run), **sampling)
    else:
        strategy = FedHEAD(config, **sampling)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(run.build_model().state_dict()),
        num_rounds=run.rounds,
        evaluate_fn=evaluator(run.build_model, bundle_of(run)),
    )
    if out is not None:
        save(comparison(context, strategy, result, method=name, app="apps/fedhead"), out)
