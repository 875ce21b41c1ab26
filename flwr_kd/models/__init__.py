"""Models that show their features: a feature extractor, and a classifier on top of it."""

from flwr_kd.models.feature import FeatureModel, SplitModel, as_feature_model, count_parameters
from flwr_kd.models.generator import ConditionalGenerator, build_generator
from flwr_kd.models.slimmable import (
    SlimmableBatchNorm1d,
    SlimmableBatchNorm2d,
    SlimmableConv2d,
    SlimmableLinear,
    count_flops,
    make_slimmable,
    slimmed,
)
from flwr_kd.models.zoo import MODELS, build_model, build_predictor

__all__ = [
    "MODELS",
    "ConditionalGenerator",
    "FeatureModel",
    "SlimmableBatchNorm1d",
    "SlimmableBatchNorm2d",
    "SlimmableConv2d",
    "SlimmableLinear",
    "SplitModel",
    "as_feature_model",
    "build_generator",
    "build_model",
    "build_predictor",
    "count_flops",
    "count_parameters",
    "make_slimmable",
    "slimmed",
]
