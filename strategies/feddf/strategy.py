"""FedDF's server half: the mean of the models, then distillation of all of them into it."""

from __future__ import annotations

from typing import cast

from flwr.app import ArrayRecord

from flwr_kd.ensemble import DistillingStrategy, soft_labels
from flwr_kd.strategy import Node, Reply

from .config import FedDFConfig


class FedDF(DistillingStrategy):
    """FedDF (Lin et al., NeurIPS 2020): the server distils the clients' models on unlabelled public data.

    Parameters
    ----------
    config : FedDFConfig, optional
        The hyper-parameters.
    model, public_data, device, input_key, **options
        See :class:`flwr_kd.ensemble.DistillingStrategy`.

    Attributes
    ----------
    round_trips : int
        Between clients and server in this run: one per client and round that answered (FedHEAD's Table 1).

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data is not what the model takes.
    """

    config_class = FedDFConfig
    round_trips = 0

    def begin(self, nodes: list[Node]) -> None:
        """Check the server's model, and count from 0."""
        super().begin(nodes)
        self.round_trips = 0

    def aggregate_phase(
        self, phase: str, server_round: int, replies: list[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average the models, weighted by sample counts, and distil the ensemble of all into the mean."""
        config = cast(FedDFConfig, self.config)
        models, weights = [reply.arrays for reply in replies], [reply.num_examples for reply in replies]
        self.round_trips += len(replies)
        names = [str(reply.node) for reply in replies]
        distilled = self.distil(
            models,
            weights,
            names,
            epochs=config.server_epochs,
            server_round=server_round,
            matching=soft_labels(config.average),
        )
        return self.template.record(distilled)
