"""A model as a user gives it: without what wraps it for a training loop of the user's own, or refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flwr_kd.models.checks import type_name
from flwr_kd.models.closures import bound_function

__all__ = ["check_dtypes", "check_outputs", "floating_dtype", "plain_model", "private_copy"]

Model = nn.Module | tuple[nn.Module, nn.Module]
ModelT = TypeVar("ModelT")
_COMPILED = "_orig_mod"
_DTYPES = (torch.float32, torch.float64)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def plain_model(model: ModelT) -> ModelT:
    """Return a model without ``torch.compile``, and refuse what cannot be trained as an ordinary module.

    Parameters
    ----------
    model
        A module, or a pair of modules. Anything else is returned unchanged.

    Raises
    ------
    TypeError
        If it is a ``ScriptModule``, or wrapped for training on several devices.
    ValueError
        If it computes per-sample gradients, for a differentially private optimiser.

    Examples
    --------
    >>> net = nn.Linear(2, 3)
    >>> plain_model(net) is net
    True
    >>> plain_model(nn.DataParallel(net))
    Traceback (most recent call last):
    TypeError: model must be a plain nn.Module, got DataParallel: ...
    """
    if isinstance(model, tuple):
        return tuple(map(plain_model, model))  # type: ignore[return-value]
    if not isinstance(model, nn.Module):
        return model
    plain: Any = model
    while (inside := _inside(plain)) is not None:
        plain = inside
    if isinstance(plain, torch.jit.ScriptModule):
        raise TypeError(
            f"model must be a plain nn.Module, got {type_name(plain)}: wrap it before scripting it"
        )
    if isinstance(plain, _PARALLEL) or any(
        c.__module__.startswith("torch.distributed") for c in type(plain).__mro__
    ):
        raise TypeError(
            f"model must be a plain nn.Module, got {type_name(plain)}: a client trains on one device; "
            "give the model that is wrapped, model.module"
        )
    if _has_sample_gradients(plain):
        raise ValueError(
            f"model ({type_name(plain)}) computes per-sample gradients, as Opacus' PrivacyEngine makes it: "
            "differential privacy would not take place, since flwr-kd trains with an optimiser of its own, which "
            "neither clips nor adds noise; give the model without it, for example model.to_standard_module()"
        )
    return plain  # type: ignore[no-any-return]


def _has_sample_gradients(model: nn.Module) -> bool:
    """Return whether a model has what per-sample gradients need: hooks, or a place for them at its parameters."""
    return any(
        hasattr(module, "autograd_grad_sample_hooks")
        or _is_for_sample_gradients(type(module))  # type: ignore[arg-type]
        or any("gradsample" in _source(code) for code in _hooks(module))
        for module in model.modules()
    ) or any(hasattr(parameter, "grad_sample") for parameter in model.parameters())


@functools.cache
def _is_for_sample_gradients(kind: type[nn.Module]) -> bool:
    return any("gradsample" in _source(code) for code in kind.__mro__)


def _hooks(module: nn.Module) -> Iterator[object]:
    for registry in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield from module.__dict__.get(registry, {}).values()


def _source(code: object) -> str:
    code = getattr(code, "func", code)  # a functools.partial
    name = f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', '')}"
    return name.replace("_", "").lower()


def private_copy(model: ModelT) -> ModelT:
    """Return a deep copy of a model or of a pair, in which no module is compiled.

    Tensors that are results of a computation, such as the weight that ``weight_norm`` sets, are copied without
    their history.

    Raises
    ------
    TypeError
        If a part of the model cannot be copied, or a copy would compute with the original's layers.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> copied = private_copy(net)
    >>> copied[0].weight is net[0].weight, torch.equal(copied[0].weight, net[0].weight)
    (False, True)
    """
    memo: dict[int, Any] = {}
    parts = model if isinstance(model, tuple) else (model,)
    for module in (m for part in parts if isinstance(part, nn.Module) for m in part.modules()):
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    for part in parts:
        if isinstance(part, nn.Module):
            _check_copyable(part)
            _copy_without_compilation(part, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # Any attribute of a user's module may fail to be copied, in its own way.
        raise TypeError(f"model cannot be copied ({type(error).__name__}: {str(error)[:200]})") from None
    for part in copied if isinstance(copied, tuple) else (copied,):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            # Set by nn.Module.compile(). It would skip the hooks that are added later.
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None
    return copied


def _check_copyable(model: nn.Module) -> None:
    """Refuse a model whose copy would be a model, but another one."""
    where = bound_function(model)
    if where is not None:
        raise TypeError(
            f"model cannot be copied ({where} is a function that refers to the model's own layers, so a copy would "
            "compute with those of the original: write it as a method)"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError("model cannot be copied (a part is a ScriptModule: give it before it is scripted)")


def _inside(model: nn.Module) -> nn.Module | None:
    """Return the module inside a result of ``torch.compile``; None for any other module."""
    if isinstance(model, torch.jit.ScriptModule):
        return None
    return model._modules.get(_COMPILED)


def _copy_without_compilation(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the copy of each compiled part be that of the module inside."""
    for module in model.modules():
        inside = _inside(module)
        if inside is not None:
            memo[id(module)] = copy.deepcopy(plain_model(inside), memo)


def floating_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a model's floating-point parameters; None without any, or with several.

    >>> floating_dtype(nn.Linear(2, 3).double())
    torch.float64
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model whose ``state_dict`` has values in reduced precision.

    Raises
    ------
    ValueError
        With the reason and the remedy.

    Examples
    --------
    >>> check_dtypes(nn.Linear(2, 3).bfloat16().state_dict())
    Traceback (most recent call last):
    ValueError: model must be kept in float32 or float64, got torch.bfloat16 ('weight'): ...
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in _DTYPES:
            raise ValueError(
                f"model must be kept in float32 or float64, got {tensor.dtype} ({name!r}): Adam's steps and the "
                "mean of the clients' models are lost in its rounding; give model.float(), and train in reduced "
                'precision by precision="bfloat16" at the client'
            )


def check_outputs(num_classes: int) -> None:
    """Refuse a classifier with one output.

    Raises
    ------
    ValueError
        With the remedy.

    Examples
    --------
    >>> check_outputs(1)
    Traceback (most recent call last):
    ValueError: model has one output, and a task with two classes needs two: ...
    """
    if num_classes == 1:
        raise ValueError(
            "model has one output, and a task with two classes needs two: end it in Linear(..., 2), with labels "
            "0 and 1"
        )
