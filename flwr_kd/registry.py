"""All methods by name.

A method of this library needs a folder under ``strategies/`` and nothing else. A method of another distribution
needs an entry point in the group ``flwr_kd.methods``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from flwr_kd.checks import ConfigError
from flwr_kd.config import MethodConfig
from flwr_kd.formulas import Sent, Situation
from flwr_kd.lazy import load
from flwr_kd.text import first_line, unknown_name

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient
    from flwr_kd.rules import Rules
    from flwr_kd.server.strategy import KDStrategy

__all__ = [
    "OWN",
    "Method",
    "NameTakenError",
    "Variant",
    "get",
    "methods",
    "needs_one_class",
    "needs_one_tensor",
    "register",
    "source",
]


@dataclass(frozen=True)
class Variant:
    """Settings of a method in which its messages have another form, and which the shared checks try as well.

    Attributes
    ----------
    settings : tuple of str
        Hyper-parameters as ``name=value``.
    model : str
        The clients' model: of :data:`flwr_kd.models.MODELS`, or ``batch-norm``, a small network of the checks.
    """

    settings: tuple[str, ...] = ()
    model: str = "mlp"


BATCH_NORM: Mapping[str, Variant] = {"batch norm": Variant(model="batch-norm")}
"""The variant of a method whose models have counters and running statistics beside their weights."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One registered method.

    Its classes are named by import paths, ``module:name``, and imported when they are first used: the list of
    methods needs neither PyTorch nor Flower.

    Attributes
    ----------
    name : str
        As on the command line.
    strategy_path, client_path : str
        The two halves.
    config_path : str
        The hyper-parameters. Their module must not import PyTorch.
    paper : str
        Authors, title, venue.
    exchanged : str
        What is sent, in a few words.
    global_model : bool
        Whether the server has a model; without one there is no global accuracy. The strategy's ``sends_weights``,
        said here so that the list of methods need not import it; the shared tests compare both.
    public_at : str
        Where public (proxy, reference) data is needed: ``"server"``, whose strategy takes ``model``, ``public_set``
        and ``device`` (``models`` where clients may have different ones), or nobody (empty). ``"synthetic"``: the
        server makes them, and its strategy takes ``model``, ``input_shape`` and ``device``. ``"clients"``: every
        client, which takes ``public_set``, as does the strategy.
    heterogeneous : bool
        Whether clients may have different models.
    fixed : mapping
        Hyper-parameters that make this variant, for example γ = 0.
    client_options : mapping
        Arguments of the client class in a simulation, for example noise from the run's seed.
    one_tensor : str
        Why each sample must be one tensor, as the end of a sentence that begins with the method's name; empty if it
        may be several by name (:class:`flwr_kd.inputs.NamedInputs`). See :func:`needs_one_tensor`.
    takes_multi_label : bool
        Whether samples may have several labels: the client's ``takes_multi_label``.
    server_device : bool
        Whether the strategy trains a model itself, and so takes a ``device``.
    server_model : bool
        Whether it needs the clients' architecture for that, and so takes a ``model`` as well.
    model : str
        The clients' models where a simulation names none: one of :data:`flwr_kd.models.MODELS`, or several
        separated by commas, given to the clients in turn.
    simulated : tuple of str
        Hyper-parameters as ``name=value`` that a simulation sets, and its user may set otherwise: what is
        measured at the cost of a client's privacy.
    leaves_client : str
        What a client reveals to the server, for operators; Markdown.
    reaches_others : str
        What of that goes on to other clients.
    benchmarks : tuple of str
        Benchmarks of this repository that measure the method: ``accuracy`` (all methods side by side), ``picture``
        (its curves), ``overhead``, ``scale``, ``load``. A variant has its numbers on the method's page instead.
    sent : tuple of Sent
        What travels, by the paper's formula; see :mod:`flwr_kd.formulas`.
    sizes_path : str
        A function that is given a :class:`flwr_kd.formulas.Situation` and returns the numbers for those letters of
        the formula that depend on the method. Without one K is the number of classes that have samples.
    quick : tuple of str
        Hyper-parameters as ``name=value`` that make short runs, for tests and for benchmarks of bytes. They must
        not change the size of a message.
    variants : mapping of str to Variant
        By name, settings in which the method's messages have another form.
    rules_path : str
        The :class:`flwr_kd.rules.Rules` of the payloads that clients send; empty if they send none.
    """

    name: str
    strategy_path: str
    client_path: str
    config_path: str = "flwr_kd.config:MethodConfig"
    paper: str
    exchanged: str
    global_model: bool
    public_at: str = ""
    heterogeneous: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    client_options: Mapping[str, Any] = field(default_factory=dict)
    one_tensor: str = ""
    takes_multi_label: bool = False
    server_device: bool = False
    server_model: bool = False
    model: str = "mlp"
    simulated: tuple[str, ...] = ()
    leaves_client: str = ""
    reaches_others: str = ""
    benchmarks: tuple[str, ...] = ("accuracy",)
    sent: tuple[Sent, ...] = ()
    sizes_path: str = ""
    quick: tuple[str, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    rules_path: str = ""

    @property
    def strategy(self) -> type[KDStrategy]:
        """The server half, imported on first use."""
        kind: type[KDStrategy] = load(self.strategy_path)
        return kind

    @property
    def client(self) -> type[KDClient]:
        """The client half, imported on first use."""
        kind: type[KDClient] = load(self.client_path)
        return kind

    @property
    def config_class(self) -> type[MethodConfig]:
        """The hyper-parameters' class; importing it imports no PyTorch."""
        kind: type[MethodConfig] = load(self.config_path)
        return kind

    @property
    def rules(self) -> Rules | None:
        """The rules of the payloads that clients send, imported on first use; None if they send none."""
        known: Rules | None = load(self.rules_path) if self.rules_path else None
        return known

    def letters(self, situation: Situation) -> dict[str, int]:
        """Return the numbers for those letters of :attr:`sent` that depend on the method or the classes."""
        present = [[count > 0 for count in each] for each in situation.counts]
        mine = present[situation.client]
        known = mine if situation.direction == "up" else [any(each) for each in zip(*present, strict=True)]
        own: dict[str, int] = load(self.sizes_path)(situation) if self.sizes_path else {}
        return {"K": sum(known), **own}

    def config(self, assignments: Iterable[str] = ()) -> MethodConfig:
        """Return a simulation's hyper-parameters, from ``name=value`` texts and the variant's fixed values.

        Raises
        ------
        ConfigError
            If a name or value is not allowed, or the variant fixes it.
        """
        return self.config_class.from_texts([*self.simulated, *assignments], **self.fixed)


GROUP = "flwr_kd.methods"
"""Group of entry points: each names a module that registers methods on import, or a :class:`Method`."""

_METHODS: dict[str, Method] = {}
_SOURCES: dict[str, str] = {}
OWN = "flwr-kd"
"""This library's distribution."""
_source = OWN
_loaded = False


class NameTakenError(ConfigError):
    """Two different methods have the same name."""


def register(method: Method) -> Method:
    """Add a method.

    Raises
    ------
    NameTakenError
        If the name is taken by another; the text names both.
    """
    known = _METHODS.setdefault(method.name, method)
    if known != method:
        raise NameTakenError(
            f"method {method.name!r} is registered twice: {known.strategy_path} (of {_SOURCES[method.name]}), "
            f"{method.strategy_path} (of {_source})"
        )
    _SOURCES.setdefault(method.name, _source)
    return method


def methods() -> dict[str, Method]:
    """Return all methods by name, in alphabetical order: those of this library and of the entry points.

    An entry point that cannot be loaded is left out, with a warning that names its distribution.

    >>> sorted(methods()) == list(methods())
    True

    Raises
    ------
    NameTakenError
        If an entry point registers a name that is taken.
    """
    global _loaded
    if not _loaded:
        package = importlib.import_module("flwr_kd.strategies")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
            _load(point)
        _loaded = True
    return dict(sorted(_METHODS.items()))


def _load(point: EntryPoint) -> None:
    global _source
    _source = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    before = dict(_METHODS)
    try:
        loaded = point.load()
        if isinstance(loaded, Method):
            register(loaded)
    except NameTakenError:
        raise
    # Whatever another distribution's code raises must not cost the user the other methods.
    except Exception as error:
        for name in _METHODS.keys() - before.keys():
            del _METHODS[name], _SOURCES[name]
        warnings.warn(
            f"the methods of {_source} are left out: entry point {point.name!r} ({point.value}) raised "
            f"{type(error).__name__}: {first_line(error)}",
            RuntimeWarning,
            stacklevel=3,
        )
    finally:
        _source = OWN


def get(name: str) -> Method:
    """Return a method by name.

    Raises
    ------
    ConfigError
        If there is none; the message lists the valid names.
    """
    registered = methods()
    if name not in registered:
        raise ConfigError(unknown_name("method", name, registered))
    return registered[name]


def source(name: str) -> str:
    """Return the distribution that a method comes from: :data:`OWN`, or another one's name and version.

    >>> source("fedproto")
    'flwr-kd'

    Raises
    ------
    ConfigError
        If there is no such method; the message lists the valid names.
    """
    return _SOURCES[get(name).name]


def needs_one_tensor(name: str, got: str = "") -> str:
    """Return why a method refuses samples of several tensors by name, and which methods take them.

    Parameters
    ----------
    name : str
        A method with :attr:`Method.one_tensor`.
    got : str
        The shapes of what it was given; not said if empty.

    Examples
    --------
    >>> print(needs_one_tensor("fedalign", "input_ids [6]"))
    fedalign aligns ..., so each sample must be one tensor, got input_ids [6]; methods that take several ...
    """
    instead = ", ".join(method.name for method in methods().values() if not method.one_tensor)
    given = f", got {got}" if got else ""
    return (
        f"{name} {get(name).one_tensor}, so each sample must be one tensor{given}; methods that take several "
        f"inputs by name: {instead}"
    )


def needs_one_class(name: str) -> str:
    """Return why a method refuses samples that have several labels, and which methods take them.

    Parameters
    ----------
    name : str
        A method without :attr:`Method.takes_multi_label`.

    Examples
    --------
    >>> print(needs_one_class("fedproto"))
    fedproto needs one class per sample, and these have several labels; methods that take several: fedalign, ...
    """
    instead = ", ".join(method.name for method in methods().values() if method.takes_multi_label)
    return f"{name} needs one class per sample, and these have several labels; methods that take several: {instead}"
