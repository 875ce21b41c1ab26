"""The options of `simulate` and `compare`: listed once, and the same in Python and on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from flwr_kd import Experiment, ExperimentOptions
from flwr_kd.cli import app
from flwr_kd.cli.options import RunOptions, with_options
from flwr_kd.experiments.options import DataOptions, option


def flags(command: str) -> dict[str, Any]:
    """Return a command's options and their defaults, by name."""
    listed = typer.main.get_command(app.app).commands[command]  # type: ignore[attr-defined]
    return {parameter.name: parameter.default for parameter in listed.params if parameter.name != "help"}


@pytest.mark.parametrize(
    ("command", "others"),
    [("simulate", {"method", "seed", "seeds"}), ("compare", {"methods", "config", "seeds"})],
)
def test_a_command_has_each_option_with_its_default(command: str, others: set[str]) -> None:
    parameters = flags(command)
    assert len(fields(ExperimentOptions)) > 20
    for group in (ExperimentOptions, RunOptions):
        for each in fields(group):
            assert each.metadata["help"]
            assert parameters.pop(each.name) == each.default, each.name
    assert set(parameters) == others


def test_the_options_and_a_seed_are_the_experiment() -> None:
    options = {each.name for each in fields(ExperimentOptions)}
    assert {each.name for each in fields(Experiment)} == options | {"seed", "own"}
    values: dict[str, Any] = {"rounds": 3, "limit": 150, "public": "mnist", "device": "cpu"}
    experiment = Experiment.from_options(ExperimentOptions(**values), seed=5)
    assert experiment == Experiment(**values, seed=5)
    assert DataOptions.part_of(experiment) == DataOptions(limit=150, public="mnist")


@dataclass(frozen=True, kw_only=True)
class Fruit:
    kind: str = option("apple", "what is eaten")
    peeled: bool = option(False, "without its skin")
    wanted: list[str] | None = option(None, "repeatable", flag="--with")


def test_a_class_of_options_becomes_a_command_line() -> None:
    eaten: list[tuple[str, Fruit, int]] = []
    program = typer.Typer()

    @program.command()
    @with_options
    def eat(who: Annotated[str, typer.Argument()], fruit: Fruit, times: int = 1) -> None:
        eaten.append((who, fruit, times))

    runner = CliRunner()
    arguments = ["me", "--kind", "pear", "--with", "a", "--with", "b", "--peeled", "--times", "2"]
    assert runner.invoke(program, arguments).exit_code == 0
    assert runner.invoke(program, ["you"]).exit_code == 0
    assert runner.invoke(program, ["you", "--no-peeled"]).exit_code == 2
    assert eaten == [
        ("me", Fruit(kind="pear", peeled=True, wanted=["a", "b"]), 2),
        ("you", Fruit(), 1),
    ]
