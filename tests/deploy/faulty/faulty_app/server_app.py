"""Any method's server, and its result as JSON."""

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
    strategy = method.strategy(method.config_class.from_wire(context.run_config), **strategy_options(context))
    initial = ArrayRecord(run.build_model().state_dict()) if strategy.sends_weights else ArrayRecord()
    result = strategy.start(grid, initial, num_rounds=run.rounds, timeout=phase_timeout(context))
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="faulty"), out)
