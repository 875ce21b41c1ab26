"""FedAvg's server half: Flower's own aggregation."""

from flwr_kd.flower import FlowerStrategy


class FedAvg(FlowerStrategy):
    """Federated averaging (McMahan et al., AISTATS 2017) with Flower's ``FedAvg`` as the aggregation.

    For parameters, see :class:`flwr_kd.strategy.KDStrategy`.
    """
