"""How many bytes a method sends per client and round, by its paper: formulas in a few letters.

A method's registration has one :class:`Sent` for each part of each message. The formula is the number of values
that the paper says are sent, times the bytes of their dtype. What is sent beside that (sample numbers, counts,
BatchNorm's statistics) is listed apart, so that nothing is left but headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_kd.config import MethodConfig

__all__ = ["HEADERS", "LETTERS", "PER_CLASS", "Sent", "Situation", "Sizes", "Term", "averaging", "weights"]

LETTERS = {
    "W": "parameters of the model",
    "C": "classes",
    "D": "numbers of one sample's features",
    "N": "the client's training samples",
    "K": "classes that have knowledge: up the client's, down those of all",
    "P": "public samples of the round",
    "A": "public samples that there are",
    "S": "clients of a sector",
    "M": "others' models that a client is sent",
    "B": "numbers of BatchNorm's statistics",
    "L": "BatchNorm layers, each with a counter",
    "H": "hidden units of a generator",
    "G": "numbers of a generator of samples, with its BatchNorm statistics",
    "J": "BatchNorm layers of that generator, each with a counter",
    "Q": "generated samples of the round",
    "E": "parameters of the model without its classifier",
}
"""What the letters of the formulas of messages' sizes mean."""
Sizes = Mapping[str, int]
"""Numbers by the letters."""
HEADERS = {"weights": 128, "knowledge": 600}
"""Most bytes beside formula and ``beside``: for weights those of each array, for knowledge those of the payload."""
_BYTES = {"float32": 4, "float64": 8, "int64": 8, "S64": 64}


@dataclass(frozen=True)
class Term:
    """A number of values, as a product of letters, and their dtype; ``bits`` are whole bytes of bits.

    >>> Term("N·D").text, Term("N·D").nbytes({"N": 10, "D": 3})
    ('4·N·D', 120)
    >>> Term("N", "bits").text, Term("N", "bits").nbytes({"N": 17})
    ('⌈N/8⌉', 3)
    """

    letters: str
    dtype: str = "float32"

    @property
    def text(self) -> str:
        """The term as it is written."""
        if self.dtype == "bits":
            return f"⌈{self.letters}/8⌉"
        return "·".join([str(_BYTES[self.dtype]), *filter(None, [self.letters])])

    def nbytes(self, sizes: Sizes) -> int:
        """Return the number of bytes."""
        letters = self.letters.split("·") if self.letters else []
        count = math.prod(sizes[letter] for letter in letters)
        return -(-count // 8) if self.dtype == "bits" else _BYTES[self.dtype] * count


@dataclass(frozen=True)
class Sent:
    """One part of a message: what the paper sends in it, and what is sent beside that.

    Attributes
    ----------
    phase : str
        The phase of the round.
    direction : str
        ``"down"``, to the client, or ``"up"``.
    part : str
        ``"weights"`` (arrays) or ``"knowledge"`` (the payload).
    terms : tuple of Term
        The paper's formula.
    source : str
        Where the paper says so.
    beside : tuple of (str, Term)
        What else is sent, each with its name.
    when : str
        ``"all"`` rounds, ``"later"`` (from round 2) or ``"last"``.
    """

    phase: str
    direction: str
    part: str
    terms: tuple[Term, ...]
    source: str
    beside: tuple[tuple[str, Term], ...] = ()
    when: str = "all"

    @property
    def text(self) -> str:
        """The paper's formula as it is written."""
        return " + ".join(term.text for term in self.terms) or "–"

    def paper(self, sizes: Sizes) -> int:
        """Return the bytes of the paper's formula."""
        return sum(term.nbytes(sizes) for term in self.terms)

    def others(self, sizes: Sizes) -> dict[str, int]:
        """Return by name the bytes that are sent beside that, where there are any."""
        totals: dict[str, int] = {}
        for name, term in self.beside:
            totals[name] = totals.get(name, 0) + term.nbytes(sizes)
        return {name: nbytes for name, nbytes in totals.items() if nbytes}

    def in_round(self, number: int, rounds: int) -> bool:
        """Return whether it is sent in a round."""
        return {"all": True, "later": number > 1, "last": number == rounds}[self.when]


@dataclass(frozen=True)
class Situation:
    """What a method may need to say how large one of its letters is.

    Attributes
    ----------
    config : MethodConfig
        The hyper-parameters.
    counts : sequence of sequence of int
        By client, the number of training samples of each class.
    client : int
        The client.
    direction : str
        ``"down"`` or ``"up"``.
    public : int
        Number of public samples at every client.
    inputs : sequence of int
        Shape of one sample.
    """

    config: MethodConfig
    counts: Sequence[Sequence[int]]
    client: int
    direction: str
    public: int = 0
    inputs: Sequence[int] = ()

    def number(self, name: str) -> float:
        """Return a hyper-parameter of the method's own."""
        value: Any = getattr(self.config, name)
        return float(value)

    def text(self, name: str) -> str:
        """Return a hyper-parameter of the method's own that is a choice."""
        return str(getattr(self.config, name))


def weights(phase: str, direction: str, source: str, *, copies: str = "", when: str = "all") -> Sent:
    """Return one model, or with ``copies`` one more than that letter says."""
    times = [""] if not copies else [f"{copies}·", ""]
    beside = [
        (name, Term(f"{each}{letter}", dtype))
        for each in times
        for name, letter, dtype in (
            ("BatchNorm statistics", "B", "float32"),
            ("BatchNorm counters", "L", "int64"),
        )
    ]
    terms = tuple(Term(f"{each}W") for each in times)
    return Sent(phase, direction, "weights", terms, source, tuple(beside), when)


def averaging(source: str) -> tuple[Sent, ...]:
    """Return FedAvg's: the model down and the model up, W values each."""
    return weights("train", "down", source), weights("train", "up", source)


PER_CLASS = (("classes", Term("C", "bits")), ("counts", Term("K", "int64")))
"""What is sent beside class knowledge: which classes there are, and of how many samples."""
