"""FedHEAD and FedHEAD+ as a Flower App: ``flwr run apps/fedhead``."""
