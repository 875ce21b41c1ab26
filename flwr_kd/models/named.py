"""Models of other packages by name: ``timm:NAME``, ``torchvision:NAME`` and ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from flwr_kd import catalogue
from flwr_kd.by_name import call_with, import_function, names_function
from flwr_kd.checks import ConfigError
from flwr_kd.inputs import call, logits_of
from flwr_kd.models.feature import SplitModel, as_feature_model
from flwr_kd.seeding import private_randomness
from flwr_kd.text import first_line, unknown_name

__all__ = ["FORMS", "build_named", "check_named", "is_named"]

FORMS = tuple(catalogue.MODEL_FORMS)
"""What ``--model`` takes besides the names of :data:`flwr_kd.models.MODELS`."""
_PACKAGES = ("timm", "torchvision")


def is_named(name: str) -> bool:
    """Return whether a model's name is one of another package's, or of a user's function.

    >>> is_named("timm:resnet10t"), is_named("my_models:build"), is_named("lenet")
    (True, True, False)
    """
    return name.partition(":")[0] in _PACKAGES or names_function(name)


def check_named(name: str) -> None:
    """Refuse a name that cannot be built, before any work starts. A user's module is imported.

    Raises
    ------
    ConfigError
        If the package is not installed, it has no such model, or there is no such function.
    """
    package, _, model = name.partition(":")
    if package not in _PACKAGES:
        import_function(name, "model")
    elif model not in (names := _names_of(package, name)):
        text = unknown_name(f"model of {package}", model, names)
        # All names would be hundreds.
        raise ConfigError(f"{text.partition('; valid:')[0]}: it has {len(names)} models for classification")


def build_named(
    name: str, *, input_shape: tuple[int, ...], num_classes: int, seed: int, vocabulary: int
) -> nn.Module:
    """Build a model with random weights, and try it on a sample of zeros.

    Parameters
    ----------
    name : str
        See :data:`FORMS`. A function gets those of ``input_shape``, ``num_classes``, ``seed`` and ``vocabulary``
        that its parameters name, and returns a module that ends in a ``Linear``, or a pair (extractor, head). The
        first convolution of a model of torchvision gets as many input channels as the images have.
    input_shape : tuple of int
        Shape of one sample.
    num_classes : int
        C.
    seed : int
        What the model's code draws from the global generators of torch, NumPy and Python follows from it.
    vocabulary : int
        Number of token ids; 0 where inputs are no token ids.

    Returns
    -------
    nn.Module
        With ``features`` and ``classify``, on the CPU, in training mode.

    Raises
    ------
    ConfigError
        If the model cannot be built, does not take the samples, or does not return logits ``[B, C]``.
    """
    sizes = {"input_shape": input_shape, "num_classes": num_classes, "seed": seed, "vocabulary": vocabulary}
    make: Callable[[], Any]
    package, _, model = name.partition(":")
    if package == "timm":
        channels = input_shape[0] if len(input_shape) == 3 else 3
        timm = _package(package, name)

        def make() -> Any:
            return timm.create_model(model, pretrained=False, num_classes=num_classes, in_chans=channels)
    elif package == "torchvision":
        models = _package("torchvision", name).models

        def make() -> Any:
            return _with_channels(models.get_model(model, weights=None, num_classes=num_classes), input_shape)
    else:
        function = import_function(name, "model")

        def make() -> Any:
            return call_with(function, sizes)

    try:
        with torch.device("cpu"), private_randomness(seed):
            made = make()
            built = made if isinstance(made, SplitModel) else as_feature_model(made)
    except Exception as error:  # Another package's code, or the user's own, may raise anything.
        raise ConfigError(
            f"model {name} cannot be built ({type(error).__name__}: {first_line(error)})"
        ) from error
    _try(name, built, input_shape, num_classes, tokens=vocabulary > 0)
    return built


def _try(name: str, model: nn.Module, shape: tuple[int, ...], num_classes: int, *, tokens: bool) -> None:
    x = torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32)
    training = model.training
    try:
        with torch.no_grad(), private_randomness(0):
            logits = logits_of(call(model.eval(), x))
            features = getattr(model, "features", None)
            if features is not None:
                features(x)
    except Exception as error:
        raise ConfigError(
            f"model {name} does not take samples of shape {list(shape)}: {first_line(error)}"
        ) from error
    finally:
        model.train(training)
    got = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if got != [1, num_classes]:
        raise ConfigError(f"model {name} must return logits [B, {num_classes}], got {got} of one sample")


def _with_channels(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return a model of torchvision whose first convolution takes as many channels as the images have."""
    if len(shape) != 3 or shape[0] == 3:
        return model
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            parent, _, child = name.rpartition(".")
            options: Any = {
                key: getattr(layer, key)
                for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            }
            other = nn.Conv2d(shape[0], layer.out_channels, bias=layer.bias is not None, **options)
            setattr(model.get_submodule(parent), child, other)
            break
    return model


def _names_of(package: str, name: str) -> list[str]:
    found = _package(package, name)
    if package == "timm":
        return cast("list[str]", found.list_models())
    return cast("list[str]", found.models.list_models(module=found.models))


def _package(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"model {name!r} needs the package {package}, which cannot be imported ({error}): pip install {package}"
        ) from None
