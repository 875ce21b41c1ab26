"""The server of any method, which saves its result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd import registry
from flwr_kd.experiments.run_config import (
    comparison,
    experiment,
    output_folder,
    phase_timeout,
    strategy_options,
)
from flwr_kd.results.files import save

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    method = registry.get(str(context.run_config["method"]))
    run, out = experiment(context).of(method), output_folder(context)
    config, options = method.config_class.from_wire(context.run_config), strategy_options(context)
    strategy = method.strategy(config, **options)
    initial = ArrayRecord(run.build_model().state_dict()) if strategy.sends_weights else ArrayRecord()
    timeout = phase_timeout(context)
    if patience := float(context.run_config["patience"]):
        # The first round shows how long a round takes on this machine at this moment.
        first = strategy.start(grid, initial, num_rounds=1, timeout=timeout)
        timeout = patience * first.rounds[0].seconds
        strategy = method.strategy(config, **{**options, "resume": True})
    result = strategy.start(grid, initial, num_rounds=run.rounds, timeout=timeout)
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="faulty"), out)
