"""KT-pFL, Sim-pFL, TopK-pFL and FedMD as a Flower App: ``flwr run apps/ktpfl``."""

METHODS = ("ktpfl", "sim-pfl", "topk-pfl", "fedmd")
"""Names that `flwr-kd methods` lists; the setting method is one of them."""
