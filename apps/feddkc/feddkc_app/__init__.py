"""FedDKC as a Flower App: ``flwr run apps/feddkc``."""
