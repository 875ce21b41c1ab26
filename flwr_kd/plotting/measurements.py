"""Measurements of a trained model: its loss around the weights, and a map of its features, as pure functions.

Source: FedHyb, figures 3 and 4; Li et al. 2018, "Visualizing the loss landscape of neural nets".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_kd.checks import DataError, whole_number
from flwr_kd.data import as_labels, require
from flwr_kd.models import as_feature_model
from flwr_kd.seeding import derive_seed

__all__ = ["embed", "features_of", "filter_normalised_direction", "loss_along", "sample_of_classes"]

AnyArray: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
_PERPLEXITY = 30.0


def filter_normalised_direction(
    state: Mapping[str, Tensor],
    generator: torch.Generator,
    *,
    parameters: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Draw a direction in weight space in which each filter is as long as the model's own.

    Source: Li et al. 2018, section 4. Models whose weights have different scales can be compared along it. A
    filter is a slice of the first axis: an output channel of a convolution, an output of a linear layer.
    Weights with fewer than two dimensions (biases, BatchNorm's and LayerNorm's own) and integers stay as they
    are, in the direction 0.

    Parameters
    ----------
    state : mapping of str to Tensor
        A model's ``state_dict()``.
    generator : torch.Generator
        On the CPU. It draws once per weight with two dimensions or more, in the state's order.
    parameters : collection of str, optional
        Names of what is trained; all else, the buffers, is 0 in the direction. All of ``state`` if None, which
        is right for models whose buffers have fewer than two dimensions, as BatchNorm's have.

    Returns
    -------
    dict of str to Tensor
        Names, shapes, dtypes and devices of ``state``. A filter of zeros has a direction of zeros.

    Examples
    --------
    >>> state = {"weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "bias": torch.ones(2)}
    >>> direction = filter_normalised_direction(state, torch.Generator().manual_seed(0))
    >>> direction["weight"].norm(dim=1), direction["bias"]
    (tensor([5., 0.]), tensor([0., 0.]))
    """
    direction = {}
    for name, weight in state.items():
        kept = parameters is None or name in parameters
        if not kept or weight.ndim < 2 or not weight.is_floating_point():
            direction[name] = torch.zeros_like(weight)
            continue
        drawn = torch.randn(weight.shape, generator=generator)
        own, other = (_filter_norms(each.detach().float().cpu()) for each in (weight, drawn))
        scale = own / other.clamp_min(torch.finfo(other.dtype).tiny)
        direction[name] = (drawn * scale).to(weight)
    return direction


def _filter_norms(weight: Tensor) -> Tensor:
    """Return the l2 norm of each slice of the first axis, ``[F, 1, ...]``."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    return norms


def loss_along(
    model: nn.Module,
    state: Mapping[str, Tensor],
    directions: Sequence[Mapping[str, Tensor]],
    magnitudes: Sequence[float] | AnyArray,
    x: Tensor,
    y: Tensor,
    batch_size: int = 512,
    loss: Callable[..., Tensor] = F.cross_entropy,
) -> FloatArray:
    """Measure the loss at ``state + magnitude · direction``, for each direction and magnitude.

    Parameters
    ----------
    model : nn.Module
        Returns logits ``[B, C]``. It is in eval mode meanwhile; its own weights, buffers and modes are as
        before at the end.
    state : mapping of str to Tensor
        The weights and buffers to start from, with the model's names; need not be the model's own.
    directions : sequence of mapping of str to Tensor
        As from :func:`filter_normalised_direction`. What a direction does not name stays, and so do integers.
    magnitudes : sequence of float
        ``[M]``.
    x, y : Tensor
        Samples ``[N, ...]`` and labels ``[N]`` (several per sample: ``[N, C]``), on any device; batches go to the
        model's.
    batch_size : int
        Samples at a time, at least 1; changes nothing but memory and time.
    loss : callable
        ``loss(logits, labels, reduction="sum")``; cross-entropy by default.

    Returns
    -------
    ndarray
        Mean loss, ``[len(directions), M]``, float64. One that is infinite or not a number stays so.

    Raises
    ------
    DataError
        Without samples, or for a ``batch_size`` below 1.
    ValueError
        If a direction names what the state has not.

    Examples
    --------
    >>> model = nn.Linear(1, 2, bias=False)
    >>> state = {"weight": torch.zeros(2, 1)}
    >>> away = {"weight": torch.tensor([[1.0], [0.0]])}
    >>> x, y = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    >>> loss_along(model, state, [away], [-1.0, 0.0, 1.0], x, y).round(3)
    array([[1.313, 0.693, 0.313]])
    """
    whole_number("batch_size", batch_size, 1, error=DataError)
    if not len(x) or len(x) != len(y):
        raise DataError(f"x and y must have one length of at least 1, not {len(x)} and {len(y)}")
    for direction in directions:
        if unknown := sorted(set(direction) - set(state)):
            raise ValueError(f"directions name {', '.join(unknown)}, which the state has not")
    device = _device(model)
    start = {name: value.detach().to(device) for name, value in state.items()}
    batches = [
        (a.to(device), b.to(device))
        for a, b in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
    ]
    losses = np.empty((len(directions), len(magnitudes)))
    with _eval_mode(model), torch.no_grad():
        for row, direction in enumerate(directions):
            step = {n: d.to(device) for n, d in direction.items() if start[n].is_floating_point()}
            for column, magnitude in enumerate(magnitudes):
                moved = start | {name: start[name] + float(magnitude) * d for name, d in step.items()}
                total = sum(
                    float(loss(torch.func.functional_call(model, moved, (a,)), b, reduction="sum"))
                    for a, b in batches
                )
                losses[row, column] = total / len(x)
    return losses


def sample_of_classes(
    labels: Tensor | AnyArray | Sequence[int], classes: int, size: int, generator: np.random.Generator
) -> IntArray:
    """Choose classes at random, and of each the same number of samples.

    Source: FedHyb, section 3.3, shows 500 images of four classes.

    Parameters
    ----------
    labels : Tensor, ndarray or sequence of int
        ``[N]``, from 0.
    classes : int
        Number of classes, from 1 to the number that occurs.
    size : int
        Number of samples, at least ``classes``. If it is not divisible, some classes give one more. A class with
        fewer than its share gives all that it has, so that the sample is smaller.
    generator : numpy.random.Generator
        Chooses the classes and the samples.

    Returns
    -------
    ndarray
        Positions in ``labels``, int64, ascending.

    Raises
    ------
    DataError
        If ``classes`` or ``size`` is not allowed.

    Examples
    --------
    >>> rows = sample_of_classes([0, 1, 2] * 10, 2, 8, np.random.default_rng(0))
    >>> len(rows), sorted(set((rows % 3).tolist()))
    (8, [0, 2])
    """
    numbers = as_labels(labels)
    present = np.unique(numbers)
    if whole_number("classes", classes, 1, error=DataError) > len(present):
        raise DataError(f"classes must be at most the number that occurs, {len(present)}, not {classes}")
    if whole_number("samples", size, 1, error=DataError) < classes:
        raise DataError(f"samples must be at least the number of classes, {classes}, not {size}")
    chosen = generator.permutation(present)[:classes]
    rows = []
    for index, label in enumerate(chosen):
        own = np.flatnonzero(numbers == label)
        rows.append(generator.permutation(own)[: size // classes + (index < size % classes)])
    return np.sort(np.concatenate(rows)).astype(np.int64)


def features_of(model: nn.Module, x: Tensor, batch_size: int = 512) -> npt.NDArray[np.float32]:
    """Compute a classifier's features: what enters its last ``Linear``, in eval mode.

    Parameters
    ----------
    model : nn.Module
        As :func:`~flwr_kd.models.as_feature_model` takes it. Its modes are as before at the end.
    x : Tensor
        Samples ``[N, ...]``, on any device; at least one.
    batch_size : int
        Samples at a time, at least 1.

    Returns
    -------
    ndarray
        ``[N, D]``, float32.

    Raises
    ------
    DataError
        Without samples, or for a ``batch_size`` below 1.

    Examples
    --------
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> features_of(model, torch.zeros(5, 2, 2)).shape
    (5, 3)
    """
    whole_number("batch_size", batch_size, 1, error=DataError)
    if not len(x):
        raise DataError("x must have at least one sample")
    device = _device(model)
    with _eval_mode(model), torch.no_grad():
        split: Any = as_feature_model(model)
        parts = [split.features(batch.to(device)).float().cpu() for batch in torch.split(x, batch_size)]
    return torch.cat(parts).numpy()


def embed(features: AnyArray, seed: int) -> FloatArray:
    """Lay features out in the plane by t-SNE, so that near ones stay near.

    Source: van der Maaten and Hinton 2008, in scikit-learn's implementation, begun at the first two principal
    components. The perplexity is 30, and a third of the neighbours where that is less. Distances between groups
    and the groups' sizes in such a map mean little; that groups are apart does mean something.

    Parameters
    ----------
    features : ndarray
        ``[N, D]``, N at least 1, finite.
    seed : int
        At least 0. One seed gives the same map on one machine, whatever the number of its cores.

    Returns
    -------
    ndarray
        ``[N, 2]``, float64. Zeros where all features are the same.

    Raises
    ------
    DataError
        If the features have another shape or are not finite, or scikit-learn is not installed.

    Examples
    --------
    >>> embed(np.zeros((3, 4)), seed=0).tolist()
    [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """
    features = np.asarray(features)
    if features.ndim != 2 or not features.size:
        raise DataError(f"features must have the shape [N, D], not {list(features.shape)}")
    features = features.astype(np.float64)
    if not np.isfinite(features).all():
        raise DataError("features must be finite: the model's training went out of bounds")
    if (features == features[0]).all():
        return np.zeros((len(features), 2))
    if features.shape[1] == 1:
        # With one feature, PCA would have no second component for the start.
        features = np.hstack([features, np.zeros_like(features)])
    manifold, threads = require("sklearn.manifold"), require("threadpoolctl")
    drawn = manifold.TSNE(
        perplexity=min(_PERPLEXITY, (len(features) - 1) / 3),
        init="pca",
        random_state=derive_seed(seed, "t-sne") % 2**32,
    )
    # With several threads, the order of additions changes the last digit, and the difference grows.
    with threads.threadpool_limits(limits=1):
        return np.asarray(drawn.fit_transform(features), dtype=np.float64)


def _device(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block, and each module back to its own mode."""
    mode, modes = model.training, [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # A wrapper's train() may also change modules that are not among its own.
        model.train(mode)
        for module, own in modes:
            module.training = own
