"""The rounds after which models are also measured where it costs more than a client's own test split."""

from __future__ import annotations

from typing import NamedTuple, Self

from flwr_kd.checks import ConfigError, read_whole_number
from flwr_kd.text import shown

__all__ = ["MeasuredRounds"]


class MeasuredRounds(NamedTuple):
    """When clients measure their models on the common test set, and the aggregated model on their own test data.

    Attributes
    ----------
    last : bool
        After the last round.
    every : int
        After each round whose number is a multiple of it as well; 0 for no others.
    """

    last: bool = False
    every: int = 0

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read ``never``, ``last``, or ``every:N``, which includes the last round.

        Raises
        ------
        ConfigError
            If it is anything else.

        Examples
        --------
        >>> MeasuredRounds.parse("every:5")
        MeasuredRounds(last=True, every=5)
        >>> MeasuredRounds.parse("always")
        Traceback (most recent call last):
        flwr_kd.ConfigError: measure must be never, last or every:N, got 'always'
        """
        if text == "never":
            return cls()
        if text == "last":
            return cls(last=True)
        kind, colon, count = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind == "every" and colon:
            return cls(last=True, every=read_whole_number("measure: the N of every:N", count, 1))
        raise ConfigError(f"measure must be never, last or every:N, got {shown(text)}")

    def has(self, server_round: int, num_rounds: int) -> bool:
        """Return whether a round is one of them, in a run whose last round is ``num_rounds``.

        Examples
        --------
        >>> [r for r in range(1, 8) if MeasuredRounds.parse("every:3").has(r, 7)]
        [3, 6, 7]
        """
        return (self.last and server_round == num_rounds) or (
            self.every > 0 and server_round % self.every == 0
        )
