"""How models are averaged: the rules that a user can choose, as text.

==================== ====================================================================  =====================
rule                 result                                                                source
==================== ====================================================================  =====================
``mean``             the mean, weighted by sample counts                                   FedAvg
``median``           of each coordinate the median                                         Yin et al. 2018
``trimmed-mean:S``   of each coordinate the mean without the share S at each end           Yin et al. 2018
``krum:F``           the model with the smallest sum of squared distances to its           Blanchard et al. 2017
                     N - F - 2 nearest
``multi-krum:F:M``   the mean of the M models with the smallest of these sums              Blanchard et al. 2017
``geometric-median`` the point with the smallest sum of distances to the models            Pillutla et al. 2022
``norm-bound:X``     the mean, weighted by sample counts, after each update is clipped to  Sun et al. 2019
                     X times the median of the updates' norms
==================== ====================================================================  =====================

Sample counts are claims, so rules that choose or cut do not use them: each client has one vote.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr_kd.checks import ConfigError, number, read_number, read_whole_number
from flwr_kd.wording import option

__all__ = ["MEAN", "RULES", "Rule"]

RULES = {
    "mean": "mean",
    "median": "median",
    "trimmed-mean": "trimmed-mean:SHARE",
    "krum": "krum:F",
    "multi-krum": "multi-krum:F:M",
    "geometric-median": "geometric-median",
    "norm-bound": "norm-bound:FACTOR",
}
"""Names of the rules, with their forms."""
_PARAMETERS = {"trimmed-mean": 1, "krum": 1, "multi-krum": 2, "norm-bound": 1}


@dataclass(frozen=True)
class Rule:
    """A rule by which models are averaged.

    Attributes
    ----------
    name : str
        One of :data:`RULES`.
    share : float
        Of ``trimmed-mean``, in [0, 0.5): the share of the clients that is left out at each end.
    attackers, chosen : int
        F, at least 0, and M, at least 1, of the Krums.
    factor : float
        Of ``norm-bound``, above 0.

    Examples
    --------
    >>> Rule.parse("multi-krum:2:5")
    Rule(name='multi-krum', share=0.0, attackers=2, chosen=5, factor=1.0)
    >>> str(Rule.parse("trimmed-mean:0.10")), Rule.parse("krum:2").least
    ('trimmed-mean:0.1', 7)
    """

    name: str = "mean"
    share: float = 0.0
    attackers: int = 0
    chosen: int = 1
    factor: float = 1.0

    @classmethod
    def parse(cls, text: object, field: str = "aggregation") -> Rule:
        """Read a rule.

        Parameters
        ----------
        text : str
            A form of :data:`RULES`.
        field : str
            The option that has it, for messages.

        Raises
        ------
        ConfigError
            If it is anything else, or a number is out of range.
        """
        name, *parts = str(text).split(":")
        if not isinstance(text, str) or name not in RULES or len(parts) != _PARAMETERS.get(name, 0):
            raise ConfigError(f"{field} must be one of {', '.join(RULES.values())}, got {text!r}")
        if name == "trimmed-mean":
            share = number(
                f"{field}: SHARE of trimmed-mean", read_number(field, parts[0]), 0, 0.5, open_high=True
            )
            return cls(name, share=share)
        if name == "norm-bound":
            factor = number(f"{field}: FACTOR of norm-bound", read_number(field, parts[0]), 0, open_low=True)
            return cls(name, factor=factor)
        whole = [
            read_whole_number(f"{field}: {letter} of {name}", part)
            for letter, part in zip("FM", parts, strict=False)
        ]
        rule = cls(name, attackers=whole[0] if whole else 0, chosen=whole[1] if len(whole) > 1 else 1)
        if rule.chosen < 1:
            raise ConfigError(f"{field}: M of {name} must be at least 1, got {rule.chosen}")
        return rule

    @property
    def is_mean(self) -> bool:
        """Whether it is the plain mean."""
        return self.name == "mean"

    @property
    def least(self) -> int:
        """The smallest number of models for which the rule keeps its promise.

        2F + 3 for the Krums (Blanchard et al., proposition 4.2).
        """
        return 2 * self.attackers + 3 if "krum" in self.name else 1

    def chosen_of(self, models: int) -> int:
        """Return how many of some models a Krum keeps: M, and at most all but F.

        Clients whose replies are dropped must not end the rounds of the others.
        """
        return max(1, min(self.chosen, models - self.attackers))

    def check_clients(self, clients: int, field: str = "aggregation") -> None:
        """Refuse a rule that needs more clients than a run waits for: F + M, so that M models can be honest.

        Raises
        ------
        ConfigError
            With both numbers.
        """
        least = max(self.least, self.attackers + self.chosen) if "krum" in self.name else 1
        if clients < least:
            raise ConfigError(
                f"{option(field, str(self))} needs at least {least} clients (2F + 3 and F + M), got "
                f"{clients}: choose a smaller F, or more clients"
            )

    def __str__(self) -> str:
        values = {
            "trimmed-mean": f":{self.share:g}",
            "krum": f":{self.attackers}",
            "multi-krum": f":{self.attackers}:{self.chosen}",
            "norm-bound": f":{self.factor:g}",
        }
        return self.name + values.get(self.name, "")


MEAN = Rule()
"""The plain mean."""
