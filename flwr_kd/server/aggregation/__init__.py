"""Means of models, and robust rules in their place; see :mod:`flwr_kd.server.aggregation.rules`."""

from flwr_kd.server.aggregation.means import RunningMean, shares, weighted_mean
from flwr_kd.server.aggregation.models import Average, Mean, RobustMean, average_by, new_mean
from flwr_kd.server.aggregation.rules import RULES, Rule

__all__ = [
    "RULES",
    "Average",
    "Mean",
    "RobustMean",
    "Rule",
    "RunningMean",
    "average_by",
    "new_mean",
    "shares",
    "weighted_mean",
]
