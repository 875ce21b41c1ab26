"""FedAvg's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy

from .config import FedAvgConfig


class FedAvg(KDStrategy[FedAvgConfig]):
    """Federated averaging (McMahan et al., AISTATS 2017), which the base class implements.

    The mean equals that of Flower's ``FedAvg`` up to rounding: it is summed in float64, one reply at a time. For
    parameters, see :class:`flwr_kd.KDStrategy`.
    """

    config_class = FedAvgConfig
