"""Models that show their features: a feature extractor, and a classifier on top of it."""

from flwr_kd.models.feature import FeatureModel, SplitModel, as_feature_model, count_parameters
from flwr_kd.models.zoo import MODELS, build_model, build_predictor

__all__ = [
    "MODELS",
    "FeatureModel",
    "SplitModel",
    "as_feature_model",
    "build_model",
    "build_predictor",
    "count_parameters",
]
