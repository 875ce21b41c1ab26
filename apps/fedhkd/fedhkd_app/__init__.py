"""FedHKD as a Flower App: ``flwr run apps/fedhkd``."""
