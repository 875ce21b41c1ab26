"""What pFedHN's clients report beside their changes."""

__all__ = ["PRODUCED"]

PRODUCED = "produced-accuracy"
"""A metric of a reply: the accuracy of the model as the hypernetwork produced it, before the client's training."""
