"""FedMD's server half: the mean of all soft predictions is every client's target."""

from __future__ import annotations

from torch import Tensor

from flwr_kd.public_data.messages import SoftPredictions
from flwr_kd.public_data.server import PublicKnowledgeStrategy
from flwr_kd.server.aggregation import robust_average
from flwr_kd.server.records import Reply

from .config import FedMDConfig


class FedMD(PublicKnowledgeStrategy[FedMDConfig]):
    """FedMD (Li and Wang 2019): clients of any architecture learn the mean of all predictions on public data.

    For parameters see :class:`flwr_kd.public_data.server.PublicKnowledgeStrategy`.

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data cannot be used.
    """

    config_class = FedMDConfig
    averages_knowledge = True

    def targets(
        self, server_round: int, replies: list[Reply[SoftPredictions]], predictions: Tensor
    ) -> Tensor:
        """Return the consensus, the unweighted mean ``[K, C]`` or a robust one, for each client."""
        if not self.knowledge_rule.is_mean:
            return (
                robust_average(predictions, self.knowledge_rule).to(predictions.dtype).expand_as(predictions)
            )
        return predictions.double().mean(dim=0).to(predictions.dtype).expand_as(predictions)
