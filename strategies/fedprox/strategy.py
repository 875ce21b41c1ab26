"""FedProx's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy

from .config import FedProxConfig


class FedProx(KDStrategy[FedProxConfig]):
    """FedProx (Li et al., MLSys 2020): the server averages as FedAvg's does.

    μ travels under Flower's own key, ``proximal-mu``. For parameters, see :class:`flwr_kd.KDStrategy`.
    """

    config_class = FedProxConfig
