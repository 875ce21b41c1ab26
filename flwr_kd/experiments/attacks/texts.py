"""Attacks by their texts, and which clients attack."""

from __future__ import annotations

from collections.abc import Callable

from flwr_kd.checks import ConfigError, read_number, read_whole_number, whole_number
from flwr_kd.experiments.attacks.attack import Attack
from flwr_kd.experiments.attacks.imitation import Imitation
from flwr_kd.experiments.attacks.knowledge import (
    PAYLOAD_FIELDS,
    ClaimedCount,
    ClassPrior,
    LossMaximizing,
    SwappedPrototypes,
    WrongKnowledge,
)
from flwr_kd.experiments.attacks.labels import LabelFlip
from flwr_kd.experiments.attacks.models import (
    ALittleIsEnough,
    Gaussian,
    InnerProduct,
    ModelReplacement,
    NotANumber,
    SignFlip,
)
from flwr_kd.seeding import numpy_generator
from flwr_kd.text import unknown_name

__all__ = ["ATTACKS", "draw_attackers", "parse_attack"]


def _label_flip(spec: str, value: str | None) -> Attack:
    if value is None or value == "permute":
        return LabelFlip(0 if value is None else None)
    return LabelFlip(read_whole_number(f"attack {spec!r}: TARGET, unless it is permute,", value))


def _with_number(kind: Callable[..., Attack], name: str, *, optional: bool = False) -> _Reader:
    def read(spec: str, value: str | None) -> Attack:
        if value is None and optional:
            return kind()
        return kind(read_number(f"attack {spec!r}: {name}", value or "", 0, open_low=True))

    return read


def _plain(kind: Callable[[], Attack]) -> _Reader:
    def read(spec: str, value: str | None) -> Attack:
        if value is not None:
            raise ConfigError(f"attack {spec!r}: {spec.partition(':')[0]} takes no value")
        return kind()

    return read


def _payload(spec: str, value: str | None) -> Attack:
    if value is None:
        return WrongKnowledge()
    if value not in PAYLOAD_FIELDS:
        raise ConfigError(f"attack {spec!r}: KIND must be one of {', '.join(PAYLOAD_FIELDS)}, got {value!r}")
    return WrongKnowledge(frozenset({value}))


def _count(spec: str, value: str | None) -> Attack:
    return ClaimedCount(read_whole_number(f"attack {spec!r}: N", value or "", 1, 2**53))


def _imitate(spec: str, value: str | None) -> Attack:
    return Imitation(read_number(f"attack {spec!r}: SHARE", value or "", 0, 1, open_low=True))


_Reader = Callable[[str, str | None], Attack]
_READERS: dict[str, tuple[tuple[str, ...], _Reader]] = {
    "label-flip": (("label-flip[:TARGET]", "label-flip:permute"), _label_flip),
    "gaussian": (("gaussian:SIGMA",), _with_number(Gaussian, "SIGMA")),
    "sign-flip": (("sign-flip[:SCALE]",), _with_number(SignFlip, "SCALE", optional=True)),
    "scale": (("scale:SCALE",), _with_number(ModelReplacement, "SCALE")),
    "alie": (("alie[:Z]",), _with_number(ALittleIsEnough, "Z", optional=True)),
    "ipm": (("ipm[:EPSILON]",), _with_number(InnerProduct, "EPSILON", optional=True)),
    "nan": (("nan",), _plain(NotANumber)),
    "payload": (("payload[:KIND]",), _payload),
    "prototype-swap": (("prototype-swap",), _plain(SwappedPrototypes)),
    "lma": (("lma",), _plain(LossMaximizing)),
    "cpa": (("cpa",), _plain(ClassPrior)),
    "count": (("count:N",), _count),
    "imitate": (("imitate:SHARE",), _imitate),
}
ATTACKS = tuple(form for forms, _ in _READERS.values() for form in forms)
"""The forms that :func:`parse_attack` takes."""


def parse_attack(spec: str) -> Attack:
    """Return the attack of a text.

    Parameters
    ----------
    spec : str
        See the table of :mod:`flwr_kd.experiments.attacks`.

    Raises
    ------
    ConfigError
        If the name is unknown, or what follows the colon is not allowed: a TARGET that is no whole number from
        0, an N that is none from 1, a SIGMA, SCALE Z or EPSILON that is not a finite number above 0, a SHARE
        that is not above 0 and at most 1, a KIND that is none of the three.

    Examples
    --------
    >>> parse_attack("gaussian:0.5"), parse_attack("label-flip:permute")
    (Gaussian(sigma=0.5), LabelFlip(target=None))
    >>> parse_attack("gausian:1")
    Traceback (most recent call last):
    flwr_kd.ConfigError: unknown attack 'gausian' (did you mean 'gaussian'?); valid: ...
    """
    if not isinstance(spec, str):
        raise ConfigError(f"attack must be one of {', '.join(ATTACKS)}, got {spec!r}")
    name, colon, value = spec.partition(":")
    if name not in _READERS:
        raise ConfigError(f"{unknown_name('attack', name, _READERS)}, in the forms {', '.join(ATTACKS)}")
    _, read = _READERS[name]
    return read(spec, value if colon else None)


def draw_attackers(clients: int, attackers: int, seed: int) -> frozenset[int]:
    """Draw which partitions attack; those of a smaller number are among those of a larger one.

    Parameters
    ----------
    clients : int
        Number of clients, whose partition ids are 0 .. clients - 1.
    attackers : int
        From 0 to ``clients``.
    seed : int
        The run's.

    Raises
    ------
    ConfigError
        If there are more attackers than clients, or fewer than none.

    Examples
    --------
    >>> few, more = (draw_attackers(10, number, seed=0) for number in (2, 4))
    >>> len(few), len(more), few < more
    (2, 4, True)
    """
    whole_number("attackers", attackers, 0, clients)
    order = numpy_generator(seed, "attackers").permutation(clients)
    return frozenset(order[:attackers].tolist())
