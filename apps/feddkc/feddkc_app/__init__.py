"""FedDKC as a Flower App: ``flwr run apps/feddkc``."""

METHODS = ("feddkc-kkr", "feddkc-skr")
"""Names that `flwr-kd methods` lists; the setting method is one of them."""
