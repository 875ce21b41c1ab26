"""FedHyb, FedHyb* and the ablations as a Flower App: ``flwr run apps/fedhyb``."""

METHODS = ("fedhyb", "fedhyb-star", "fedhyb-1", "fedhyb-2", "fedhyb-3")
"""Names that `flwr-kd methods` lists; the setting method is one of them."""
