"""The client half of every method."""
