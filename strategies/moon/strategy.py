"""MOON's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy

from .config import MOONConfig


class MOON(KDStrategy[MOONConfig]):
    """MOON (Li, He and Song, CVPR 2021): the server averages as FedAvg's does.

    For parameters, see :class:`flwr_kd.KDStrategy`.
    """

    config_class = MOONConfig
