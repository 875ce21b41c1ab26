"""The methods, one folder each; published as ``flwr_kd.strategies``."""
