"""The networks of the model zoo: extractors and residual predictors by name."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "ARCHITECTURES",
    "PREDICTORS",
    "SPLIT_MODELS",
    "Architecture",
    "SplitArchitecture",
    "residual_predictor",
    "split_extractor",
]

# torchvision's stems divide the side by four. For smaller images this would leave single pixels to the first or
# second stage, so these images pass the same stem weights without stride.
_STRIDED_STEM_FROM = 16
_STEM_CHANNELS = 16


def _feature_layer(inputs: int, width: int, layer: str) -> nn.Sequential:
    """Build the last layer of an extractor, whose outputs are the features."""
    linear = nn.Linear(inputs, width)
    if layer == "linear":
        return nn.Sequential(linear)
    # Equation 15 of FedHKD's paper has no scale and no shift, and the printed counts leave no room for them.
    return nn.Sequential(linear, nn.ReLU() if layer == "relu" else nn.BatchNorm1d(width, affine=False))


def _mlp(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU(), *_feature_layer(200, width, layer)
    )


def _mlp_bn(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.BatchNorm1d(200), nn.ReLU()),
        *_feature_layer(200, width, layer),
    )


def _mlp4(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU()),
        *(nn.Linear(200, 200), nn.ReLU()),
        *(nn.Linear(200, 200), nn.ReLU()),
        *_feature_layer(200, width, layer),
    )


class _BidirectionalLSTM(nn.Module):
    """A bidirectional LSTM whose backward direction starts at each text's last token, not in its padding.

    Packed sequences give the same result, but on a CPU their gradient takes five times as long.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.ahead = nn.LSTM(inputs, units, batch_first=True)
        self.back = nn.LSTM(inputs, units, batch_first=True)

    def forward(self, x: Tensor, reversed_positions: Tensor) -> Tensor:
        ahead, _ = self.ahead(x)
        back, _ = self.back(_gathered(x, reversed_positions))
        return torch.cat([ahead, _gathered(back, reversed_positions)], dim=2)


def _gathered(x: Tensor, positions: Tensor) -> Tensor:
    """Return the vectors of ``[B, L, K]`` at each row's positions ``[B, L]``."""
    return x.gather(1, positions.unsqueeze(2).expand_as(x))


class _BiLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int, layer: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128, padding_idx=0)
        self.lstm1 = _BidirectionalLSTM(128, 128)
        self.lstm2 = _BidirectionalLSTM(256, 64)
        self.dense = nn.Sequential(
            *(nn.Linear(128, 1024), nn.ReLU()),
            *(nn.Linear(1024, 512), nn.ReLU()),
            *(nn.Linear(512, 256), nn.ReLU()),
            *(nn.Linear(256, 128), nn.ReLU()),
            *_feature_layer(128, width, layer),
        )
        # With torch's default weights hardly any signal of the text would pass five layers.
        for module in self.dense:
            if isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dtype != torch.int64 or tokens.dim() != 2:
            raise ValueError(f"bilstm takes int64 token ids [B, L], got {tokens.dtype} {list(tokens.shape)}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = ((tokens != 0) * (positions + 1)).amax(dim=1, keepdim=True)
        longest = max(int(lengths.max()), 1)
        tokens, positions = tokens[:, :longest], positions[:longest]
        is_token = positions < lengths
        reversed_positions = torch.where(is_token, lengths - 1 - positions, positions)
        x = self.lstm2(self.lstm1(self.embedding(tokens), reversed_positions), reversed_positions)
        pooled = x.masked_fill(~is_token.unsqueeze(2), -math.inf).amax(dim=1).masked_fill(lengths == 0, 0)
        return cast(Tensor, self.dense(pooled))


def _cnn(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    channels, height, breadth = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *_feature_layer(64 * (height // 4) * (breadth // 4), width, layer),
    )


def _lenet(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    # LeNet-5 is made for 32×32. Smaller images are padded by two on each side (28×28 then gives the same 5×5
    # maps). Below 16 the second convolution is also padded, because nothing would remain otherwise.
    channels, *sides = shape
    first, second = (2 if min(sides) < limit else 0 for limit in (32, 16))
    height, breadth = (((side - 4 + 2 * first) // 2 - 4 + 2 * second) // 2 for side in sides)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=first), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=second), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(16 * height * breadth, 120), nn.ReLU()),
        *_feature_layer(120, width, layer),
    )


def _alexnet(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    channels, height, breadth = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Dropout(), nn.Linear(256 * (height // 8) * (breadth // 8), 1024), nn.ReLU()),
        *(nn.Dropout(), *_feature_layer(1024, width, layer)),
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
            x = x[:, : out.shape[1]]  # a narrow pass has fewer channels (see slimmable.py)
        return F.relu(out + x)


def _projecting_block(inputs: int, width: int, stride: int) -> _BasicBlock:
    return _BasicBlock(inputs, width, stride, project=True)


class _Bottleneck(nn.Module):
    """A 1×1, a 3×3 and a 1×1 convolution, four times as wide at the end, and a shortcut (He et al. 2016)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


def _cifar_resnet(blocks: int) -> Callable[[Sequence[int], int, str], nn.Module]:
    def build(shape: Sequence[int], width: int, layer: str) -> nn.Module:
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
        if width != inputs or layer != "relu":
            net.add_module("neck", _feature_layer(inputs, width, layer))
        return net

    return build


def _stem(channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, _STEM_CHANNELS, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(_STEM_CHANNELS), nn.ReLU()]


def _initialise_convolutions(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def split_extractor(shape: Sequence[int], *, pooled: bool) -> tuple[nn.Module, tuple[int, int, int]]:
    """Build the extractor of FedDKC's clients for images of a shape; return it and the shape of its maps."""
    stem = nn.Sequential(*_stem(shape[0]), *([nn.MaxPool2d(2)] if pooled else []))
    _initialise_convolutions(stem)
    factor = 2 if pooled else 1
    return stem, (_STEM_CHANNELS, shape[1] // factor, shape[2] // factor)


def residual_predictor(
    blocks: Mapping[int, int],
    inputs: int,
    num_classes: int,
    block: Callable[[int, int, int], nn.Module] = _projecting_block,
) -> nn.Module:
    """Build residual stages, a mean over pixels and a ``Linear``.

    Parameters
    ----------
    blocks
        Number of blocks by width. Each new width except the first halves the sides.
    inputs
        Channels of the input.
    num_classes
        Number of logits.
    block
        Makes a block from the channels of its input, its width and its stride.
    """
    layers: list[nn.Module] = []
    before = None
    for width, count in blocks.items():
        for _ in range(count):
            stride = 2 if before not in (None, width) else 1
            layers.append(block(inputs, width, stride))
            inputs, before = width * getattr(layers[-1], "expansion", 1), width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    _initialise_convolutions(net)
    return net


def _resnet18(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    net = _torchvision("resnet18")(weights=None)
    if shape[0] != 3:
        net.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    return _backbone(net, net.conv1, shape, width, layer)


def _shufflenet(shape: Sequence[int], width: int, layer: str) -> nn.Module:
    net = _torchvision("shufflenet_v2_x1_0")(weights=None)
    if shape[0] != 3:
        net.conv1[0] = nn.Conv2d(shape[0], 24, 3, stride=2, padding=1, bias=False)
    return _backbone(net, net.conv1[0], shape, width, layer)


def _backbone(net: Any, stem: nn.Conv2d, shape: Sequence[int], width: int, layer: str) -> nn.Module:
    """Replace a torchvision net's last layer by a feature layer; remove its stem's strides for small images."""
    inputs = net.fc.in_features
    net.fc = nn.Identity()
    if min(shape[1:]) < _STRIDED_STEM_FROM:
        stem.stride = (1, 1)
        net.maxpool = nn.Identity()
    return nn.Sequential(OrderedDict([("backbone", net), ("neck", _feature_layer(inputs, width, layer))]))


def _torchvision(name: str) -> Callable[..., Any]:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"{name} is torchvision's, which is not installed: pip install 'flwr-kd[simulation]'"
        ) from error
    return cast(Callable[..., Any], getattr(models, name))


@dataclass(frozen=True)
class Architecture:
    """How an extractor is built.

    Attributes
    ----------
    extractor
        Builds the extractor from the shape of one sample (the number of token ids in its place where
        `takes_tokens`), the number of features, and the kind of its feature layer.
    feature_dim
        Default number of features.
    smallest_side
        Least height and width of an image; None for models that take other inputs.
    takes_tokens
        Whether inputs are token ids.
    feature_layer
        How the extractor ends where nothing else is chosen: one of :data:`flwr_kd.catalogue.FEATURE_LAYERS`.
    """

    extractor: Callable[[Sequence[int], int, str], nn.Module]
    feature_dim: int
    smallest_side: int | None
    takes_tokens: bool = False
    feature_layer: str = "relu"


ARCHITECTURES = {
    "alexnet": Architecture(_alexnet, 512, 8),
    "bilstm": Architecture(
        lambda sizes, width, layer: _BiLSTM(sizes[0], width, layer), 64, None, takes_tokens=True
    ),
    "cnn": Architecture(_cnn, 512, 4),
    "lenet": Architecture(_lenet, 84, 4),
    "mlp": Architecture(_mlp, 64, None),
    "mlp-bn": Architecture(_mlp_bn, 64, None),
    "mlp4": Architecture(_mlp4, 200, None),
    "resnet18": Architecture(_resnet18, 64, 8, feature_layer="linear"),
    "resnet32": Architecture(_cifar_resnet(5), 64, 4),
    "resnet8": Architecture(_cifar_resnet(1), 64, 4),
    "shufflenet": Architecture(_shufflenet, 32, 8, feature_layer="linear"),
}
"""By name, the architectures of feature extractors."""

_BLOCKS: dict[str, dict[int, int]] = {
    "resnet2": {},
    "resnet4": {16: 1},
    "resnet6": {16: 1, 32: 1},
    "resnet10": {16: 2, 32: 2},
    "resnet12": {16: 2, 32: 3},
}


@dataclass(frozen=True)
class SplitArchitecture:
    """How a model of FedDKC's clients is built.

    Attributes
    ----------
    blocks
        Number of residual blocks in the predictor by width.
    pooled
        Whether the extractor ends in 2×2 max pooling.
    """

    blocks: Mapping[int, int]
    pooled: bool


SPLIT_MODELS = {
    f"{name}{suffix}": SplitArchitecture(blocks, pooled=bool(suffix))
    for name, blocks in _BLOCKS.items()
    for suffix in ("", "-pooled")
}
"""Models of FedDKC's clients."""

PREDICTORS: dict[str, tuple[Callable[[int, int, int], nn.Module], dict[int, int]]] = {
    "bottleneck": (_Bottleneck, {16: 2, 32: 3, 64: 1}),
    "basic": (_projecting_block, {16: 3, 32: 3, 64: 3}),
}
"""The server's models for maps: their block, and the number of blocks by width."""
