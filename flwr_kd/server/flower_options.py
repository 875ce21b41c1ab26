"""Options of Flower's own strategies, old and new: which have a meaning here, and what replaces the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flwr_kd.checks import ConfigError, whole_number
from flwr_kd.config import meant
from flwr_kd.text import unknown_name

__all__ = ["check_options", "check_whole_numbers", "option_names", "take_renamed"]

_RANGES = {
    "min_evaluate_nodes": (0, 2**31),
    "max_payload_bytes": (1, 2**31 - 2**20),
    "max_examples": (1, 2**53),
}
"""Ranges of whole numbers that are not those of the others."""

_RENAMED = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}
"""Options of Flower's old strategies that its new ones, and these, call otherwise."""

_AGGREGATION = (
    "metrics are averaged over clients, in result.train_metrics_clientapp and evaluate_metrics_clientapp; the "
    "values of the single clients are in result.rounds[i].clients, and on_round gets them after every round"
)
_ON_TRAIN = (
    "hyper-parameters such as local_epochs and learning_rate are options of the strategy and travel to the "
    "clients; further scalars go into start(train_config=ConfigRecord(...))"
)
_SERVER_OPTIMIZER = "there is no optimizer at the server: the clients' models are averaged or distilled"
_ROBUST = (
    "choose a robust rule by aggregation, for example aggregation='multi-krum:2:5' or 'trimmed-mean:0.2'"
)
_PRIVACY = "see FedHKD's noise, sigma and clip, or wrap the strategy in one of Flower's DP strategies"
_ADVICE = {
    "arrayrecord_key": "the records of its messages have fixed names, which KDClient knows",
    "configrecord_key": "the records of its messages have fixed names, which KDClient knows",
    "weighted_by_key": "clients are weighted by their training samples (num-examples), up to max_examples",
    "train_metrics_aggr_fn": _AGGREGATION,
    "evaluate_metrics_aggr_fn": _AGGREGATION,
    "fit_metrics_aggregation_fn": _AGGREGATION,
    "evaluate_metrics_aggregation_fn": _AGGREGATION,
    "evaluate_fn": "pass it to start(evaluate_fn=...); it is called with the round and an ArrayRecord",
    "on_fit_config_fn": _ON_TRAIN,
    "on_evaluate_config_fn": "scalars for the evaluation go into start(evaluate_config=ConfigRecord(...))",
    "initial_parameters": "pass start(initial_arrays=ArrayRecord(model.state_dict()))",
    "initial_arrays": "pass start(initial_arrays=ArrayRecord(model.state_dict()))",
    "num_rounds": "pass it to start(num_rounds=...)",
    "train_config": "pass it to start(train_config=...)",
    "evaluate_config": "pass it to start(evaluate_config=...)",
    "timeout": "pass it to start(timeout=...)",
    "round_timeout": "pass start(timeout=...)",
    "accept_failures": "failed clients are always left out; min_train_nodes is the number that a round needs",
    "inplace": "replies are summed one at a time",
    "client_manager": "clients are found by the grid that start(grid, ...) gets",
    "eta": f"{_SERVER_OPTIMIZER}; the clients' learning rate is learning_rate",
    "eta_l": f"{_SERVER_OPTIMIZER}; the clients' learning rate is learning_rate",
    **dict.fromkeys(
        ("beta_1", "beta_2", "tau", "server_momentum", "server_learning_rate"), _SERVER_OPTIMIZER
    ),
    **dict.fromkeys(("num_malicious_nodes", "num_malicious_clients", "num_nodes_to_select"), _ROBUST),
    **dict.fromkeys(("num_clients_to_keep", "trim_ratio"), _ROBUST),
    **dict.fromkeys(
        ("q", "qffl_learning_rate", "q_param"), "clients are weighted by their numbers of samples"
    ),
    **dict.fromkeys(("noise_multiplier", "clipping_norm", "num_sampled_clients"), _PRIVACY),
    "proximal_mu": "the proximal term is FedProx's: flwr_kd.strategies.fedprox.FedProx(proximal_mu=...)",
}
"""What to do instead, by option."""

_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "arrayrecord_key": lambda value: value == "arrays",
    "configrecord_key": lambda value: value == "config",
    "weighted_by_key": lambda value: value == "num-examples",
    "accept_failures": lambda value: value is True,
    "inplace": lambda value: isinstance(value, bool),
    **dict.fromkeys(
        (
            "train_metrics_aggr_fn",
            "evaluate_metrics_aggr_fn",
            "fit_metrics_aggregation_fn",
            "evaluate_metrics_aggregation_fn",
            "evaluate_fn",
            "on_fit_config_fn",
            "on_evaluate_config_fn",
            "initial_parameters",
        ),
        lambda value: value is None,
    ),
}
"""Values, mostly Flower's defaults, that ask for what happens anyway."""


def option_names(strategy: type) -> list[str]:
    """Return the options of a strategy's constructor and of its bases', without the hyper-parameters.

    Parameters
    ----------
    strategy : type
        A :class:`~flwr_kd.KDStrategy`.
    """
    names: dict[str, None] = {}
    for cls in strategy.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            for name, parameter in inspect.signature(vars(cls)["__init__"]).parameters.items():
                if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                    names.setdefault(name)
    return [name for name in names if name != "self"]


def take_renamed(options: dict[str, Any], hyperparameters: Iterable[str]) -> dict[str, Any]:
    """Take what has another name or no meaning here out of a strategy's further options.

    Parameters
    ----------
    options : dict
        What the constructor has no parameter for. Changed: the hyper-parameters and unknown names stay.
    hyperparameters : iterable of str
        The method's own, which come first.

    Returns
    -------
    dict
        Options of Flower's old strategies, by the names that they have here.
    """
    own = set(hyperparameters)
    renamed = {_RENAMED[name]: options.pop(name) for name in list(options) if name in _RENAMED}
    for name in list(options):
        if name not in own and name in _HARMLESS and _HARMLESS[name](options[name]):
            del options[name]
    return renamed


def check_options(strategy: type, options: Iterable[str], hyperparameters: Iterable[str]) -> None:
    """Check that a strategy knows its further options.

    Parameters
    ----------
    strategy : type
        Named in the error.
    options : iterable of str
        What the constructor has no parameter for.
    hyperparameters : iterable of str
        The method's own, with underscores.

    Raises
    ------
    ConfigError
        If one is neither a hyper-parameter nor an option: with what to do instead, or with all names.
    """
    own = list(hyperparameters)
    for name in options:
        if name.replace("-", "_") in own:
            continue
        names = [*own, *option_names(strategy)]
        if name in _ADVICE:
            raise ConfigError(f"{strategy.__name__} has no option {name!r}: {_ADVICE[name]}")
        raise ConfigError(unknown_name("hyper-parameter or option", name, names, meant=meant(name, names)))


def check_whole_numbers(**values: int | None) -> None:
    """Check a strategy's whole numbers; ``max_examples`` may be None.

    Raises
    ------
    ConfigError
        If one is out of its range.
    """
    for name, value in values.items():
        if value is not None or name != "max_examples":
            whole_number(name, value, *_RANGES.get(name, (1, 2**31)))
