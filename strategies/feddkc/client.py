"""FedDKC's client half, which is FedGKT's."""

from ..fedgkt import FedGKTClient
from .config import FedDKCConfig


class FedDKCClient(FedGKTClient):
    """See :class:`~flwr_kd.strategies.fedgkt.FedGKTClient`: refinement is the server's."""

    config_class = FedDKCConfig
