"""FedAvg's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy


class FedAvg(KDStrategy):
    """Federated averaging (McMahan et al., AISTATS 2017), which the base class implements.

    The mean equals that of Flower's ``FedAvg`` up to rounding: it is summed in float64, one reply at a time. For
    parameters, see :class:`flwr_kd.KDStrategy`.
    """
