"""KT-pFL, Sim-pFL, TopK-pFL and FedMD as a Flower App: ``flwr run apps/ktpfl``."""
