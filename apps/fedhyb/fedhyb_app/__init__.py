"""FedHyb, FedHyb* and the ablations as a Flower App: ``flwr run apps/fedhyb``."""
