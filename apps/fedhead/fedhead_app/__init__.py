"""FedHEAD and FedHEAD+ as a Flower App: ``flwr run apps/fedhead``."""

METHODS = ("fedhead", "fedhead-plus")
"""Names that `flwr-kd methods` lists; the setting method is one of them."""
