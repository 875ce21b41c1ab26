"""Means of models and of knowledge, and robust rules in their place: :mod:`flwr_kd.server.aggregation.rules`."""

from flwr_kd.server.aggregation.knowledge import knowledge_rule, outlying_rows, robust_average
from flwr_kd.server.aggregation.means import RunningMean, shares, weighted_mean
from flwr_kd.server.aggregation.models import Average, Mean, RobustMean, average_by, new_mean
from flwr_kd.server.aggregation.robust import clip_factors
from flwr_kd.server.aggregation.rules import MEAN, RULES, Rule

__all__ = [
    "MEAN",
    "RULES",
    "Average",
    "Mean",
    "RobustMean",
    "Rule",
    "RunningMean",
    "average_by",
    "clip_factors",
    "knowledge_rule",
    "new_mean",
    "outlying_rows",
    "robust_average",
    "shares",
    "weighted_mean",
]
