"""A classifier whose features are read off its final ``Linear``, without changing what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from flwr_kd.inputs import Inputs, call, logits_of
from flwr_kd.models.checks import check_matrix, type_name

__all__ = ["HeadTap", "final_linear"]

# All of nn.Module's registries, except `training`, which train() keeps in step, and the hooks around forward,
# which run when the original is called and must not run twice.
_SHARED_REGISTRIES = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class HeadTap(nn.Module):
    """A model with `features` and `classify` read off its final ``Linear``; see `as_feature_model`.

    The wrapper and the original share the same dictionaries of parameters, buffers and children. Therefore the
    names in the state, ``parameters()``, ``to()`` and later changes are those of the original, and pickle and
    deepcopy work, since both keep shared objects shared. The alternatives fail: a subclass of the original's
    class breaks models with a child called ``features`` (torchvision's AlexNet), and an original that is
    registered as a child adds a prefix to every name.
    """

    takes_named_inputs = True
    _original: nn.Module
    _head_name: str

    def __init__(self, original: nn.Module, head_name: str) -> None:
        super().__init__()
        for registry in _SHARED_REGISTRIES:
            object.__setattr__(self, registry, original.__dict__[registry])
        # nn.Module.__setattr__ would register the original as a child.
        object.__setattr__(self, "_original", original)
        self._head_name = head_name
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The model that was wrapped."""
        return self._original

    @property
    def feature_dim(self) -> int:
        """``D``: the number of inputs of the final ``Linear``."""
        return self.tapped_linear().in_features

    @property
    def num_classes(self) -> int:
        """``C``: the number of outputs of the final ``Linear``."""
        return self.tapped_linear().out_features

    def tapped_linear(self) -> nn.Linear:
        """Return the final ``Linear``; raise TypeError if it has been replaced by a layer of another class."""
        head = self.get_submodule(self._head_name)
        if not isinstance(head, nn.Linear):
            raise TypeError(
                f"{self._head_name!r} was a Linear when wrapped and is now {type_name(head)}: wrap again"
            )
        return head

    def features(self, x: Inputs) -> Tensor:
        """Return the inputs ``[B, D]`` of the final ``Linear`` for the batch `x`.

        Raises
        ------
        ValueError
            If the original's output is not the unchanged output of that ``Linear``, or if its input is not a
            matrix.
        """
        head = self.tapped_linear()
        calls: list[tuple[Tensor, Tensor, int]] = []

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls.append((args[0] if args else kwargs["input"], output, _version(output)))

        handle: RemovableHandle = head.register_forward_hook(record, with_kwargs=True)
        try:
            logits = logits_of(call(self._original, x))
        finally:
            handle.remove()
        for h, output, version in reversed(calls):
            if output is logits and _version(logits) == version:
                check_matrix(f"{type_name(self._original)}: the input of {self._head_name!r}", "features", h)
                return h
        raise ValueError(
            f"{type_name(self._original)}: its output is not that of its Linear {self._head_name!r} "
            f"({'called, but something follows' if calls else 'which was not called'}). {_ADVICE}"
        )

    def classify(self, h: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of features ``[B, D]``."""
        return cast(Tensor, self.tapped_linear()(h))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the original, bit for bit; of an output with ``logits``, these."""
        output = (
            self._original(*args, **kwargs) if kwargs or len(args) != 1 else call(self._original, args[0])
        )
        return cast(Tensor, logits_of(output))

    def train(self, mode: bool = True) -> HeadTap:
        """Set training mode through the original's own ``train``, which may keep layers frozen."""
        self._original.train(mode)
        self.training = self._original.training
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Look up a submodule of the original, whose children have names that methods of this class may hide."""
        return self._original.get_submodule(target)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HeadTap:
        cast(Any, self._original)._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> HeadTap:
        """Apply `fn` to the original and everything in it."""
        self._original.apply(fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._original._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._original._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the original's class and the head."""
        return f"{type_name(self._original)}, head={self._head_name!r}"


_ADVICE = (
    "Features are read off a final nn.Linear whose outputs are the logits; leave out what follows it, give a "
    "pair (extractor, head), or define features() and classify()"
)


class _Tracer(fx.proxy.GraphAppendingTracer):  # type: ignore[misc, unused-ignore]
    """A tracer that accepts the model's tensors beside symbolic values; it does not use the constants."""

    def create_arg(self, a: Any) -> Any:
        return None if isinstance(a, torch.Tensor) else super().create_arg(a)


def final_linear(model: nn.Module) -> str:
    """Return the name of the ``Linear`` whose output is the model's output; see `as_feature_model`.

    Raises
    ------
    ValueError
        If the output is known not to be a ``Linear``'s.
    """
    if isinstance(model, nn.Linear):
        return ""
    modules = dict(model.named_modules())
    try:
        output = _trace(model)
    except Exception:  # A user's forward may raise anything on symbolic input. features() checks the guess.
        return _last_registered_linear(model)
    if not isinstance(output, fx.Proxy):
        output = getattr(output, "logits", output)
    if not isinstance(output, fx.Proxy):
        raise ValueError(f"{type_name(model)} returns {type_name(output)}, not a tensor of logits. {_ADVICE}")
    node = output.node
    while node.op == "call_module" and isinstance(modules[cast(str, node.target)], nn.Identity):
        node = node.all_input_nodes[0]
    if node.op != "call_module":
        what = "its input" if node.op == "placeholder" else getattr(node.target, "__name__", str(node.target))
        raise ValueError(
            f"{type_name(model)} ends in {what}, not in an nn.Linear: outputs must be logits. {_ADVICE}"
        )
    name = cast(str, node.target)
    if not isinstance(modules[name], nn.Linear):
        raise ValueError(
            f"{type_name(model)} ends in {type_name(modules[name])} {name!r}, not in an nn.Linear: "
            f"outputs must be logits. {_ADVICE}"
        )
    return name


def _trace(model: nn.Module) -> Any:
    """Run a copy of the model on a symbolic input and return its output.

    ``fx.symbolic_trace`` replaces ``nn.Module.__call__`` for the whole process, which breaks models that run in
    other threads. Here only the leaves of the copy are replaced.
    """
    tracer = _Tracer(fx.Graph())
    model_copy = copy.deepcopy(model).eval()

    def record(name: str) -> Callable[..., fx.Proxy]:
        def forward(*args: Any, **kwargs: Any) -> fx.Proxy:
            return tracer.create_proxy("call_module", name, args, kwargs)

        return forward

    for name, module in model_copy.named_modules():
        # A user's hooks may store the symbolic values.
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        if name and _is_leaf(module):
            object.__setattr__(module, "forward", record(name))
    return model_copy(fx.Proxy(tracer.create_node("placeholder", "x", (), {}), tracer))


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear) or next(module.children(), None) is None:
        return True
    return type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, nn.Sequential)


def _last_registered_linear(model: nn.Module) -> str:
    last: tuple[str, nn.Module] | None = None
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            last = name, module
    if last is None:
        raise ValueError(f"{type_name(model)} has no layer with parameters, so no final nn.Linear. {_ADVICE}")
    name, module = last
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"{type_name(model)}: its last layer with parameters is {type_name(module)} {name!r}, "
            f"not an nn.Linear. {_ADVICE}"
        )
    return name


def _version(tensor: object) -> int:
    # Tensors from inference mode have no version counter.
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0
