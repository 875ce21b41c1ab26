"""The last feature block of a model: which layers it has, what goes in and out, and its slim part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from flwr_kd.checks import ConfigError
from flwr_kd.learning.loop import BatchNorms
from flwr_kd.models import FeatureModel, make_slimmable, slimmed
from flwr_kd.models.checks import type_name
from flwr_kd.models.head import HeadTap
from flwr_kd.models.views import ADVICE
from flwr_kd.text import first_line

__all__ = ["Block", "Passed", "find_block"]

_FUNCTIONS: set[Any] = {
    *(
        F.relu,
        F.relu_,
        F.relu6,
        F.leaky_relu,
        F.elu,
        F.selu,
        F.celu,
        F.gelu,
        F.silu,
        F.mish,
        F.hardswish,
        F.tanh,
    ),
    *(F.sigmoid, F.softplus, torch.relu, torch.relu_, torch.tanh, torch.sigmoid),
    *(Tensor.relu, Tensor.relu_, Tensor.tanh, Tensor.tanh_, Tensor.sigmoid, Tensor.sigmoid_),
}
"""Activations that a model's code may call as functions."""


@dataclass
class Passed:
    """What went through a block in one forward pass: detached copies of its input and output."""

    inputs: Tensor
    outputs: Tensor


class Block:
    """The last feature block of a model, which can run in its slim part.

    Parameters
    ----------
    name : str
        That of its first layer or stage.
    layers : list of nn.Module
        In their order: a stage or a layer with weights, and its norm. They become slimmable.
    activations : list of callable
        What follows them.
    channels, step : int
        Number of the input's channels, and of values in each of them where the input is flattened.

    Raises
    ------
    ValueError
        If a layer cannot run narrow.
    """

    def __init__(
        self,
        name: str,
        layers: list[nn.Module],
        activations: list[Callable[[Tensor], Tensor]],
        channels: int,
        step: int,
    ) -> None:
        self.name, self.layers, self.activations = name, layers, activations
        self.channels, self.step = channels, step
        # What ends in logits can be made slimmable; the layer at the end is not used.
        make_slimmable(nn.Sequential(*layers, nn.Linear(1, 1)))
        self._slimmable = nn.Sequential(*layers)
        self._norms = BatchNorms(self._slimmable)

    @contextmanager
    def watched(self) -> Iterator[Callable[[], Passed]]:
        """Note what passes through the block within; the result is called after a forward pass."""
        noted: dict[str, Tensor] = {}

        # Copies, since the model may change either in place later.
        def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            noted["inputs"] = args[0].detach().clone()

        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            noted["outputs"] = output.detach().clone()

        def passed() -> Passed:
            outputs = noted["outputs"]
            for activation in self.activations:
                outputs = activation(outputs)
            return Passed(noted["inputs"], outputs)

        handles = [
            self.layers[0].register_forward_pre_hook(enter),
            self.layers[-1].register_forward_hook(leave),
        ]
        try:
            yield passed
        finally:
            for handle in handles:
                handle.remove()

    def narrow(self, inputs: Tensor, width: float) -> tuple[Tensor, Tensor]:
        """Return the input's first channels, and what the block's slim part makes of them.

        BatchNorm uses the batch's statistics; its running ones, which are those of the full width, do not change.
        """
        kept = max(1, math.ceil(width * self.channels - 1e-9)) * self.step
        x = first = inputs[:, :kept]
        with self._norms.statistics_kept(), slimmed(self._slimmable, width):
            x = self._slimmable(x)
        for activation in self.activations:
            x = activation(x)
        return first, x


@dataclass
class _Call:
    """One call in a forward pass, of a module or of an activation function, and when it began and ended."""

    name: str
    call: Callable[..., Any]
    inputs: Any
    begin: int
    outputs: Any = None
    end: int = -1

    def maps(self) -> bool:
        """Whether maps ``[B, C, H, W]`` go in and come out."""
        return all(isinstance(each, Tensor) and each.ndim == 4 for each in (self.inputs, self.outputs))


@dataclass
class _Trace:
    """The calls of one forward pass, in the order in which they began."""

    calls: list[_Call] = field(default_factory=list)
    functions: list[_Call] = field(default_factory=list)

    def by_name(self) -> dict[str, list[_Call]]:
        named: dict[str, list[_Call]] = {}
        for call in self.calls:
            named.setdefault(call.name, []).append(call)
        return named


class _Functions(TorchFunctionMode):
    def __init__(self, trace: _Trace, clock: Iterator[int]) -> None:
        super().__init__()
        self._trace, self._clock = trace, clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options: dict[str, Any] = kwargs or {}
        output = func(*args, **options)
        if func in _FUNCTIONS and args:
            # A copy, since it may be called in place.
            at, rest = next(self._clock), args[1:]
            self._trace.functions.append(
                _Call("", lambda x: func(x.clone(), *rest, **options), args[0], at, output, at)
            )
        return output


def _traced(model: nn.Module, x: Tensor) -> _Trace:
    """Return the calls of all modules and activations while a model makes features; the model ends in eval mode."""
    trace, clock, handles = _Trace(), itertools.count(), []
    open_calls: list[_Call] = []

    def listen(name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            alone = args[0] if len(args) == 1 and not kwargs else None
            call = _Call(name, module, alone, next(clock))
            trace.calls.append(call)
            open_calls.append(call)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            call = open_calls.pop()
            call.outputs, call.end = output, next(clock)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))

    for name, module in model.named_modules():
        if name:
            listen(name, module)
    try:
        with torch.no_grad(), _Functions(trace, clock):
            model.eval().features(x)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    return trace


def find_block(model: nn.Module, x: Tensor) -> Block:
    """Return the last feature block of a model, by one forward pass in eval mode.

    It begins with the last layer of ``features`` that has a weight matrix. Where global average pooling comes
    before that layer, it is the last convolution before the pooling. A convolution counts with the largest module
    that holds it, maps to maps of one size and is not the model's beginning: the last stage of a ResNet. BatchNorm
    and activations that follow belong to the block. Its layers become slimmable, in place.

    Parameters
    ----------
    model : nn.Module
        With ``features`` and ``classify``.
    x : Tensor
        Inputs; at least one sample.

    Raises
    ------
    ConfigError
        If no reading of the model has such a block, or it cannot run narrow.
    """
    trace = _traced(model, x)
    head = model.tapped_linear() if isinstance(model, HeadTap) else None
    weighted = [call for call in trace.calls if call.call is not head and _has_matrix(call.call)]
    if not weighted:
        raise _refused("there is no layer with a weight matrix below its last one")
    last = _last(weighted, trace)
    if not isinstance(last.inputs, Tensor) or not isinstance(last.outputs, Tensor):
        raise _refused(f"its last layer with weights, {_place(last)}, does not map one tensor to one")
    if last.inputs.ndim != last.outputs.ndim or last.inputs.ndim not in (2, 4):
        shapes = f"{list(last.inputs.shape)} to {list(last.outputs.shape)}"
        raise _refused(f"{_place(last)} maps {shapes}, neither maps [B, C, H, W] nor vectors [B, D]")
    layers, activations = _followers(last, trace)
    if any(len(trace.by_name()[layer.name]) > 1 for layer in layers):
        raise _refused(f"{_place(last)} or its norm is called more than once")
    channels, step = _channels(last, weighted, trace, x)
    try:
        block = Block(last.name, [layer.call for layer in layers], activations, channels, step)  # type: ignore[misc]
    except ValueError as error:
        raise _refused(f"its last block {_place(last)} has a layer that is not for it: {error}") from None
    _try_narrow(block, last.inputs, last.outputs)
    return block


def _last(weighted: list[_Call], trace: _Trace) -> _Call:
    """Return the call with which the block begins."""
    last = weighted[-1]
    convolutions = [call for call in weighted if isinstance(call.call, nn.Conv2d) and call.maps()]
    if not convolutions:
        return last
    stage = _stage(convolutions[-1], weighted[0], trace)
    after = [call for call in weighted if call.begin > stage.end]
    if not after:
        return stage
    flattened = any(
        isinstance(call.call, nn.MaxPool2d) and call.begin > stage.end and call.outputs.shape[2:].numel() == 1
        for call in trace.calls
    )
    pooled = isinstance(after[0].call, nn.Linear) and after[0].call.in_features == stage.outputs.shape[1]
    return stage if pooled and not flattened else last


def _stage(convolution: _Call, first: _Call, trace: _Trace) -> _Call:
    """Return the largest module around a convolution that maps to one size of maps, and is not the beginning."""
    named = trace.by_name()
    parts = convolution.name.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        calls = named.get(name, [])
        if len(calls) != 1 or not calls[0].maps() or first.name.startswith(f"{name}."):
            continue
        children = [
            call
            for call in trace.calls
            if call.name.startswith(f"{name}.") and call.name.count(".") == depth and call.maps()
        ]
        if all(child.outputs.shape[2:] == calls[0].outputs.shape[2:] for child in children):
            return calls[0]
    return convolution


def _followers(last: _Call, trace: _Trace) -> tuple[list[_Call], list[Callable[[Tensor], Tensor]]]:
    """Return the block's layers, and the activations after them."""
    layers = [last]
    activations: list[Callable[[Tensor], Tensor]] = []
    output, at = last.outputs, last.end
    while True:
        after = [
            call for call in (*trace.calls, *trace.functions) if call.begin > at and call.inputs is output
        ]
        following = min(after, key=lambda call: call.begin, default=None)
        if following is None or not isinstance(following.outputs, Tensor):
            return layers, activations
        if isinstance(following.call, _BatchNorm) and len(layers) == 1 and not activations:
            layers.append(following)
        elif following in trace.functions or _is_activation(following.call):
            activations.append(_not_in_place(following.call))
        else:
            return layers, activations
        output, at = following.outputs, following.end


def _is_activation(module: Any) -> bool:
    known = type(module).__module__ == "torch.nn.modules.activation"
    return known and all(parameter.numel() == 1 for parameter in module.parameters())


def _not_in_place(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an activation that leaves its input as it is."""
    return lambda x: call(x.clone()) if getattr(call, "inplace", False) else call(x)


def _channels(last: _Call, weighted: list[_Call], trace: _Trace, x: Tensor) -> tuple[int, int]:
    """Return the number of channels of the block's input, and the number of values in each if it is flattened."""
    size = int(last.inputs.shape[1])
    if last.inputs.ndim == 4:
        return size, 1
    before = max((call.end for call in weighted if call.end < last.begin), default=-1)
    maps = [
        call.outputs
        for call in trace.calls
        if before <= call.end < last.begin and isinstance(call.outputs, Tensor) and call.outputs.ndim == 4
    ]
    if not maps and before < 0:
        maps = [x]
    if maps and maps[-1].ndim == 4 and maps[-1][0].numel() == size:
        return int(maps[-1].shape[1]), size // int(maps[-1].shape[1])
    return size, 1


def _has_matrix(module: Any) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _try_narrow(block: Block, inputs: Tensor, outputs: Tensor) -> None:
    """Refuse a block whose code does not run with fewer channels, or mixes samples then."""
    try:
        with torch.no_grad():
            _, narrow = block.narrow(inputs, 0.25)
    # A user's module may raise anything if its code fixes numbers of channels.
    except Exception as error:
        reason = first_line(error)
        raise _refused(f"{block.name!r} does not run with fewer channels ({reason}); {ADVICE}") from None
    if narrow.ndim != outputs.ndim or len(narrow) != len(outputs):
        shapes = f"{list(narrow.shape)} and not {list(outputs.shape)}"
        raise _refused(f"{block.name!r} returns {shapes} with fewer channels; {ADVICE}")


def _place(call: _Call) -> str:
    return f"{call.name!r} ({type_name(call.call)})"


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        "model cannot be used, since FedAlign needs a last feature block of Linear or Conv2d layers: "
        f"{reason}. {FeatureModel.__name__}(extractor, head) says which part makes the features"
    )
