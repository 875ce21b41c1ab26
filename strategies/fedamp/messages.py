"""What travels in FedAMP beside models: whether the server keeps one of the client's."""

HAS_MODEL = "has-model"
"""Key of the config that says that a measured model is the client's own."""
