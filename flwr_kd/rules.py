"""What a method says of its knowledge, so that the shared checks can test it: rules, and examples at their edges.

A method whose clients send payloads has a module ``rules.py`` with a :class:`Rules`, which its registration names
as ``rules_path``. The shared federation has 4 classes and 8 features. The client whose replies are changed has 25
training samples and 8 test samples. There are 32 public samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flwr_kd.transport.payload import Payload

if TYPE_CHECKING:
    from flwr_kd.server.records import Node
    from flwr_kd.server.strategy import KDStrategy

__all__ = [
    "Change",
    "Example",
    "Rules",
    "broken_distributions",
    "infinite_fields",
    "keep_rows",
    "larger_than",
    "replace_all",
    "set_value",
]

Arrays = dict[str, npt.NDArray[Any]]
Scalars = dict[str, Any]
Change = Callable[[Arrays, Scalars], None]
"""Changes the arrays and scalars of an honest payload in place."""


@dataclass(frozen=True)
class Example:
    """A change of an honest payload that breaks a rule, or that only comes close to it.

    Attributes
    ----------
    name : str
        What is changed, in a few words.
    change : callable
        ``(arrays, scalars)``, changed in place. Arrays are copies.
    warning : str
        A regular expression that the server's warning must match; empty if the reply must be used.
    variant : str
        Name of the method's variant (see :class:`flwr_kd.registry.Variant`) that the example is for; empty for the
        method without further settings.
    """

    name: str
    change: Change
    warning: str = ""
    variant: str = ""


@dataclass(frozen=True)
class Rules:
    """The rules of a method's payloads.

    Attributes
    ----------
    violations : callable
        ``(payload, node, strategy, num_examples)``: which rules an accepted payload breaks, one text each. To be
        written in plain Python, apart from the code with which the server checks.
    fill : callable
        ``(arrays, node, strategy)``: fills arrays of zeros, whose sizes follow from what a node reported in its
        handshake, with values that keep the rules. Returns the scalars and the number of samples of the reply.
    examples : tuple of Example
        Payloads that break one rule each, and payloads at the edges of the rules.
    """

    violations: Callable[[Payload, Node, KDStrategy[Any, Any], int], list[str]]
    fill: Callable[[Arrays, Node, KDStrategy[Any, Any]], tuple[Scalars, int]]
    examples: tuple[Example, ...] = ()

    def broken(self, variant: str = "") -> list[Example]:
        """Return the examples whose replies must be dropped."""
        return [each for each in self.examples if each.warning and each.variant == variant]

    def harmless(self, variant: str = "") -> list[Example]:
        """Return the examples whose replies must be used."""
        return [each for each in self.examples if not each.warning and each.variant == variant]


# ---------------------------------------------------------------------- changes


def set_value(name: str, index: Any, value: Any) -> Change:
    """Return a change of some numbers of one array.

    >>> arrays = {"counts": np.arange(3)}
    >>> set_value("counts", 0, 7)(arrays, {})
    >>> arrays["counts"].tolist()
    [7, 1, 2]
    """

    def change(arrays: Arrays, scalars: Scalars) -> None:
        arrays[name][index] = value

    return change


def keep_rows(order: Any, *names: str) -> Change:
    """Return a change of which rows the arrays have, and in which order; of all arrays if none is named."""

    def change(arrays: Arrays, scalars: Scalars) -> None:
        arrays.update({name: arrays[name][order] for name in (names or arrays) if len(arrays[name])})

    return change


def replace_all(name: str, value: Any) -> Change:
    """Return a change of a whole array, which keeps its dtype."""
    return lambda arrays, scalars: arrays.update({name: np.array(value, dtype=arrays[name].dtype)})


# ---------------------------------------------------------------------- rules that many payloads share


def infinite_fields(payload: Payload) -> list[str]:
    """Return a text for each field with a number that is not finite."""
    values: Mapping[str, Any] = {item.name: getattr(payload, item.name) for item in fields(payload)}  # type: ignore[arg-type]
    return [
        f"{name} is not finite"
        for name, value in values.items()
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all()
    ]


def larger_than(bound: float, name: str, value: npt.NDArray[Any]) -> list[str]:
    """Return a text if a number is larger than a bound; ``65504`` is the largest of float16."""
    return [f"{name} up to {x}" for x in np.abs(value).ravel().tolist() if x > bound][:1]


def broken_distributions(values: npt.NDArray[Any], shape: tuple[int, ...], tolerance: float) -> list[str]:
    """Return a text for each row that is no probability distribution within a tolerance of its sum.

    >>> broken_distributions(np.array([[0.5, 0.5], [0.9, 0.2]]), (2, 2), 1e-3)
    ['a row is no distribution']
    """
    texts = [] if values.shape == shape else [f"shape {values.shape}, expected {shape}"]
    for row in values.tolist():
        if min(row) < 0 or abs(sum(row) - 1) > tolerance + 1e-6:
            texts.append("a row is no distribution")
    return texts
