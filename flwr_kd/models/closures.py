"""Functions that a model keeps and that refer to its own layers, as a copy of the model would not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from flwr_kd.models.checks import type_name

__all__ = ["bound_function"]

# What torch.compile() keeps; a copy has no compiled code.
_COMPILED_CALL, _COMPILED = "_compiled_call_impl", "_orig_mod"


def bound_function(model: nn.Module) -> str | None:
    """Return where a model keeps a function that refers to the model's own layers; None if there is none.

    ``copy.deepcopy`` copies methods with their modules, but shares functions: a lambda that a copy has computes
    with the layers of the original.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> net.double = lambda x: 2 * net[0](x)
    >>> bound_function(net)
    "'double' of Sequential"
    """
    modules = _modules(model)
    own = {id(module) for module in modules}
    own |= {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    for module in modules:
        if _COMPILED in module._modules:
            continue
        for name, value in vars(module).items():
            functions = _functions(None if name == _COMPILED_CALL else value)
            if any(_refers(part, own) for function in functions for part in _inside(function)):
                return f"{name!r} of {type_name(module)}"
    return None


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, those included that are kept without being registered."""
    modules, pending = {id(model): model}, [model]
    while pending:
        module = pending.pop()
        for part in (*module.children(), *vars(module).values()):
            if isinstance(part, nn.Module) and id(part) not in modules:
                modules[id(part)] = part
                pending.append(part)
    return list(modules.values())


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in an attribute that a copy of the attribute has as they are."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, partial):
        yield from _functions([value.func, *value.args, value.keywords])
    elif isinstance(value, dict):
        yield from _functions(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _functions(part)


def _inside(function: FunctionType) -> list[Any]:
    """Return the values that a function carries: its defaults, those of its closure, and modules of its globals."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    used = (function.__globals__.get(name) for name in function.__code__.co_names)
    values += [value for value in used if isinstance(value, nn.Module | Tensor)]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    return values


def _refers(value: Any, own: set[int], depth: int = 8) -> bool:
    if id(value) in own or depth == 0:
        return id(value) in own
    inside: list[Any] = []
    if isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        inside = _inside(value)
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    return any(_refers(part, own, depth - 1) for part in inside)
