"""Whole experiments on one machine, and Flower Apps' side of them."""
