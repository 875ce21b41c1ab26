"""Hyper-parameters: declared once, checked at construction, sent in Flower's config.

A method's config is a frozen dataclass derived from :class:`MethodConfig`. Its fields are made by
:func:`hyper`, which holds the default, the allowed range and a help text. Python names use underscores; on
the wire and on the command line the same names are in kebab-case, like Flower's own keys.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, get_type_hints

from typing_extensions import TypeVar

from flwr_kd.checks import ConfigError, Scalar, allowed, checked
from flwr_kd.text import similar, unknown_name

__all__ = [
    "AVERAGE",
    "KNOWLEDGE",
    "ConfigT",
    "LocalStepsConfig",
    "MethodConfig",
    "StepDecayConfig",
    "StepsConfig",
    "global_model",
    "hyper",
    "knowledge_control",
    "meant",
    "rows_to_train_on",
]

PARTS = ("model", "head")
KNOWLEDGE = ("own", "uniform", "permuted")
"""What may be learned from: a method's own knowledge, or one of two controls without knowledge."""
# Names that other libraries and papers' code use, without separators, for what has another name here.
_USUAL = {
    "learning_rate": "lr eta etal clientlr locallr baselr initlr lrate stepsize",
    "local_epochs": "epochs epoch numepochs nepochs maxepochs localep localepoch numlocalepochs trainepochs e",
    "batch_size": "batch bs batchsize localbs trainbatchsize clientbatchsize minibatch minibatchsize b",
    "optimizer": "opt optim optimiser localoptimizer",
    "lr_decay": "decay lrgamma decayrate lrdecayrate learningratedecay",
    "lr_decay_every": "decaystep decaysteps lrstep",
    "weight_decay": "wd l2 l2reg regularization decayweight",
    "proximal_mu": "mu proxmu fedproxmu proximalterm proximalweight",
    "temperature": "t temp tau kdtemperature distilltemperature",
    "dp_clip": "updateclip",
    "dp_noise": "noisemultiplier",
    "dp_sgd_clip": "maxgradnorm l2normclip",
    "server_learning_rate": "serverlr etag globallr",
    "server_epochs": "kdepochs distillationepochs",
    "distill_epochs": "kdepochs distillationepochs",
    "distill_learning_rate": "kdlr distilllr distillationlr",
}


def hyper(
    default: Any,
    help: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare a hyper-parameter of a :class:`MethodConfig`.

    Parameters
    ----------
    default : bool, int, float or str
        The paper's value where it gives one.
    help : str
        One line, shown by the command line.
    gt, ge, lt, le : float, optional
        Bounds of the allowed range (greater than, at least, less than, at most).
    choices : tuple of str, optional
        The allowed values of a string.
    """
    bounds = {">": gt, ">=": ge, "<": lt, "<=": le}
    metadata = {
        "help": help,
        "bounds": {sign: bound for sign, bound in bounds.items() if bound is not None},
        "choices": choices,
    }
    return field(default=default, metadata=metadata)


def knowledge_control(help: str) -> Any:
    """Declare the choice between a method's knowledge and controls without it; ``help`` says whose and of what.

    The values are those of :data:`KNOWLEDGE`; :mod:`flwr_kd.learning.controls` has the maths.
    """
    return hyper("own", help, choices=KNOWLEDGE)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the hyper-parameter that another library's name may mean, in the spelling of ``known``; None if none.

    >>> meant("lr", ["batch-size", "learning-rate"]), meant("num_epochs", ["local_epochs"]), meant("x", ["y"])
    ('learning-rate', 'local_epochs', None)
    """
    names = list(known)
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    spelled = {re.sub(r"[^a-z0-9]", "", candidate.lower()): candidate for candidate in names}
    for ours, theirs in _USUAL.items():
        if plain in theirs.split() and ours.replace("_", "") in spelled:
            return spelled[ours.replace("_", "")]
    return similar(name, names)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Hyper-parameters of local training, common to all methods; a method adds its own fields.

    The defaults are FedHKD's (appendix A.1): Adam with learning rate 1e-3 that is halved every 10 rounds,
    batches of 64, 5 local epochs.

    Raises
    ------
    ConfigError
        If a value has the wrong type, is not finite, or lies outside its range.

    Examples
    --------
    >>> MethodConfig(batch_size=32).to_wire()["batch-size"]
    32
    >>> MethodConfig(learning_rate=-1.0)
    Traceback (most recent call last):
    flwr_kd.ConfigError: learning-rate must be > 0, got -1.0
    """

    local_epochs: int = hyper(5, "passes over the client's training data per round", ge=1)
    batch_size: int = hyper(64, "samples per training batch", ge=1)
    optimizer: str = hyper("adam", "local optimiser", choices=("adam", "sgd"))
    learning_rate: float = hyper(1e-3, "learning rate in round 1", gt=0)
    lr_decay: float = hyper(0.5, "factor on the learning rate every lr-decay-every rounds", gt=0, le=1)
    lr_decay_every: int = hyper(10, "rounds between two decays", ge=1)
    momentum: float = hyper(0.0, "momentum of SGD", ge=0, lt=1)
    weight_decay: float = hyper(0.0, "L2 penalty of the optimiser", ge=0)
    personalize_epochs: int = hyper(
        0,
        "epochs in which every client fine-tunes a copy of the last global model before it is measured; 0 for none",
        ge=0,
    )
    personalize_part: str = hyper("model", "what is fine-tuned then", choices=PARTS)
    dp_clip: float = hyper(
        0.0,
        "differential privacy: L2 bound of the update of the weights that a client sends; 0 for none",
        ge=0,
    )
    dp_noise: float = hyper(
        0.0,
        "differential privacy: standard deviation of the noise on that update, over dp-clip; 0 for none",
        ge=0,
    )

    dp_sgd_clip: float = hyper(
        0.0, "DP-SGD in local training: L2 bound of each sample's gradient; 0 for none (needs Opacus)", ge=0
    )
    dp_sgd_noise: float = hyper(
        0.0,
        "DP-SGD: standard deviation of the noise on the sum of a batch's gradients, over dp-sgd-clip; 0 for none",
        ge=0,
    )

    _types: ClassVar[dict[type, dict[str, type]]] = {}

    def __post_init__(self) -> None:
        types = self.field_types()
        for item in dataclasses.fields(self):
            value = checked(_kebab(item.name), getattr(self, item.name), types[item.name], item.metadata)
            object.__setattr__(self, item.name, value)
        for kind, what in (("dp", "an update"), ("dp_sgd", "a gradient")):
            noise = getattr(self, f"{kind}_noise")
            if noise and not getattr(self, f"{kind}_clip"):
                raise ConfigError(
                    f"{_kebab(kind)}-clip must be > 0 with {_kebab(kind)}-noise={noise:g}, got 0: noise protects "
                    f"{what} only if its norm is bounded"
                )

    @classmethod
    def field_types(cls) -> dict[str, type]:
        """Return each field's type: bool, int, float or str."""
        if cls not in MethodConfig._types:
            hints = get_type_hints(cls)
            MethodConfig._types[cls] = {item.name: hints[item.name] for item in dataclasses.fields(cls)}
        return MethodConfig._types[cls]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from names in kebab-case or with underscores.

        Raises
        ------
        ConfigError
            If a name is unknown (the message lists the valid ones) or a value is not allowed.
        """
        known = cls.field_types()
        given = {name.replace("-", "_"): value for name, value in values.items()}
        for name in given:
            if name not in known:
                raise ConfigError(_unknown(name, known))
        return cls(**given)

    @classmethod
    def from_texts(cls, assignments: Iterable[str], **fixed: Any) -> Self:
        """Build from ``name=value`` texts, as the command line's ``--set`` gives them.

        Examples
        --------
        >>> MethodConfig.from_texts(["local-epochs=2", "optimizer=sgd"]).local_epochs
        2
        """
        return cls(**{**cls.read_texts(assignments, **fixed), **fixed})

    @classmethod
    def read_texts(cls, assignments: Iterable[str], **fixed: Any) -> dict[str, Any]:
        """Return the values of ``name=value`` texts by field; see :meth:`from_texts`. Ranges are not checked.

        >>> MethodConfig.read_texts(["local-epochs=2"])
        {'local_epochs': 2}
        """
        known = cls.field_types()
        values: dict[str, Any] = {}
        for text in assignments:
            name, sign, value = text.partition("=")
            key = name.strip().replace("-", "_")
            if not sign or key not in known:
                if sign:
                    raise ConfigError(_unknown(key, known))
                raise ConfigError(f"{text!r} is not of the form name=value")
            if key in fixed:
                raise ConfigError(
                    f"{_kebab(key)} is fixed at {fixed[key]} by this method, got {value.strip()}"
                )
            values[key] = _parsed(_kebab(key), value.strip(), known[key])
        return values

    def to_wire(self) -> dict[str, Scalar]:
        """Return the values under kebab-case names, as they travel in Flower's config."""
        return {_kebab(item.name): getattr(self, item.name) for item in dataclasses.fields(self)}

    def doubts(self) -> list[str]:
        """Return a line for each choice that is allowed and known to do harm; a run warns of them at its start."""
        return []

    @classmethod
    def from_wire(cls, config: Mapping[str, Any]) -> Self:
        """Read the values back at the client; other keys of the config are ignored.

        Raises
        ------
        ConfigError
            If a value is not allowed.
        """
        given = {name: config[_kebab(name)] for name in cls.field_types() if _kebab(name) in config}
        kind: Any = cls
        # A record may also have lists, which are no keys; they are refused below.
        if any(isinstance(value, list) for value in given.values()):
            return cls(**given)
        checked_once: Self = _checked_once(kind, tuple(given), *given.values())
        return checked_once

    @classmethod
    def help(cls) -> list[tuple[str, str, Scalar, str]]:
        """Return name, type, default and help of each hyper-parameter."""
        types = cls.field_types()
        rows: list[tuple[str, str, Scalar, str]] = []
        for item in dataclasses.fields(cls):
            default: Any = item.default
            rows.append((_kebab(item.name), types[item.name].__name__, default, _described(item.metadata)))
        return rows

    @property
    def adaptation_epochs(self) -> int:
        """Epochs in which clients adapt copies of the last global model."""
        return self.personalize_epochs

    @property
    def personalizes(self) -> bool:
        """Whether clients adapt copies of the last global model before they are measured."""
        return self.adaptation_epochs > 0

    def check_classes(self, num_classes: int) -> None:
        """Raise :class:`ConfigError` if a value is not allowed with C classes; the base has no rule."""

    def check_public_labels(self, highest: int, classes: int) -> None:
        """Raise :class:`ConfigError` if public data's labels up to ``highest`` do not fit; the base has no rule."""

    def check_unlabelled(self) -> None:
        """Raise :class:`ConfigError` if a value needs labels of public data; the base has no rule."""

    def learning_rate_at(self, server_round: int) -> float:
        """Return the learning rate of a round, counted from 1.

        >>> [MethodConfig().learning_rate_at(r) for r in (1, 10, 11, 21)]
        [0.001, 0.001, 0.0005, 0.00025]
        """
        return self.learning_rate * self.decay_at(server_round)

    def decay_at(self, server_round: int) -> float:
        """Return the factor on learning rates in a round, counted from 1."""
        return self.lr_decay ** ((server_round - 1) // self.lr_decay_every)


AVERAGE = "average"
"""The value of ``global-model`` with which the mean of the clients' weights is measured."""


def global_model() -> Any:
    """Declare ``global-model``, for methods whose clients exchange no weights and may have a mean of them measured.

    A field of a :class:`MethodConfig`, of this name. The method's client derives from
    :class:`flwr_kd.client.shared_model.SharedModelClient`.
    """
    return hyper(
        "none",
        "average: after each round the server averages the clients' weights, and measures the mean as global "
        "model; no client gets it",
        choices=("none", AVERAGE),
    )


@dataclass(frozen=True, kw_only=True)
class StepDecayConfig(MethodConfig):
    r"""Hyper-parameters of methods whose learning rate can fall with each step.

    After i steps it is :math:`\eta / (1 + d \cdot i)`, Keras' ``decay`` of an optimiser that is never made anew.
    The steps are those of all clients and of the server's distillations in the run so far, as planned: with all
    epochs, in the order of partition ids, as if clients took turns.

    Examples
    --------
    >>> [StepDecayConfig(step_decay=1e-4).step_factor(i) for i in (0, 2500, 10_000)]
    [1.0, 0.8, 0.5]
    >>> StepDecayConfig(local_epochs=2, batch_size=20).planned_steps("train", 50)
    6
    """

    step_decay: float = hyper(
        0.0,
        "d, after i steps of all clients and of the server the learning rate is divided by 1 + d·i (Keras' decay)",
        ge=0,
    )

    def step_factor(self, steps: int) -> float:
        """Return the factor on learning rates after a number of steps."""
        return 1 / (1 + self.step_decay * steps)

    def planned_steps(self, phase: str, samples: int) -> int:
        """Return the number of steps of a client that has a number of samples, in a phase with all its epochs."""
        return self.local_epochs * self.batches(samples)

    def batches(self, samples: int) -> int:
        """Return the number of batches in a pass over a number of samples; a last single one joins another."""
        count = -(-samples // self.batch_size)
        return count - (count > 1 and samples - (count - 1) * self.batch_size == 1)


@dataclass(frozen=True, kw_only=True)
class LocalStepsConfig(MethodConfig):
    """Hyper-parameters of methods whose clients train on a number of batches per round.

    Examples
    --------
    >>> LocalStepsConfig(batch_size=20).steps(50), LocalStepsConfig(local_epochs=5, batch_size=20).steps(50)
    (20, 15)
    """

    local_steps: int = hyper(20, "batches on which a client trains per round", ge=1)
    local_epochs: int = hyper(
        0,
        "if not 0, a client trains on as many batches as that many passes over its training data have, in place of "
        "local-steps",
        ge=0,
    )
    lr_decay: float = hyper(1.0, "factor on the learning rate every lr-decay-every rounds", gt=0, le=1)

    def steps(self, samples: int) -> int:
        """Return the number of batches in a round of a client that has a number of samples."""
        return self.local_epochs * -(-samples // self.batch_size) or self.local_steps


@dataclass(frozen=True, kw_only=True)
class StepsConfig(LocalStepsConfig):
    """The same for methods whose steps are those of plain SGD.

    Examples
    --------
    >>> StepsConfig(momentum=0.9)
    Traceback (most recent call last):
    flwr_kd.ConfigError: momentum must be 0, since the steps are those of plain SGD, got 0.9
    """

    batch_size: int = hyper(20, "samples per training batch", ge=1)
    optimizer: str = hyper("sgd", "local optimiser", choices=("sgd",))
    momentum: float = hyper(0.0, "0, since the steps are those of plain SGD", ge=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise ConfigError(
                f"momentum must be 0, since the steps are those of plain SGD, got {self.momentum:g}"
            )


def rows_to_train_on(count: int, share: float) -> int:
    """Return how many rows :func:`flwr_kd.learning.held_out.hold_out` leaves to train on; one at least of any.

    >>> rows_to_train_on(20, 0.1), rows_to_train_on(4, 0.1), rows_to_train_on(2, 0.99), rows_to_train_on(0, 0.5)
    (18, 4, 1, 0)
    """
    return count - min(int(count * share + 0.5), max(count - 1, 0))


# Messages of many clients have the same values. Typed, since 1, 1.0 and True are equal keys.
@functools.lru_cache(maxsize=64, typed=True)
def _checked_once(kind: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    return kind(**dict(zip(names, values, strict=True)))


# Covariant, so that every method's strategy, client or task can stand where the base class is expected. A strategy
# hands its hyper-parameters out and never takes others in after construction.
ConfigT = TypeVar("ConfigT", bound=MethodConfig, default=MethodConfig, covariant=True)
"""A method's config class."""


def _unknown(name: str, known: Iterable[str]) -> str:
    names = [_kebab(other) for other in known]
    return unknown_name("hyper-parameter", _kebab(name), names, meant=meant(name, names))


def _described(metadata: Mapping[str, Any]) -> str:
    rule = allowed(metadata)
    return f"{metadata.get('help', '')}{f' ({rule})' if rule else ''}"


def _parsed(name: str, text: str, kind: type) -> Scalar:
    if kind is bool:
        if text.lower() in ("true", "false", "1", "0", "yes", "no"):
            return text.lower() in ("true", "1", "yes")
        raise ConfigError(f"{name} must be true or false, got {text!r}")
    try:
        value: Scalar = kind(text)
    except ValueError:
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {text!r}") from None
    return value
