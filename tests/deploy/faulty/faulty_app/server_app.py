"""The server of any method, which saves its result as JSON."""

import time
from typing import Any

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
from flwr_kd.server.records import Node

app = ServerApp()


def patient(kind: type[Any], patience: float) -> type[Any]:
    """Return a strategy whose timeout is a multiple of the time that the handshakes take on this machine."""
    begun = time.monotonic()

    class Patient(kind):  # type: ignore[misc]
        def begin(self, nodes: list[Node]) -> None:
            super().begin(nodes)
            self.current_run.timeout = patience * (time.monotonic() - begun)

    return Patient


@app.main()
def main(grid: Grid, context: Context) -> None:
    method = registry.get(str(context.run_config["method"]))
    run, out = experiment(context).of(method), output_folder(context)
    kind: type[Any] = method.strategy
    if patience := float(context.run_config["patience"]):
        kind = patient(kind, patience)
    strategy = kind(method.config_class.from_wire(context.run_config), **strategy_options(context))
    initial = ArrayRecord(run.build_model().state_dict()) if strategy.sends_weights else ArrayRecord()
    result = strategy.start(grid, initial, num_rounds=run.rounds, timeout=phase_timeout(context))
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="faulty"), out)
