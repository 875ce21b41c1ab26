"""FedDKC's client half, which is FedGKT's."""

from ..fedgkt import FedGKTClient
from .config import FedDKCConfig


class FedDKCClient(FedGKTClient[FedDKCConfig]):
    """See :class:`~flwr_kd.strategies.fedgkt.FedGKTClient`; the logits are refined at the server."""

    config_class = FedDKCConfig
