"""Slim sub-networks that share their model's weights: the first channels of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from flwr_kd.checks import number
from flwr_kd.models.checks import type_name
from flwr_kd.models.feature import FeatureModel, SplitModel
from flwr_kd.models.head import HeadTap, final_linear
from flwr_kd.models.views import NarrowViews

__all__ = [
    "SlimmableBatchNorm1d",
    "SlimmableBatchNorm2d",
    "SlimmableConv2d",
    "SlimmableLinear",
    "count_flops",
    "make_slimmable",
    "slimmed",
]


def _kept(width: float, channels: int) -> int:
    # 0.07 * 100 is 7.000000000000001 in floating point, but must keep 7 channels.
    return max(1, math.ceil(width * channels - 1e-9))


class SlimmableConv2d(nn.Conv2d):
    """A ``Conv2d`` that can run narrow: from its input's channels to the first ``ceil(width · C_out)`` channels.

    At ``width`` 1 it equals its parent, to the last bit. Below 1, a depthwise convolution (one group per input
    channel) has as many output channels as input channels, times its multiplier. Other groups are not supported.

    Attributes
    ----------
    width
        Share of the output channels, set by :func:`slimmed`.

    Examples
    --------
    >>> layer = SlimmableConv2d(4, 6, 3)
    >>> layer.width = 0.5
    >>> layer(torch.zeros(1, 2, 5, 5)).shape
    torch.Size([1, 3, 3, 3])
    """

    width: float = 1.0

    @property
    def _depthwise(self) -> bool:
        return self.groups == self.in_channels > 1

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[B, K, H, W]`` to ``[B, K', H', W']``; the batch axis may be missing, as in ``Conv2d``."""
        if self.width == 1.0:
            return super().forward(input)
        x = input
        channels = x.shape[-3]
        if self._depthwise:
            weight = self.weight[: self.out_channels // self.in_channels * channels]
        else:
            weight = self.weight[: _kept(self.width, self.out_channels), :channels]
        bias = None if self.bias is None else self.bias[: len(weight)]
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        groups = channels if self._depthwise else self.groups
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, groups)


class SlimmableLinear(nn.Linear):
    """A ``Linear`` that can run narrow: from its input's features to the first ``ceil(width · D_out)`` features.

    At ``width`` 1 it equals its parent, to the last bit.

    Attributes
    ----------
    width
        Share of the outputs, set by :func:`slimmed`.
    whole
        If true, all outputs are kept at any width. This is so for the layer whose outputs are the logits.

    Examples
    --------
    >>> layer = SlimmableLinear(4, 6)
    >>> layer.width = 0.5
    >>> layer(torch.zeros(1, 2)).shape
    torch.Size([1, 3])
    """

    width: float = 1.0
    whole: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., D']``."""
        if self.width == 1.0:
            return super().forward(input)
        out = self.out_features if self.whole else _kept(self.width, self.out_features)
        bias = None if self.bias is None else self.bias[:out]
        return F.linear(input, self.weight[:out, : input.shape[-1]], bias)


class SlimmableBatchNorm2d(nn.BatchNorm2d):
    """A ``BatchNorm2d`` that can run narrow: on its input's channels, with the statistics of the batch.

    At ``width`` 1 it equals its parent, to the last bit. Below 1, the running statistics belong to another
    network, and are neither updated, nor used in eval mode. The exception is a batch with a single value per
    channel (one sample of one pixel), which has no statistics: the running ones are used, in both modes. Without
    running statistics such a batch raises ``ValueError``, as in torch.

    Attributes
    ----------
    width
        Below 1 in a narrow pass, set by :func:`slimmed`.

    Examples
    --------
    >>> layer = SlimmableBatchNorm2d(4).eval()
    >>> layer.width = 0.5
    >>> layer(torch.ones(3, 2, 1, 1)).abs().max().item()
    0.0
    """

    width: float = 1.0

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps ``[B, K, H, W]``."""
        return super().forward(input) if self.width == 1.0 else _narrow_norm(self, input)


class SlimmableBatchNorm1d(nn.BatchNorm1d):
    """A ``BatchNorm1d`` that can run narrow, like :class:`SlimmableBatchNorm2d`.

    Attributes
    ----------
    width
        Below 1 in a narrow pass, set by :func:`slimmed`.

    Examples
    --------
    >>> layer = SlimmableBatchNorm1d(4)
    >>> layer.width = 0.5
    >>> layer(torch.ones(3, 2)).shape, layer.num_batches_tracked.item()
    (torch.Size([3, 2]), 0)
    """

    width: float = 1.0

    def forward(self, input: Tensor) -> Tensor:
        """Normalise features ``[B, K]`` or ``[B, K, L]``."""
        return super().forward(input) if self.width == 1.0 else _narrow_norm(self, input)


def _narrow_norm(norm: SlimmableBatchNorm1d | SlimmableBatchNorm2d, x: Tensor) -> Tensor:
    norm._check_input_dim(x)
    channels = x.shape[1]

    def first(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:channels]

    mean, variance = first(norm.running_mean), first(norm.running_var)
    if mean is None or x.numel() > channels:  # more than one value per channel
        return F.batch_norm(x, None, None, first(norm.weight), first(norm.bias), True, 0.0, norm.eps)
    return F.batch_norm(x, mean, variance, first(norm.weight), first(norm.bias), False, 0.0, norm.eps)


_LAYERS = (SlimmableConv2d, SlimmableLinear, SlimmableBatchNorm2d, SlimmableBatchNorm1d)
_SLIM: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: SlimmableConv2d,
    nn.Linear: SlimmableLinear,
    nn.BatchNorm2d: SlimmableBatchNorm2d,
    nn.BatchNorm1d: SlimmableBatchNorm1d,
    **{layer: layer for layer in _LAYERS},
}
# These layers depend on the number of channels even without parameters.
_FIXED = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def make_slimmable(model: nn.Module) -> nn.Module:
    """Enable a classifier to run narrow, in place; its full pass does not change.

    The class of each ``Conv2d``, ``Linear``, ``BatchNorm2d`` and ``BatchNorm1d`` is replaced by its slimmable
    subclass. Parameters, hooks, optimisers and the names, shapes and order in the state stay the same, and
    outside of :func:`slimmed` the model computes the same outputs, to the last bit. Inside, each layer has only
    the first of its output channels, and accepts as many input channels as it gets. Sums of branches, channel
    shuffles and ``Flatten`` (channels first) therefore combine the same channels, without a change in the model's
    code. The ``Linear`` whose outputs are the logits keeps all of them.

    Recurrent layers, embeddings and other layers with parameters stay whole. They must be registered before the
    first layer that is narrowed.

    Parameters
    ----------
    model
        Any model whose logits come from a ``Linear``: a :class:`FeatureModel`, or an argument or result of
        :func:`as_feature_model`. It may already be slimmable.

    Returns
    -------
    nn.Module
        `model` itself.

    Raises
    ------
    TypeError
        If `model` is not a module.
    ValueError
        If the model does not end in a ``Linear``, or has a module for which a narrow pass is not defined: grouped
        convolutions that are not depthwise, GroupNorm and LayerNorm, other kinds of convolution and BatchNorm,
        subclasses by users, attention, parameters outside of layers. The text names the module. The model is then
        unchanged.

    Notes
    -----
    A flattening view whose code contains the number of channels, such as ``x.view(-1, 16 * 5 * 5)``, flattens what
    there is. A model whose code reads its layers' weights, or contains numbers of channels elsewhere, is not
    detected: torch raises in its narrow pass.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> x = torch.ones(2, 4)
    >>> full = net(x)
    >>> torch.equal(make_slimmable(net)(x), full)
    True
    >>> with slimmed(net, 0.5):
    ...     net[0](x).shape, net(x).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    >>> make_slimmable(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    Traceback (most recent call last):
        ...
    ValueError: '1' (LayerNorm) cannot run narrow: ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type_name(model)}")
    final = _logits_layer(model)
    layers = []
    narrowed: str | None = None  # the first layer with fewer output channels
    for name, module in _named_modules(model):
        if type(module) in _SLIM:
            _check_groups(name, module)
            layers.append(module)
            depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
            if narrowed is None and module is not final and not (depthwise or isinstance(module, _BatchNorm)):
                narrowed = name
        else:
            _check_unknown(name, module, narrowed)
    for module in layers:
        module.__class__ = _SLIM[type(module)]
        if isinstance(module, SlimmableLinear):
            module.whole = module is final
    return model


@contextmanager
def slimmed(model: nn.Module, width: float) -> Iterator[None]:
    """Run a model narrow within the block; its previous width is restored at the end, also after an error.

    Parameters
    ----------
    model
        Result of :func:`make_slimmable`. No other thread may use it within the block.
    width
        Share of each layer's channels, in ``(0, 1]``: the first ``ceil(width · C)`` of ``C``, at least one.

    Raises
    ------
    TypeError
        If the width is not a number.
    ValueError
        If the width is out of its range, or the model has no slimmable layer.

    Examples
    --------
    >>> model = FeatureModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3))
    >>> model = make_slimmable(model)
    >>> with slimmed(model, 0.25):
    ...     model.features(torch.zeros(5, 4)).shape, model(torch.zeros(5, 4)).shape
    (torch.Size([5, 2]), torch.Size([5, 3]))
    """
    width = _check_width(width)
    modules = [module for _, module in _named_modules(model)]
    if not any(isinstance(module, _LAYERS) for module in modules):
        raise ValueError(f"{type_name(model)} has no slimmable layer: make_slimmable(model) first")
    before: list[tuple[nn.Module, str, float | None]] = []
    try:
        for module in modules:
            if isinstance(module, (*_LAYERS, FeatureModel, SplitModel)):
                name = "width" if isinstance(module, _LAYERS) else "_width"
                before.append((module, name, module.__dict__.get(name)))
                setattr(module, name, width)
        with nullcontext() if width == 1.0 else NarrowViews(width):
            yield
    finally:
        for module, name, value in before:
            if value is None:
                module.__dict__.pop(name, None)
            else:
                setattr(module, name, value)


def count_flops(model: nn.Module, x: Tensor, width: float = 1.0) -> int:
    """Count the floating-point operations of one forward pass in eval mode, as torch counts them.

    Only convolutions and matrix products count; a multiplication and an addition count as two. Recurrent layers
    do not count where a library runs them as one operation.

    Parameters
    ----------
    model
        Any module; must be slimmable where `width` is below 1. It is not changed, nor are its modes.
    x
        A batch of inputs, on the model's device.
    width
        As in :func:`slimmed`.

    Raises
    ------
    TypeError, ValueError
        As in :func:`slimmed`; at width 1 any model is accepted.

    Examples
    --------
    >>> net = make_slimmable(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    >>> count_flops(net, torch.zeros(1, 4)) == 2 * (4 * 6 + 6 * 3)
    True
    >>> count_flops(net, torch.zeros(1, 4), 0.5) == 2 * (4 * 3 + 3 * 3)
    True
    """
    width = _check_width(width)
    modules = [module for _, module in _named_modules(model)]
    if isinstance(model, HeadTap):
        modules.append(model)
    plain = width == 1.0 and not any(isinstance(module, _LAYERS) for module in modules)
    # A model may override eval(), and train() need not undo it.
    modes = [module.training for module in modules]
    counter = FlopCounterMode(display=False)
    try:
        for module in modules:
            module.training = False
        with nullcontext() if plain else slimmed(model, width), torch.no_grad(), counter:
            model(x)
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return int(counter.get_total_flops())


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules, those of the original for a `HeadTap`, which does not register it as a child."""
    yield from (model.original if isinstance(model, HeadTap) else model).named_modules()


def _logits_layer(model: nn.Module) -> nn.Module:
    if isinstance(model, HeadTap):
        return model.tapped_linear()
    # The whole model cannot run on a symbolic input, because of its checks of shapes.
    if isinstance(model, FeatureModel):
        model = model.head
    elif isinstance(model, SplitModel):
        model = model.predictor
    return model.get_submodule(final_linear(model))


def _check_groups(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d) and module.groups not in (1, module.in_channels):
        raise ValueError(
            f"{_place(name, module)} cannot run narrow: its groups must be 1 or its {module.in_channels} input "
            f"channels, got {module.groups}"
        )


def _check_unknown(name: str, module: nn.Module, narrowed: str | None) -> None:
    if isinstance(module, _ConvNd | nn.Linear | _BatchNorm):
        raise ValueError(
            f"{_place(name, module)} cannot run narrow: of its kind only Conv2d, Linear, BatchNorm1d and "
            "BatchNorm2d can, and no subclasses of them"
        )
    # A single number, such as a temperature or a PReLU's slope, fits any width.
    parameters = [key for key, value in module.named_parameters(recurse=False) if _many(value)]
    if next(module.children(), None) is not None:
        # Its parameters may apply before or after its children, and its buffers may be constants of the input.
        if parameters:
            raise ValueError(
                f"{_place(name, module)} cannot run narrow: it has parameters outside of layers, "
                f"{', '.join(parameters)}"
            )
        return
    fixed = parameters or isinstance(module, _FIXED) or any(_many(b) for b in module.buffers(recurse=False))
    if fixed and narrowed is not None:
        raise ValueError(
            f"{_place(name, module)} cannot run narrow: it knows only its full width, and may stand only "
            f"before the first layer that is narrowed, {narrowed!r}"
        )


def _many(values: Tensor) -> bool:
    return nn.parameter.is_lazy(values) or values.numel() > 1


def _place(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type_name(module)})" if name else type_name(module)


def _check_width(width: float) -> float:
    return number("width", width, 0, 1, open_low=True, error=ValueError, type_error=TypeError)
