"""FedAvg's server half: the mean of the models."""

from flwr_kd.server.strategy import KDStrategy


class FedAvg(KDStrategy):
    """Federated averaging (McMahan et al., AISTATS 2017); the base class does all of it.

    The mean is Flower's ``FedAvg``'s, up to rounding: summed in float64, one answer at a time. For parameters, see
    :class:`flwr_kd.KDStrategy`.
    """
