"""An app's Python files: thin, and meant to be edited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr_kd.app_files.traits import Traits

if TYPE_CHECKING:
    from flwr_kd.app_files.project import AppProject

__all__ = ["client_app", "package", "server_app"]


def package(project: AppProject) -> str:
    """Return the text of ``__init__.py``."""
    names = [f'"{method.name}"' for method in project.methods]
    values = ", ".join(names) if len(names) > 1 else f"{names[0]},"
    return f'''\
"""{project.title} as a Flower App: ``flwr run {project.place}``."""

METHODS = ({values})
"""Names that `flwr-kd methods` lists{"; the setting method is one of them" if len(names) > 1 else ""}."""
'''


def server_app(project: AppProject) -> str:
    """Return the text of ``server_app.py``."""
    traits = project.traits
    helpers = [
        "chosen_method",
        "comparison",
        "experiment",
        "hyperparameters",
        "output_folder",
        "phase_timeout",
    ]
    helpers += ["strategy_options", *(["evaluator"] if traits.measures_model else [])]
    imported = "".join(f"    {name},\n" for name in sorted(helpers))
    runner = "check, server_options" if traits.server_options else "check"
    evaluate = "        evaluate_fn=evaluator(context, run),\n" if traits.measures_model else ""
    return f'''\
"""The ServerApp: {_served(traits)}, and the result as JSON."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_kd.experiments.run_config import (
{imported})
from flwr_kd.experiments.runner import {runner}
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
    # With your own model or data sets, remove this check\
{", and evaluate_fn if the server has no test data" if traits.measures_model else ""}.
    check(run, config, method)
{_strategy(traits)}
    result = strategy.start(
        grid=grid,
{_initial_arrays(traits)}
        num_rounds=run.rounds,
        timeout=phase_timeout(context),
{evaluate}    )
    if out is not None:
        save(comparison(context, strategy, result, method=method.name, app="{project.place}"), out)
'''


def _served(traits: Traits) -> str:
    parts = ["the strategy"]
    if traits.public_at & {"server", "clients"}:
        parts.append("its public data")
    if traits.measures_model:
        parts.append("the accuracy of its model")
    return ", ".join(parts)


def _strategy(traits: Traits) -> str:
    if not traits.server_options:
        return "    strategy = method.strategy(config, **strategy_options(context))"
    arguments = []
    if traits.public_at & {"server", "synthetic"} or any(method.server_model for method in traits.methods):
        arguments.append("model=...")
    if traits.public_at & {"server", "clients"}:
        arguments.append("public_set=...")
    if "synthetic" in traits.public_at:
        arguments.append("input_shape=...")
    if traits.public_at & {"server", "synthetic"} or any(method.server_device for method in traits.methods):
        arguments.append("device=...")
    taken = ", ".join(arguments)
    note = (
        f"# With your own model or data sets, replace server_options by what the method takes:\n    # {taken}"
    )
    if arguments == ["device=..."]:
        note = "# server_options is the device on which the server trains."
    if traits.public_at == {"clients"}:
        note = """\
# With your own data sets, replace server_options by public_set=... or remove it: the server then expects the
    # set that most clients have. With public-at="server" the set is required, and its samples are sent."""
    return f"""\
    {note}
    strategy = method.strategy(config, **server_options(method, run), **strategy_options(context))"""


def _initial_arrays(traits: Traits) -> str:
    weights = "ArrayRecord(run.build_model().state_dict())"
    if traits.global_models == {True}:
        return f"        initial_arrays={weights},"
    if traits.global_models == {False}:
        return "        # There is no global model.\n        initial_arrays=ArrayRecord(),"
    return f"        initial_arrays={weights} if method.global_model else ArrayRecord(),"


def client_app(project: AppProject) -> str:
    """Return the text of ``client_app.py``."""
    public = "clients" in project.traits.public_at
    helpers = ["chosen_method", "client_data", "common_test_data", *(["public_options"] if public else [])]
    note = "    # Put your own model and data sets here. They must be the same for every message.\n"
    build = """\
    common = common_test_data(context)
    return method.client(model, train_set, test_set, context=context, common_test_set=common)"""
    if public:
        note = """\
    # Put your own model and data sets here. They must be the same for every message. Set public_set=... to the same
    # samples in the same order at every client, or leave it out if the server has them.
"""
        build = """\
    public = public_options(context, method)
    common = common_test_data(context)
    return method.client(model, train_set, test_set, context=context, common_test_set=common, **public)"""
    return f'''\
"""The ClientApp: a client that trains on its part of the data set, or on its own data."""

from flwr.app import Context

from flwr_kd import KDClient, client_app
from flwr_kd.experiments.run_config import {", ".join(helpers)}

from . import METHODS


def build(context: Context) -> KDClient:
    method = chosen_method(context, METHODS)
{note}    model, train_set, test_set = client_data(context)
{build}


app = client_app(build)
'''
