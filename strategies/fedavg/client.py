"""FedAvg's client half."""

from flwr_kd.client.client import KDClient


class FedAvgClient(KDClient):
    """Cross-entropy on the local data; the base class does the rest."""
