"""FedHKD as a Flower App: ``flwr run apps/fedhkd``."""

METHODS = ("fedhkd",)
"""Names that `flwr-kd methods` lists."""
