"""What travels in KT-pFL on models besides the weights."""

HAS_MODEL = "has-model"
"""Key of the config that says that the client has kept a model of this run."""
