"""FedProx's server half: Flower's own aggregation."""

from typing import cast

from flwr.serverapp.strategy import FedProx as FlowerFedProx

from flwr_kd.flower import FlowerStrategy

from .config import FedProxConfig


class FedProx(FlowerStrategy):
    """FedProx (Li et al., MLSys 2020) with Flower's ``FedProx`` as the aggregation.

    μ travels under Flower's own key, ``proximal-mu``. For parameters, see
    :class:`flwr_kd.strategy.KDStrategy`.
    """

    config_class = FedProxConfig

    def make_inner(self) -> FlowerFedProx:
        """Return Flower's strategy with the same μ."""
        return FlowerFedProx(proximal_mu=cast(FedProxConfig, self.config).proximal_mu)
