"""MOON's projection head, as a part of the model that clients and server share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flwr_kd.models import FeatureModel, SplitModel, as_feature_model
from flwr_kd.models.checks import check_size, type_name
from flwr_kd.models.given import plain_model, private_copy
from flwr_kd.models.head import HeadTap, final_linear
from flwr_kd.models.initialisation import DrawFrom

__all__ = ["with_projection"]


def with_projection(model: nn.Module, *, seed: int, width: int = 256) -> nn.Module:
    """Return a copy of a classifier with the paper's projection head before its last layer.

    The head maps the features ``[B, D]`` by ``Linear(D, D)``, ReLU and ``Linear(D, width)`` to the representation;
    a new ``Linear(width, C)`` classifies it. Clients and server must all have it.

    Parameters
    ----------
    model : nn.Module
        A :class:`~flwr_kd.models.FeatureModel`, or any module whose output is that of a ``Linear``.
    seed : int
        Of the new layers' weights.
    width : int
        Size of the representation.

    Raises
    ------
    TypeError, ValueError
        If the model has ``features`` and ``classify`` of its own, or does not end in a ``Linear``; see
        :func:`flwr_kd.models.as_feature_model`.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> list(with_projection(net, seed=0, width=5)[2])
    ... # doctest: +NORMALIZE_WHITESPACE
    [Linear(in_features=3, out_features=3, bias=True), ReLU(), Linear(in_features=3, out_features=5, bias=True),
     Linear(in_features=5, out_features=2, bias=True)]
    """
    check_size("width", width, 1)
    copied: Any = private_copy(plain_model(model))
    if isinstance(copied, HeadTap):
        copied = copied.original
    splits = callable(getattr(copied, "features", None)) and callable(getattr(copied, "classify", None))
    if splits and not isinstance(copied, FeatureModel | SplitModel):
        raise TypeError(
            f"{type_name(model)} has features() and classify() of its own: put the projection into its features()"
        )
    name = "" if isinstance(copied, FeatureModel) else final_linear(copied)
    whole: Any = as_feature_model(copied)
    inputs, classes = whole.feature_dim, whole.num_classes
    with DrawFrom(torch.Generator().manual_seed(seed)):
        projection = [nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, width)]
        last = nn.Linear(width, classes)
    if isinstance(copied, FeatureModel):
        return FeatureModel(nn.Sequential(copied.extractor, *projection), last)
    head = nn.Sequential(*projection, last)
    if not name:
        return head
    parent, _, child = name.rpartition(".")
    setattr(copied.get_submodule(parent), child, head)
    return copied  # type: ignore[no-any-return]
