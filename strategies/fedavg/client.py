"""FedAvg's client half."""

from flwr_kd.client.client import KDClient


class FedAvgClient(KDClient):
    """Trains on cross-entropy on the local data, which the base class implements."""
