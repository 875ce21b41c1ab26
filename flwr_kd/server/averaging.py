"""How a strategy averages what clients send: the options that choose the rules, and what methods average by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flwr_kd.checks import ConfigError
from flwr_kd.server.aggregation import Average, Mean, Rule, average_by, knowledge_rule, new_mean
from flwr_kd.server.records import NDArray
from flwr_kd.transport.template import ArrayTemplate
from flwr_kd.wording import option

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["Averaging"]


class Averaging:
    """The part of :class:`~flwr_kd.KDStrategy` that averages.

    Attributes
    ----------
    rule, knowledge_rule : Rule
        The options ``aggregation`` and ``knowledge_aggregation``.
    """

    averages_models: ClassVar[bool] = True
    """Whether the server averages models of clients anywhere, so that a robust rule can take the mean's place. A
    method whose replies have no arrays does not."""
    bounds_updates: ClassVar[bool] = False
    """Whether ``norm-bound`` has an effect in a method that averages no models, but learns from updates."""
    averages_knowledge: ClassVar[bool] = False
    """Whether the option ``knowledge_aggregation`` has an effect."""

    template: ArrayTemplate
    checkpoint_dir: Path | None
    current_run: Run
    rule: Rule
    knowledge_rule: Rule

    given_max_examples: int | None

    @property
    def max_examples(self) -> int:
        """Largest sample count with which a client is weighted: the option, else by the handshakes."""
        given = self.given_max_examples
        return self.current_run.roster.most_examples if given is None else given

    @max_examples.setter
    def max_examples(self, value: int | None) -> None:
        self.given_max_examples = value

    @property
    def aggregation(self) -> str:
        """The rule by which models are averaged, as text."""
        return str(self.rule)

    @property
    def knowledge_aggregation(self) -> str:
        """The rule by which knowledge is averaged, as text."""
        return str(self.knowledge_rule)

    def choose_rules(self, models: str, knowledge: str, clients: int) -> None:
        """Read the rules for a run that waits for some clients.

        Raises
        ------
        ConfigError
            If there is no such rule, it has no effect in this method, or it needs more clients.
        """
        self.rule, self.knowledge_rule = Rule.parse(models), knowledge_rule(knowledge)
        bounded = self.bounds_updates and self.rule.name == "norm-bound"
        for rule, has, field, what in (
            (self.rule, self.averages_models or bounded, "aggregation", "models"),
            (self.knowledge_rule, self.averages_knowledge, "knowledge_aggregation", "knowledge"),
        ):
            if not rule.is_mean and not has:
                allowed = option(field, "mean")
                if what == "models" and self.bounds_updates:
                    allowed += " or norm-bound:FACTOR"
                raise ConfigError(
                    f"{allowed} expected: {type(self).__name__} averages no {what} of clients, got {rule}"
                )
        self.rule.check_clients(clients)

    def new_mean(self, reference: Sequence[NDArray] | None = None) -> Mean:
        """Return what averages models, by the option ``aggregation``.

        Parameters
        ----------
        reference : sequence of ndarray, optional
            The model that the clients trained from, of the same arrays; the phase's global arrays if None.
        """
        given = self.current_run.reference
        if reference is None and given is not None and not self.rule.is_mean:
            reference = [given[name].numpy() for name in self.template.names]
        return new_mean(self.rule, reference=reference, folder=self.checkpoint_dir)

    def averaging(self, reference: Sequence[NDArray] | None = None) -> Average:
        """Return a function of models and their weights that averages them, as :meth:`new_mean` does."""
        return average_by(lambda: self.new_mean(reference))
