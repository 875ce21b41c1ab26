"""FedHKD's ServerApp: the strategy, the global model's accuracy, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.app import check, comparison, experiment, output_folder
from flwr_kd.results import save
from flwr_kd.simulation import bundle_of, evaluator
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDConfig

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = experiment(context)
    out = output_folder(context)
    config = FedHKDConfig.from_wire(context.run_config)
    # With data of your own, leave this out, and evaluate_fn if the server has no test data.
    check(run, config)
    strategy = FedHKD(
        config,
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
    if out is not None:
        save(comparison(context, strategy, result, method="fedhkd", app="apps/fedhkd"), out)
