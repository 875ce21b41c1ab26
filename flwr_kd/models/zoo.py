"""The models that the papers use, by name: for small images of any size, for texts and for tables."""

from __future__ import annotations

import math

import torch
from torch import nn

from flwr_kd import catalogue
from flwr_kd.models.checks import check_shape, check_size
from flwr_kd.models.feature import FeatureModel, SplitModel
from flwr_kd.models.initialisation import DrawFrom
from flwr_kd.models.networks import (
    ARCHITECTURES,
    PREDICTORS,
    SPLIT_MODELS,
    residual_predictor,
    split_extractor,
)

__all__ = ["MODELS", "build_model", "build_predictor"]

MODELS: tuple[str, ...] = tuple(catalogue.MODELS)
"""Names that `build_model` accepts; `flwr_kd.catalogue.MODELS` has a line about each."""


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    feature_dim: int | None = None,
    feature_layer: str | None = None,
    vocabulary: int | None = None,
) -> FeatureModel | SplitModel:
    """Build a model with random weights that depend only on the arguments.

    ============ ====================================================== ======== =============
    name         extractor                                              `D`      smallest side
    ============ ====================================================== ======== =============
    alexnet      AlexNet's five convolutions with small kernels and
                 strides, a layer of 1024, dropout                      512      8
    bilstm       FedHEAD's for texts, see below; takes token ids        64       none
    cnn          McMahan et al. 2017: two 5×5 convolutions, 32 and 64   512      4
    lenet        LeNet-5 with ReLU and max pooling                      84       4
    mlp          a hidden layer of 200; takes input of any shape        64       any
    mlp-bn       as mlp, with BatchNorm behind the hidden layer         64       any
    mlp4         FedHEAD's for network traffic: three hidden layers of
                 200; takes input of any shape                          200      any
    resnet18     torchvision's, with its stem                           64       8
    resnet32     He et al. 2016 for CIFAR: 3 stages of 5 blocks         64       4
    resnet8      as resnet32, with 1 block in each stage                64       4
    shufflenet   torchvision's ShuffleNetV2 x1.0, with its stem         32       8
    ============ ====================================================== ======== =============

    The models of FedDKC's clients (its Table 3) are split after the stem: ``resnet2``, ``resnet4``, ``resnet6``,
    ``resnet10``, ``resnet12``, for sides from 4. Their extractor is a 3×3 convolution with 16 channels, BatchNorm
    and ReLU. Their predictors have no block; 1×16; 1×16 and 1×32; 2×16 and 2×32; 2×16 and 3×32 blocks of two 3×3
    convolutions, with a 1×1 convolution as shortcut where the width changes; then the mean over pixels and a
    ``Linear``. Features are maps ``[16, H, W]``. The light ones, ``resnet2-pooled`` and so on, have the same
    parameters and 2×2 max pooling at the end of the extractor: maps ``[16, H/2, W/2]``, a quarter of the bytes
    and of the operations. The table's operations are those without pooling, though the paper's text names it. Of
    all these `feature_dim` and `feature_layer` must be None.

    ``bilstm`` takes int64 token ids ``[B, L]``, with 0 after a text's end: an embedding of 128, two bidirectional
    LSTMs of 128 and 64 units per direction, the maximum over the text's tokens (0 for a text without any), and
    layers of 1024, 512, 256 and 128 with ReLU. The amount of padding after a text does not change the result. The
    layers after the maximum are initialised by He et al. 2015, since they learn very slowly from torch's default.

    The head of all other models is one ``Linear(D, C)``. The "feature layer" precedes it: a ``Linear`` to ``D``
    and a ReLU, so that features are never negative. In ``resnet18`` and ``shufflenet``, FedHKD's models, it is
    the ``Linear`` alone, so that features have both signs. `feature_layer` chooses otherwise, for any of these
    models. Only ``resnet8`` and ``resnet32`` with ``feature_dim`` 64 or unset have no such layer, unless
    `feature_layer` asks for one with signed features: theirs are the pooled channels, after the last block's
    ReLU.

    The first convolution has as many input channels as the image, so that a ``resnet18`` for 1 channel has fewer
    parameters than the printed count for 3. With a side below 16, ``resnet18`` and ``shufflenet`` keep all weights,
    but their stem has stride 1 and does not pool.

    Parameters
    ----------
    name
        One of `MODELS`.
    input_shape
        Shape of one sample without the batch: ``(channels, height, width)``; ``(length,)`` for ``bilstm``; any
        shape for ``mlp``, ``mlp-bn`` and ``mlp4``.
    num_classes
        ``C``, at least 2.
    seed
        In ``[0, 2**63)``. The same seed gives the same weights.
    feature_dim
        ``D``, at least 1; the value of the table where None.
    feature_layer
        How the extractor ends: ``"relu"``, ``"linear"`` (no activation), or ``"batchnorm"``, a BatchNorm without
        scale and shift after the ``Linear``, as in equation 15 of FedHKD's paper. The model's own if None. The
        number of parameters does not depend on it.
    vocabulary
        Number of token ids, including those of padding and unknown words, at least 2. Required for ``bilstm``;
        None or 0 for all others.

    Returns
    -------
    FeatureModel or SplitModel
        In training mode, on the CPU, in the default dtype.

    Raises
    ------
    TypeError
        If a size or the seed is not an int.
    ValueError
        If a name is unknown, a number is out of its range, or the model does not accept the input's shape or
        kind (numbers or token ids).
    ImportError
        If ``resnet18`` or ``shufflenet`` is requested and torchvision is not installed.

    Notes
    -----
    The layers initialise themselves with the code of torch and torchvision, but from a private generator: torch's
    global one is neither read nor changed, and threads may build models at the same time. Nothing is downloaded.

    With BatchNorm, a training batch of one sample raises in torch where a stage has shrunk to one pixel
    (``resnet18`` and ``shufflenet`` at sides up to 32): drop or merge a last batch of one. ``alexnet`` in
    training mode draws its dropout masks from torch's global generator. No model draws in eval mode.

    Examples
    --------
    >>> model = build_model("lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)
    >>> model.features(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 84])
    """
    if name not in MODELS:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}")
    smallest_side = 4 if name in SPLIT_MODELS else ARCHITECTURES[name].smallest_side
    shape = check_shape(name, smallest_side, input_shape)
    _check_vocabulary(name, vocabulary, shape)
    check_size("num_classes", num_classes, 2)
    check_size("seed", seed, 0, 2**63 - 1)
    if feature_layer is not None and feature_layer not in catalogue.FEATURE_LAYERS:
        raise ValueError(
            f"feature_layer must be one of {', '.join(catalogue.FEATURE_LAYERS)}, got {feature_layer!r}"
        )
    if name in SPLIT_MODELS:
        for option, value in (("feature_dim", feature_dim), ("feature_layer", feature_layer)):
            if value is not None:
                raise ValueError(f"{name}'s features are maps: {option} must be None, got {value}")
        split = SPLIT_MODELS[name]
        with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
            extractor, maps = split_extractor(shape, pooled=split.pooled)
            predictor = residual_predictor(split.blocks, maps[0], num_classes)
            return SplitModel(extractor, predictor, feature_shape=maps)
    architecture = ARCHITECTURES[name]
    width = architecture.feature_dim if feature_dim is None else check_size("feature_dim", feature_dim, 1)
    layer = feature_layer or architecture.feature_layer
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        extractor = architecture.extractor((vocabulary,) if vocabulary else shape, width, layer)
        return FeatureModel(extractor, nn.Linear(width, num_classes))


def build_predictor(
    feature_shape: tuple[int, ...], *, num_classes: int, seed: int, kind: str = "bottleneck"
) -> nn.Module:
    """Build a large predictor for the features of clients: the server's model of FedGKT and FedDKC.

    For maps ``(K, H, W)`` it has three residual stages, a mean over pixels and a ``Linear``. For features of any
    other shape it has two hidden layers of 256.

    Parameters
    ----------
    feature_shape
        Shape of one sample's features.
    num_classes, seed
        As in :func:`build_model`.
    kind
        Of a predictor for maps. ``"bottleneck"``: 2, 3 and 1 bottleneck blocks (a 1×1, a 3×3 and a 1×1
        convolution) with 16, 32 and 64 planes and an expansion of 4. For 16 channels and 10 classes it has the
        167.31 K parameters that FedDKC's paper prints (167,306). ``"basic"``: 3 blocks of two 3×3 convolutions
        each with 16, 32 and 64 channels, the stages of ResNet20, with 272,010 parameters.

    Raises
    ------
    TypeError
        If a size or the seed is not an int.
    ValueError
        If the kind is unknown or a number is out of its range.

    Notes
    -----
    On maps 16×32×32 the convolutions and the ``Linear`` of ``"bottleneck"`` need 33.3 M multiply-adds. With 2
    operations per element of a BatchNorm and 1 of a ReLU they are 34.8 M; the paper prints 34.58 M, and the same
    way of counting gives the numbers of its client models without pooling.

    Examples
    --------
    >>> build_predictor((16, 4, 4), num_classes=10, seed=0)(torch.zeros(2, 16, 4, 4)).shape
    torch.Size([2, 10])
    """
    shape = check_shape("a predictor", None, feature_shape, "feature_shape")
    check_size("num_classes", num_classes, 2)
    check_size("seed", seed, 0, 2**63 - 1)
    if kind not in PREDICTORS:
        raise ValueError(f"kind must be one of {', '.join(PREDICTORS)}, got {kind!r}")
    with torch.device("cpu"), DrawFrom(torch.Generator().manual_seed(seed)):
        if len(shape) == 3:
            block, blocks = PREDICTORS[kind]
            return residual_predictor(blocks, shape[0], num_classes, block)
        hidden = [nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, num_classes))


def _check_vocabulary(name: str, vocabulary: int | None, shape: tuple[int, ...]) -> None:
    if vocabulary is not None:
        check_size("vocabulary", vocabulary, 0)
    if name in SPLIT_MODELS or not ARCHITECTURES[name].takes_tokens:
        if vocabulary:
            raise ValueError(
                f"{name} takes numbers and no token ids: vocabulary must be None or 0, got {vocabulary}"
            )
        return
    if vocabulary is None or vocabulary < 2:
        raise ValueError(
            f"{name} takes token ids: vocabulary must be their number, at least 2, got {vocabulary}"
        )
    if len(shape) != 1:
        raise ValueError(f"{name} takes an input_shape (length,), got {shape}")
