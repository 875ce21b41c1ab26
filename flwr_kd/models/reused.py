"""Models that are built once per process and used again, instead of being built for every message."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["ModelPool", "Pristine"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CONTAINERS = (dict, list, set)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_KEYS = 16


class Pristine:
    """What a module is like, to be put back after others have trained or changed it.

    Kept are the values of its parameters and buffers, which tensors are trained, the hooks on their gradients, and
    each submodule's class, attributes and hooks. What an attribute refers to is not copied, except for dicts, lists
    and sets.

    Parameters
    ----------
    model : nn.Module
        It costs a second copy of the model's tensors.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> pristine = Pristine(net)
    >>> _ = nn.init.zeros_(net[0].weight), net.append(nn.ReLU()), net.eval()
    >>> pristine.restore()
    >>> bool(net[0].weight.any()), len(net), net.training
    (True, 1, True)
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), _copied(vars(module))) for module in model.modules()]
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._tensors = [(tensor, tensor.requires_grad) for tensor in tensors.values()]
        self._values = [tensor.detach().clone() for tensor in tensors.values()]
        self._attached = [_attached(tensor) for tensor in tensors.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Make the module again what it was."""
        for module, kind, attributes in self._modules:
            module.__class__ = kind
            # Not a new dict: torch keeps references to that of a module.
            vars(module).clear()
            vars(module).update(_copied(attributes))
        for place, (tensor, trained) in enumerate(self._tensors):
            value = self._values[place]
            if value.device != tensor.device:
                # Once, where the module went to a device with its parameters; not with each message.
                value = self._values[place] = value.to(tensor.device)
            if _form(tensor) == _form(value):
                tensor.copy_(value)
            else:
                tensor.data = value.clone()
            tensor.requires_grad_(trained)
            tensor.grad = None
            _attach(tensor, *self._attached[place])


class ModelPool:
    """Lends modules, each to one borrower at a time, as they were when they were built.

    A module comes back when its borrower is no longer referenced, so that there are as many as there are borrowers
    at the same time. A borrower must not hand out its module to something that outlives it.
    """

    def __init__(self) -> None:
        self._free: OrderedDict[Hashable, deque[tuple[nn.Module, Pristine]]] = OrderedDict()

    def lend(self, key: Hashable, build: Callable[[], ModuleT], borrower: object) -> ModuleT:
        """Return a module that is the borrower's until the borrower is no longer referenced.

        Parameters
        ----------
        key : hashable
            Everything that the module depends on.
        build : callable
            Makes a module if none is free.
        borrower : object
            Can be referenced weakly.
        """
        # Without a lock: the garbage collector may end a borrower at any moment, in any thread.
        free = self._free.setdefault(key, deque())
        while len(self._free) > _KEYS:
            self._free.popitem(last=False)
        try:
            module, pristine = free.pop()
            pristine.restore()
        except IndexError:
            module = build()
            pristine = Pristine(module)
        weakref.finalize(borrower, free.append, (module, pristine)).atexit = False
        return module  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """Number of modules that are free."""
        return sum(map(len, self._free.values()))

    def clear(self) -> None:
        """Forget all modules that are free."""
        self._free.clear()


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _attached(tensor: Tensor) -> tuple[dict[str, Any], list[dict[int, Any] | None]]:
    """Return the attributes that a tensor was given, and the hooks on its gradient."""
    hooks = [getattr(tensor, name, None) for name in _HOOKS]
    return dict(vars(tensor)), [None if registered is None else registered.copy() for registered in hooks]


def _attach(tensor: Tensor, attributes: dict[str, Any], hooks: list[dict[int, Any] | None]) -> None:
    vars(tensor).clear()
    vars(tensor).update(attributes)
    for name, registered in zip(_HOOKS, hooks, strict=True):
        now = getattr(tensor, name, None)
        if now != registered:
            # PyTorch keeps the dict that it had, also where the attribute is None.
            if now is not None:
                now.clear()
            setattr(tensor, name, None if registered is None else registered.copy())


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, _CONTAINERS) else value for name, value in attributes.items()
    }
