"""FedAlign's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy

from .config import FedAlignConfig


class FedAlign(KDStrategy[FedAlignConfig]):
    """FedAlign (Mendieta et al., CVPR 2022): the server averages as FedAvg's does.

    For parameters, see :class:`flwr_kd.KDStrategy`.
    """

    config_class = FedAlignConfig
