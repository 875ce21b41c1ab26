"""What travels in KT-pFL on models besides the weights."""

HAS_MODEL = "has-model"
"""Config key: whether the server expects the client to have kept a model of this run."""
