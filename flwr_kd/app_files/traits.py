"""What an app's methods need, read off the registry and their strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.registry import Method

__all__ = ["HyperParameter", "Traits"]


class HyperParameter(NamedTuple):
    """A hyper-parameter of an app's methods.

    Attributes
    ----------
    name : str
        In kebab-case.
    default : bool, int, float or str
        The same for all methods that have it.
    help : str
        One line.
    methods : tuple of str
        Methods that have it and do not fix it; empty if all do.
    """

    name: str
    default: Any
    help: str
    methods: tuple[str, ...]


class Traits:
    """What an app's methods need.

    Parameters
    ----------
    methods : sequence of Method
        At least one.

    Raises
    ------
    ConfigError
        If two methods have different defaults, so that one file of settings cannot serve both.

    Attributes
    ----------
    methods : tuple of Method
    model : str
        The clients' models, by default.
    global_models : set of bool
        Whether the methods have a global model.
    measures_model : bool
        Whether the server measures a model on test data, for one of the methods at least.
    averages_models, averages_knowledge : bool
        Whether a rule may be chosen by which the server averages clients' models (or bounds their updates), and
        their knowledge, for one of the methods at least.
    public_at : set of str
        Where the methods need public data.
    server_options : bool
        Whether a strategy takes more than its hyper-parameters.
    heterogeneous : bool
        Whether clients may have different models, with all methods.
    plugins : tuple of str
        Other distributions that the methods come from.
    hyper_parameters : tuple of HyperParameter
        Those that not all methods fix.
    """

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = tuple(methods)
        kinds = [method.strategy for method in methods]
        self.model = _agreed("model", [(method, method.model) for method in methods])
        self.global_models = {method.global_model for method in methods}
        self.averages_models = any(kind.averages_models or kind.bounds_updates for kind in kinds)
        self.averages_knowledge = any(kind.averages_knowledge for kind in kinds)
        self.public_at = {method.public_at for method in methods}
        self.server_options = any(
            method.public_at or method.server_device or method.server_model for method in methods
        )
        self.heterogeneous = all(method.heterogeneous for method in methods)
        self.plugins = tuple(
            dict.fromkeys(
                source for method in methods if (source := registry.source(method.name)) != registry.OWN
            )
        )
        self.hyper_parameters = tuple(self._hyper_parameters())
        averaged = any(each.name == "global-model" for each in self.hyper_parameters)
        self.measures_model = True in self.global_models or averaged

    def _hyper_parameters(self) -> list[HyperParameter]:
        known: dict[str, list[tuple[Method, Any, str]]] = {}
        for method in self.methods:
            for name, _, default, text in method.config_class.help():
                known.setdefault(name, []).append((method, default, text))
        result = []
        for name, entries in known.items():
            owners = [entry for entry in entries if name.replace("-", "_") not in entry[0].fixed]
            if not owners:
                continue
            default = _agreed(name, [(method, default) for method, default, _ in entries])
            text = entries[0][2]
            names = tuple(method.name for method, _, _ in owners)
            result.append(
                HyperParameter(name, default, text, () if len(names) == len(self.methods) else names)
            )
        return result


def _agreed(name: str, defaults: Sequence[tuple[Method, Any]]) -> Any:
    """Return the default that methods share; refuse those that do not."""
    (first, default), *others = defaults
    for other, theirs in others:
        if theirs != default:
            raise ConfigError(
                f"{first.name} and {other.name} have different defaults of {name}, {default!r} and {theirs!r}: "
                "write an app for each"
            )
    return default
