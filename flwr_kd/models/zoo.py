"""The networks that the papers use, by name: for small images of any size, for texts and for tables."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flwr_kd.checks import is_whole_number
from flwr_kd.models.feature import FeatureModel, SplitModel, check_size

__all__ = ["MODELS", "build_model", "build_predictor"]

# torchvision's stems divide the side by four. Below this side that leaves single pixels to the first stage
# or the second: such images go through the same stem weights without any stride.
_STRIDED_STEM_FROM = 16


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    feature_dim: int | None = None,
    vocabulary: int | None = None,
) -> FeatureModel | SplitModel:
    """Build a model with random weights that depend on nothing but the arguments.

    ============ ====================================================== ======== =============
    name         extractor                                              `D`      smallest side
    ============ ====================================================== ======== =============
    alexnet      AlexNet's five convolutions with small kernels and
                 strides, a layer of 1024, dropout                      512      8
    bilstm       FedHEAD's for texts, see below; takes token ids        64       none
    cnn          McMahan et al. 2017: two 5×5 convolutions, 32 and 64   512      4
    lenet        LeNet-5 with ReLU and max pooling                      84       4
    mlp          a hidden layer of 200; takes input of any shape        64       any
    mlp4         FedHEAD's for network traffic: three hidden layers of
                 200; takes input of any shape                          200      any
    resnet18     torchvision's, its stem included                       64       8
    resnet32     He et al. 2016 for CIFAR: 3 stages of 5 blocks         64       4
    resnet8      the same with 1 block in each stage                    64       4
    shufflenet   torchvision's ShuffleNetV2 x1.0, its stem included     32       8
    ============ ====================================================== ======== =============

    FedDKC's clients (its Table 3) are split after the stem: ``resnet2``, ``resnet4``, ``resnet6``, ``resnet10``,
    ``resnet12``, from side 4. Extractor: 3×3 convolution with 16 channels, BatchNorm, ReLU, 2×2 max pooling.
    Predictor: no block; 1×16; 1×16 and 1×32; 2×16 and 2×32; 2×16 and 3×32, each block two 3×3 convolutions with
    a 1×1 convolution as shortcut where the width changes; mean over pixels; ``Linear``. Features are maps
    ``[16, H/2, W/2]``, and `feature_dim` must be None.

    ``bilstm`` takes int64 token ids ``[B, L]``, 0 after a text's end: an embedding of 128, two bidirectional LSTMs
    of 128 and 64 units per direction, the maximum over the text's tokens (0 for a text without any), layers of
    1024, 512, 256 and 128 with ReLU. How much padding follows a text makes no difference. The layers after the
    maximum have weights as in He et al. 2015; with torch's own they learn very slowly.

    The head of all others is one ``Linear(D, C)``. Before it comes a ``Linear`` to ``D`` and a ReLU (the
    "feature layer"): features are never negative. Only ``resnet8`` and ``resnet32`` with ``feature_dim`` 64
    or unset add no such layer: there the pooled channels, after the last block's ReLU, are the features.

    Channels: the first convolution has as many input channels as the image, so that a 1-channel ``resnet18``
    has fewer parameters than the printed 3-channel count. Sides below 16: ``resnet18`` and ``shufflenet``
    keep all weights, but their stem has stride 1 and does not pool.

    Parameters
    ----------
    name
        One of `MODELS`.
    input_shape
        Shape of one example without the batch: ``(channels, height, width)``; ``(length,)`` for ``bilstm``; any
        shape for ``mlp`` and ``mlp4``.
    num_classes
        ``C``, at least 2.
    seed
        In ``[0, 2**63)``. The same seed gives the same weights.
    feature_dim
        ``D``, at least 1; the table's where None.
    vocabulary
        Number of token ids, those of padding and unknown words included, at least 2. Only ``bilstm`` takes it,
        and needs it: None or 0 for all others.

    Returns
    -------
    FeatureModel or SplitModel
        In training mode, on the CPU, in the default dtype.

    Raises
    ------
    TypeError
        If a size or the seed is not an int.
    ValueError
        If the name is unknown, a number is out of its range, or the model cannot take the input's shape, or
        token ids, or anything else.
    ImportError
        If ``resnet18`` or ``shufflenet`` is asked for and torchvision is not installed.

    Notes
    -----
    The layers initialise themselves as they are written in torch and torchvision, but from a private
    generator: torch's global one is neither read nor changed, and threads may build at the same time.
    Nothing is ever downloaded.

    With BatchNorm, a training batch of one raises in torch where a stage has shrunk to one pixel
    (``resnet18`` and ``shufflenet`` at sides up to 32): drop or merge a last batch of one. ``alexnet`` in
    training mode draws its dropout masks from torch's global generator; no model draws in evaluation mode.

    Examples
    --------
    >>> model = build_model("lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)
    >>> model.features(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 84])
    """
    if name not in MODELS:
        raise ValueError(f"name must be one of {', '.join(MODELS)}, got {name!r}")
    smallest_side = 4 if name in _SPLIT else _BUILDERS[name].smallest_side
    shape = _check_shape(name, smallest_side, input_shape)
    _check_vocabulary(name, vocabulary, shape)
    check_size("num_classes", num_classes, 2)
    check_size("seed", seed, 0, 2**63 - 1)
    if name in _SPLIT:
        if feature_dim is not None:
            raise ValueError(f"{name}'s features are maps: feature_dim must be None, got {feature_dim}")
        with torch.device("cpu"), _DrawFrom(torch.Generator().manual_seed(seed)):
            stem = nn.Sequential(*_stem(shape[0]), nn.MaxPool2d(2))
            _initialise_convolutions(stem)
            maps = (_STEM_CHANNELS, shape[1] // 2, shape[2] // 2)
            return SplitModel(
                stem, _residual_predictor(_SPLIT[name], maps[0], num_classes), feature_shape=maps
            )
    spec = _BUILDERS[name]
    width = spec.feature_dim
    if feature_dim is not None:
        check_size("feature_dim", feature_dim, 1)
        width = feature_dim
    with torch.device("cpu"), _DrawFrom(torch.Generator().manual_seed(seed)):
        extractor = spec.extractor((vocabulary,) if vocabulary else shape, width)
        return FeatureModel(extractor, nn.Linear(width, num_classes))


def build_predictor(feature_shape: tuple[int, ...], *, num_classes: int, seed: int) -> nn.Module:
    """Build a large predictor for features that others extract: the server's model of FedGKT and FedDKC.

    For maps ``(K, H, W)`` the residual stages of ResNet20, 3 blocks each of 16, 32 and 64 channels, a mean over
    pixels and a ``Linear``: 272,010 parameters for 16 channels and 10 classes. For features of any other shape
    two hidden layers of 256.

    Parameters
    ----------
    feature_shape
        Shape of one sample's features.
    num_classes
        ``C``, at least 2.
    seed
        In ``[0, 2**63)``.

    Raises
    ------
    TypeError
        If a size or the seed is not an int.
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> build_predictor((16, 4, 4), num_classes=10, seed=0)(torch.zeros(2, 16, 4, 4)).shape
    torch.Size([2, 10])
    """
    shape = _check_shape("a predictor", None, feature_shape, "feature_shape")
    check_size("num_classes", num_classes, 2)
    check_size("seed", seed, 0, 2**63 - 1)
    with torch.device("cpu"), _DrawFrom(torch.Generator().manual_seed(seed)):
        if len(shape) == 3:
            return _residual_predictor({16: 3, 32: 3, 64: 3}, shape[0], num_classes)
        hidden = [nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, num_classes))


class _DrawFrom(TorchFunctionMode):
    """Let layers initialise themselves as torch and torchvision wrote it, but from a private generator.

    Layers take no generator, and forking the global one would not keep threads apart. A mode is the thread's
    own.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # functions of nn.init arrive whole and always name their generator, here None
        draws = "generator" in kwargs or func in (Tensor.uniform_, Tensor.normal_)
        if draws and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


def _feature_layer(inputs: int, width: int) -> nn.Sequential:
    """Make the last layer of an extractor: the one place that says what a feature is."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU())


def _mlp(shape: Sequence[int], width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU(), *_feature_layer(200, width)
    )


def _mlp4(shape: Sequence[int], width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU()),
        *(nn.Linear(200, 200), nn.ReLU()),
        *(nn.Linear(200, 200), nn.ReLU()),
        *_feature_layer(200, width),
    )


class _BothWays(nn.Module):
    """A bidirectional LSTM whose way back begins at each text's own last token, not in its padding.

    Packed sequences would do the same, but on a CPU their backward pass takes five times as long.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.ahead = nn.LSTM(inputs, units, batch_first=True)
        self.back = nn.LSTM(inputs, units, batch_first=True)

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        ahead, _ = self.ahead(x)
        back, _ = self.back(_at(x, turned))
        return torch.cat([ahead, _at(back, turned)], dim=2)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """Take each row's vectors of ``[B, L, K]`` at its own positions ``[B, L]``."""
    return x.gather(1, positions.unsqueeze(2).expand_as(x))


class _BiLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128, padding_idx=0)
        self.lstm1 = _BothWays(128, 128)
        self.lstm2 = _BothWays(256, 64)
        self.dense = nn.Sequential(
            *(nn.Linear(128, 1024), nn.ReLU()),
            *(nn.Linear(1024, 512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.ReLU()),
            *(nn.Linear(256, 128), nn.ReLU()),
            *_feature_layer(128, width),
        )
        # Through five layers with torch's own weights, next to nothing of the text would come out.
        for layer in self.dense:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dtype != torch.int64 or tokens.dim() != 2:
            raise ValueError(f"bilstm takes int64 token ids [B, L], got {tokens.dtype} {list(tokens.shape)}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = ((tokens != 0) * (positions + 1)).amax(dim=1, keepdim=True)
        longest = max(int(lengths.max()), 1)
        tokens, positions = tokens[:, :longest], positions[:longest]
        real = positions < lengths
        turned = torch.where(real, lengths - 1 - positions, positions)
        x = self.lstm2(self.lstm1(self.embedding(tokens), turned), turned)
        pooled = x.masked_fill(~real.unsqueeze(2), -math.inf).amax(dim=1).masked_fill(lengths == 0, 0)
        return cast(Tensor, self.dense(pooled))


def _cnn(shape: Sequence[int], width: int) -> nn.Module:
    channels, height, breadth = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *_feature_layer(64 * (height // 4) * (breadth // 4), width),
    )


def _lenet(shape: Sequence[int], width: int) -> nn.Module:
    # LeNet-5 is made for 32×32. Smaller images are padded by two all around (28×28 then gives the same 5×5
    # maps); below 16 the second convolution is padded too, or it would leave nothing.
    channels, *sides = shape
    first, second = (2 if min(sides) < limit else 0 for limit in (32, 16))
    height, breadth = (((side - 4 + 2 * first) // 2 - 4 + 2 * second) // 2 for side in sides)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=first), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=second), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(16 * height * breadth, 120), nn.ReLU()),
        *_feature_layer(120, width),
    )


def _alexnet(shape: Sequence[int], width: int) -> nn.Module:
    channels, height, breadth = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Dropout(), nn.Linear(256 * (height // 8) * (breadth // 8), 1024), nn.ReLU()),
        *(nn.Dropout(), *_feature_layer(1024, width)),
    )


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016).

    Where the size changes, the shortcut has no parameters (option A), or is a 1×1 convolution (option B).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, *, project: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.added = outputs - inputs
        self.shortcut: nn.Module | None = None
        if project and self.added:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.added or self.stride != 1:
            before = self.added // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.added - before))
            x = x[:, : out.shape[1]]  # fewer in a narrow pass (see slimmable.py)
        return F.relu(out + x)


def _cifar_resnet(blocks: int) -> Callable[[Sequence[int], int], nn.Module]:
    def build(shape: Sequence[int], width: int) -> nn.Module:
        stages: list[tuple[str, nn.Module]] = []
        inputs = 16
        for number, outputs in enumerate((16, 32, 64), start=1):
            first = _BasicBlock(inputs, outputs, stride=1 if number == 1 else 2)
            rest = [_BasicBlock(outputs, outputs, stride=1) for _ in range(blocks - 1)]
            stages.append((f"stage{number}", nn.Sequential(first, *rest)))
            inputs = outputs
        stem = nn.Sequential(*_stem(shape[0]))
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        net = nn.Sequential(OrderedDict([("stem", stem), *stages, ("pool", pool)]))
        _initialise_convolutions(net)
        if width != inputs:
            net.add_module("neck", _feature_layer(inputs, width))
        return net

    return build


def _stem(channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, _STEM_CHANNELS, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(_STEM_CHANNELS), nn.ReLU()]


def _initialise_convolutions(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _residual_predictor(blocks: Mapping[int, int], inputs: int, num_classes: int) -> nn.Module:
    """Make stages with so many blocks per width; each new width but the first halves the sides."""
    layers: list[nn.Module] = []
    for width, count in blocks.items():
        for _ in range(count):
            stride = 2 if layers and inputs != width else 1
            layers.append(_BasicBlock(inputs, width, stride, project=True))
            inputs = width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    _initialise_convolutions(net)
    return net


def _resnet18(shape: Sequence[int], width: int) -> nn.Module:
    net = _torchvision("resnet18")(weights=None)
    if shape[0] != 3:
        net.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return _backbone(net, net.conv1, shape, width)


def _shufflenet(shape: Sequence[int], width: int) -> nn.Module:
    net = _torchvision("shufflenet_v2_x1_0")(weights=None)
    if shape[0] != 3:
        net.conv1[0] = nn.Conv2d(shape[0], 24, 3, stride=2, padding=1, bias=False)
    return _backbone(net, net.conv1[0], shape, width)


def _backbone(net: Any, stem: nn.Conv2d, shape: Sequence[int], width: int) -> nn.Module:
    """Replace a torchvision net's last layer by ours, and spare small images the strides of its stem."""
    inputs = net.fc.in_features
    net.fc = nn.Identity()
    if min(shape[1:]) < _STRIDED_STEM_FROM:
        stem.stride = (1, 1)
        net.maxpool = nn.Identity()
    return nn.Sequential(OrderedDict([("backbone", net), ("neck", _feature_layer(inputs, width))]))


def _torchvision(name: str) -> Callable[..., Any]:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"{name} is torchvision's, which is not installed: pip install 'flwr-kd[simulation]'"
        ) from error
    return cast(Callable[..., Any], getattr(models, name))


@dataclass(frozen=True)
class _Spec:
    extractor: Callable[[Sequence[int], int], nn.Module]
    feature_dim: int
    # None: not a model of images only
    smallest_side: int | None
    # The extractor is then made from their number, in place of the shape.
    takes_tokens: bool = False


_BUILDERS = {
    "alexnet": _Spec(_alexnet, 512, 8),
    "bilstm": _Spec(lambda sizes, width: _BiLSTM(sizes[0], width), 64, None, takes_tokens=True),
    "cnn": _Spec(_cnn, 512, 4),
    "lenet": _Spec(_lenet, 84, 4),
    "mlp": _Spec(_mlp, 64, None),
    "mlp4": _Spec(_mlp4, 200, None),
    "resnet18": _Spec(_resnet18, 64, 8),
    "resnet32": _Spec(_cifar_resnet(5), 64, 4),
    "resnet8": _Spec(_cifar_resnet(1), 64, 4),
    "shufflenet": _Spec(_shufflenet, 32, 8),
}

_STEM_CHANNELS = 16
# FedDKC's clients: residual blocks of the predictor by width.
_SPLIT: dict[str, dict[int, int]] = {
    "resnet2": {},
    "resnet4": {16: 1},
    "resnet6": {16: 1, 32: 1},
    "resnet10": {16: 2, 32: 2},
    "resnet12": {16: 2, 32: 3},
}

MODELS: tuple[str, ...] = tuple(sorted([*_BUILDERS, *_SPLIT]))
"""Names that `build_model` takes."""


def _check_shape(
    name: str, smallest: int | None, shape: Sequence[int], argument: str = "input_shape"
) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(f"{argument} must be a tuple of ints, got {shape!r}")
    for size in shape:
        if not is_whole_number(size):
            raise TypeError(f"{argument} must be a tuple of ints, got {shape!r}")
    sizes = tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{argument} must have at least one size and all at least 1, got {sizes}")
    if smallest is None:
        return sizes
    if len(sizes) != 3:
        raise ValueError(f"{name} takes an input_shape (channels, height, width), got {sizes}")
    if min(sizes[1:]) < smallest:
        raise ValueError(
            f"{name} cannot take {sizes[1]}x{sizes[2]} images: its smallest is {smallest}x{smallest}"
        )
    return sizes


def _check_vocabulary(name: str, vocabulary: int | None, shape: tuple[int, ...]) -> None:
    if vocabulary is not None:
        check_size("vocabulary", vocabulary, 0)
    if name in _SPLIT or not _BUILDERS[name].takes_tokens:
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
