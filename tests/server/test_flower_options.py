"""Options of Flower's own strategies, settings without effect, and Flower's old API."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.server import Server, SimpleClientManager

from flwr_kd.checks import ConfigError
from flwr_kd.strategies.fedavg import FedAvg
from flwr_kd.strategies.feddf import FedDF
from flwr_kd.strategies.fedprox import FedProx
from flwr_kd.testing.federation import Federation
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import Watched


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"fraction_fit": 0.5}, {"fraction_train": 0.5}),
        (
            {"min_fit_clients": 3, "min_available_clients": 4},
            {"min_train_nodes": 3, "min_available_nodes": 4},
        ),
        ({"fraction_evaluate": 1.0, "min_evaluate_clients": 3}, {"min_evaluate_nodes": 3}),
        ({"fraction_evaluate": 1.0, "min_evaluate_nodes": 3}, {"min_evaluate_nodes": 3}),
        # Flower's defaults ask for what happens anyway.
        ({"weighted_by_key": "num-examples", "arrayrecord_key": "arrays", "configrecord_key": "config"}, {}),
        ({"evaluate_metrics_aggr_fn": None, "on_fit_config_fn": None, "accept_failures": True}, {}),
    ],
)
def test_options_with_a_meaning_here_are_taken(
    theirs: dict[str, Any], ours: dict[str, Any], flower_log: list[str]
) -> None:
    strategy = FedAvg(**theirs)
    assert {name: getattr(strategy, name) for name in ours} == ours
    assert strategy.config == FedAvg().config
    assert not flower_log


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("weighted_by_key", "loss", r"clients are weighted by their training samples"),
        ("evaluate_metrics_aggr_fn", len, r"result\.rounds\[i\]\.clients"),
        ("evaluate_fn", len, r"start\(evaluate_fn=\.\.\.\)"),
        ("on_fit_config_fn", len, r"local_epochs and learning_rate are options of the strategy"),
        ("initial_parameters", [], r"start\(initial_arrays=ArrayRecord\(model\.state_dict\(\)\)\)"),
        ("arrayrecord_key", "weights", r"fixed names"),
        ("accept_failures", False, r"min_train_nodes"),
        ("beta_1", 0.9, r"no optimizer at the server"),
        ("proximal_mu", 0.1, r"FedProx\(proximal_mu="),
    ],
)
def test_other_options_have_a_line_of_their_own(option: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"FedAvg has no option '{option}': .*{text}"):
        FedAvg(**{option: value})


def test_a_methods_own_hyper_parameter_comes_first() -> None:
    assert FedProx(proximal_mu=0.1).config.proximal_mu == 0.1


def test_unknown_names_are_answered_with_hyper_parameters_and_options() -> None:
    both = r"'min_available' \(did you mean 'min_available_nodes'\?\).* batch_size, .* fraction_train, "
    with pytest.raises(ConfigError, match=both):
        FedAvg(min_available=2)
    with pytest.raises(ConfigError, match=r"'lr' \(did you mean 'learning_rate'\?\)"):
        FedAvg(lr=0.1)
    with pytest.raises(ConfigError, match=r"valid: .*server_epochs, .*public_set, .*fraction_train, "):
        FedDF(model=None, public_set=None, nothing=1)  # type: ignore[arg-type]


def test_a_minimum_of_evaluating_clients_is_kept(flower_log: list[str]) -> None:
    fed = Federation("fedavg")
    grid = Watched(fed.app(), 4)
    fed.strategy(fraction_evaluate=0.25, min_evaluate_nodes=3).start(grid, fed.initial(), num_rounds=1)
    assert len(grid.of_type("evaluate")) == 3
    assert not flower_log
    FedAvg(min_evaluate_nodes=3)
    assert flower_log == ["min_evaluate_nodes=3 has no effect without fraction_evaluate"]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"lr": 0.05}, ["'lr' is not read", "FedAvg(learning_rate=...); its value is 0.005"]),
        ({"num_epochs": 3}, ["'num_epochs' is not read", "FedAvg(local_epochs=...)"]),
        ({"local-epochs": 3}, ["'local-epochs' is not read", "FedAvg(local_epochs=...)"]),
        ({"batchsize": 3}, ["FedAvg(batch_size=...)"]),
        ({"seed": 3}, ["'seed' is set by the run itself"]),
        ({"colour": 3}, ["'colour' is no hyper-parameter of FedAvg", "task.extra['colour']"]),
    ],
)
def test_scalars_that_nothing_reads_are_named(
    given: dict[str, Any], texts: list[str], flower_log: list[str]
) -> None:
    fed = Federation("fedavg", clients=2)
    fed.strategy().start(
        InlineGrid(fed.app(), 2), fed.initial(), num_rounds=1, train_config=ConfigRecord(given)
    )
    (line,) = flower_log
    assert all(text in line for text in ["train_config: ", *texts])


def test_an_evaluate_config_without_an_evaluation_is_named(flower_log: list[str]) -> None:
    fed = Federation("fedavg", clients=2)
    config = ConfigRecord({"batch": 8})
    for fraction in (0.0, 1.0):
        fed.strategy(fraction_evaluate=fraction).start(
            InlineGrid(fed.app(), 2), fed.initial(), num_rounds=1, evaluate_config=config
        )
    first, second = flower_log
    assert "evaluate_config has no effect: without fraction_evaluate" in first
    assert "evaluate_config: 'batch' is not read" in second


@pytest.mark.parametrize("arrays", [True, False])
def test_without_a_global_model_there_are_no_arrays_and_one_warning(
    arrays: bool, flower_log: list[str]
) -> None:
    fed = Federation("fedproto", clients=2)
    given = Federation("fedavg").initial() if arrays else ArrayRecord()
    called: list[int] = []
    for function in (lambda server_round, _: called.append(server_round), None):
        result = fed.strategy().start(InlineGrid(fed.app(), 2), given, num_rounds=1, evaluate_fn=function)
        assert len(result.arrays) == 0
    assert called == []
    text = "FedProto has no global model, since each client has its own: result.arrays is empty"
    assert flower_log == [f"{text}, evaluate_fn is not called", *([text] if arrays else [])]


def test_arrays_that_a_method_sends_without_a_global_model_are_no_mistake(flower_log: list[str]) -> None:
    _, result = Federation("ktpfl-weights", clients=2).run(rounds=1)
    assert len(result.arrays) == 0
    assert not flower_log


def test_flowers_old_api_is_refused_with_what_to_write() -> None:
    server = Server(client_manager=SimpleClientManager(), strategy=FedAvg())  # type: ignore[arg-type]
    text = r"FedAvg: .*server_fn with ServerAppComponents: write `@app\.main\(\)`.*docs/moving\.md"
    with pytest.raises(RuntimeError, match=text):
        server.fit(1, None)
    for name in ("configure_fit", "aggregate_fit", "evaluate"):
        with pytest.raises(RuntimeError, match=text):
            getattr(FedAvg(), name)(1, None, None)


def test_a_run_begins_with_what_is_doubtful_about_its_values(flower_log: list[str]) -> None:
    fed = Federation("fedmd", clients=2)
    for rate in ("distill-learning-rate=0.001", "distill-learning-rate=0.02"):
        strategy = fed.strategy("optimizer=adam", rate)
        strategy.start(InlineGrid(fed.app(), 2), ArrayRecord(), num_rounds=1)
    (line,) = flower_log
    assert line.startswith("distill-learning-rate=0.02 is a rate for SGD")
