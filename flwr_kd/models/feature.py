"""Splitting a classifier into a feature extractor and a head, without changing what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from flwr_kd.checks import whole_number

__all__ = ["FeatureModel", "SplitModel", "as_feature_model", "count_parameters"]

_NOT_LOGITS = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.Sigmoid, nn.LogSigmoid)


class FeatureModel(nn.Module):
    """A feature extractor and a classification head; ``forward = classify ∘ features``.

    Parameters
    ----------
    extractor
        Maps a batch ``x`` to features ``[B, D]``.
    head
        Maps features ``[B, D]`` to logits ``[B, C]``.
    feature_dim
        ``D``, at least 1. Read from the head where that is a ``Linear`` or a ``Sequential`` with a ``Linear``
        in it; must be given for any other head.
    num_classes
        ``C``, at least 1. Read from the head where that is a ``Linear`` or a ``Sequential`` that ends in one;
        must be given for any other head.

    Attributes
    ----------
    extractor, head
        The two modules as given; the state's names start with ``extractor.`` and ``head.``.
    feature_dim, num_classes
        ``D`` and ``C``.

    Raises
    ------
    TypeError
        If `extractor` or `head` is not an ``nn.Module``, or a size is not an int.
    ValueError
        If a size cannot be read from the head and is not given, contradicts the head, or is below 1; or if
        the head ends in a softmax or sigmoid: its outputs must be logits.

    Examples
    --------
    >>> model = FeatureModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    >>> model.feature_dim, model.num_classes
    (3, 2)
    >>> model.features(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """

    feature_dim: int
    num_classes: int
    # Below 1 within slimmed(): the features are fewer then.
    _width: float = 1.0

    def __init__(
        self,
        extractor: nn.Module,
        head: nn.Module,
        *,
        feature_dim: int | None = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        for name, part in (("extractor", extractor), ("head", head)):
            if not isinstance(part, nn.Module):
                raise TypeError(f"{name} must be an nn.Module, got {_kind(part)}")
        layers = list(_flat_layers(head))
        if layers and isinstance(layers[-1], _NOT_LOGITS):
            raise ValueError(
                f"head ends in {_kind(layers[-1])}: its outputs must be logits, leave that layer out"
            )
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        for linear in linears:
            _check_not_lazy(linear, "head")
        enters = linears[0].in_features if linears else None
        leaves = linears[-1].out_features if linears and layers[-1] is linears[-1] else None
        if feature_dim is not None and layers and layers[0] not in linears:
            enters = None  # what comes before the Linear may change the width, so it is no contradiction
        self.feature_dim = _size("feature_dim", feature_dim, enters, head)
        self.num_classes = _size("num_classes", num_classes, leaves, head)
        self.extractor = extractor
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """Features of a batch.

        Parameters
        ----------
        x
            What the extractor takes, batch first: ``[B, ...]``.

        Returns
        -------
        Tensor
            ``[B, D]``.

        Raises
        ------
        ValueError
            If the extractor returns another shape.
        """
        h = self.extractor(x)
        _check_matrix("extractor", "features", h, self.feature_dim if self._width == 1.0 else None)
        return cast(Tensor, h)

    def classify(self, h: Tensor) -> Tensor:
        """Logits ``[B, C]`` of features ``[B, D]``; ``ValueError`` if the head returns another shape."""
        logits = self.head(h)
        _check_matrix("head", "logits", logits, self.num_classes)
        return cast(Tensor, logits)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, C]`` of a batch ``[B, ...]``."""
        return self.classify(self.features(x))


class SplitModel(nn.Module):
    """A feature extractor and a predictor that meet at features of any shape, such as maps ``[B, K, H, W]``.

    For methods that send features and train a second predictor on them (FedGKT, FedDKC). Where a method wants
    vectors, :func:`as_feature_model` takes what enters the predictor's last ``Linear``.

    Parameters
    ----------
    extractor
        Maps a batch to features ``[B, ...]``.
    predictor
        Maps features to logits ``[B, C]``; must end in a ``Linear``.
    feature_shape
        Shape of one sample's features, to be checked; a client finds it out where it is not given.

    Raises
    ------
    TypeError
        If a part is not an ``nn.Module``.
    ValueError
        If the predictor does not end in a ``Linear``.

    Examples
    --------
    >>> stem = nn.Conv2d(1, 4, 3, padding=1)
    >>> model = SplitModel(stem, nn.Sequential(nn.Flatten(), nn.Linear(256, 10)))
    >>> model.features(torch.zeros(2, 1, 8, 8)).shape, model.num_classes
    (torch.Size([2, 4, 8, 8]), 10)
    """

    num_classes: int
    # Below 1 within slimmed(): the features are fewer then.
    _width: float = 1.0

    def __init__(
        self, extractor: nn.Module, predictor: nn.Module, *, feature_shape: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        for name, part in (("extractor", extractor), ("predictor", predictor)):
            if not isinstance(part, nn.Module):
                raise TypeError(f"{name} must be an nn.Module, got {_kind(part)}")
        self.num_classes = cast(int, as_feature_model(predictor).num_classes)
        self.feature_shape = None if feature_shape is None else tuple(feature_shape)
        self.extractor = extractor
        self.predictor = predictor

    def features(self, x: Tensor) -> Tensor:
        """Features ``[B, ...]`` of a batch; ``ValueError`` if they have not the shape that was given."""
        h = cast(Tensor, self.extractor(x))
        given = self.feature_shape if self._width == 1.0 else None
        if given is not None and tuple(h.shape[1:]) != given:
            raise ValueError(
                f"extractor: features must have the shape [B, {', '.join(map(str, given))}], "
                f"got {list(h.shape)}"
            )
        return h

    def classify(self, h: Tensor) -> Tensor:
        """Logits ``[B, C]`` of features."""
        logits = self.predictor(h)
        _check_matrix("predictor", "logits", logits, self.num_classes)
        return cast(Tensor, logits)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, C]`` of a batch ``[B, ...]``."""
        return self.classify(self.features(x))


# Everything of nn.Module's bookkeeping except `training`, which train() keeps in step, and the hooks around
# forward, which run when the original is called and must not run twice.
_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class _HeadTap(nn.Module):
    """A model with `features` and `classify` read off its final ``Linear``; see `as_feature_model`.

    It shares the original's registries of parameters, buffers and children, the dictionaries themselves.
    So names in the state, ``parameters()``, ``to()`` and later changes of the original are the original's
    own, and pickle and deepcopy, which keep shared objects shared, need no help. Neither subclassing the
    original's class nor registering it as a child would do: the first breaks models with a child called
    ``features`` (torchvision's AlexNet), the second prefixes every name.
    """

    _original: nn.Module
    _head_name: str

    def __init__(self, original: nn.Module, head_name: str) -> None:
        super().__init__()
        for registry in _SHARED:
            object.__setattr__(self, registry, original.__dict__[registry])
        # past nn.Module.__setattr__, which would register the original as a child
        object.__setattr__(self, "_original", original)
        self._head_name = head_name
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The model that was wrapped."""
        return self._original

    @property
    def feature_dim(self) -> int:
        """``D``: the width of what enters the final ``Linear``."""
        return self._linear().in_features

    @property
    def num_classes(self) -> int:
        """``C``: the width of what leaves the final ``Linear``."""
        return self._linear().out_features

    def _linear(self) -> nn.Linear:
        head = self.get_submodule(self._head_name)
        if not isinstance(head, nn.Linear):
            raise TypeError(
                f"{self._head_name!r} was a Linear when wrapped and is now {_kind(head)}: wrap again"
            )
        return head

    def features(self, x: Tensor) -> Tensor:
        """Return what enters the final ``Linear`` for the batch `x`: ``[B, D]``.

        Raises
        ------
        ValueError
            If the original's output is not what that ``Linear`` returned, as it returned it, or if it was
            given anything but a matrix.
        """
        head = self._linear()
        calls: list[tuple[Tensor, Tensor, int]] = []

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls.append((args[0] if args else kwargs["input"], output, _version(output)))

        handle: RemovableHandle = head.register_forward_hook(record, with_kwargs=True)
        try:
            logits = self._original(x)
        finally:
            handle.remove()
        for h, output, version in reversed(calls):
            if output is logits and _version(logits) == version:
                _check_matrix(f"{_kind(self._original)}: the input of {self._head_name!r}", "features", h)
                return h
        raise ValueError(
            f"{_kind(self._original)}: its output is not that of its Linear {self._head_name!r} "
            f"({'called, but something follows' if calls else 'which was not called'}). {_FIX}"
        )

    def classify(self, h: Tensor) -> Tensor:
        """Logits ``[B, C]`` of features ``[B, D]``."""
        return cast(Tensor, self._linear()(h))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Whatever the original returns, bit for bit."""
        return cast(Tensor, self._original(*args, **kwargs))

    def train(self, mode: bool = True) -> _HeadTap:
        """Set training mode through the original's own ``train``, which may keep layers frozen."""
        self._original.train(mode)
        self.training = self._original.training
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Look up a submodule of the original, where no method here hides a child's name."""
        return self._original.get_submodule(target)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _HeadTap:
        cast(Any, self._original)._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> _HeadTap:
        """Apply `fn` to the original and everything in it."""
        self._original.apply(fn)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._original._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._original._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the original's class and the head."""
        return f"{_kind(self._original)}, head={self._head_name!r}"


def as_feature_model(model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
    """Give any classifier `features` and `classify`.

    Parameters
    ----------
    model
        One of: a module that already has ``features()`` and ``classify()``; a pair ``(extractor, head)``;
        any other module (a :class:`SplitModel`, too) whose output is that of an ``nn.Linear``. Dropout, Flatten
        and the like may come before that ``Linear``; nothing but ``Identity`` may come after it.

    Returns
    -------
    nn.Module
        In the first case `model` itself. In the second a `FeatureModel`. In the third a wrapper whose
        features ``[B, D]`` are what enters the final ``Linear``, with ``feature_dim`` and ``num_classes``.
        The wrapper shares `model`'s parameters, buffers and training mode; its ``state_dict`` has the
        original's names and shapes, in both directions; its output is the original's bit for bit; it can be
        pickled and deep-copied where the original can.

    Raises
    ------
    TypeError
        If `model` is neither a module nor a pair of modules, or is a ``ScriptModule``.
    ValueError
        If the output is known not to be a ``Linear``'s: no ``Linear``, a softmax or another layer after it, a
        tuple as output; or if the ``Linear`` is lazy and has not seen data.

    Notes
    -----
    The final ``Linear`` is found by running a copy of the model on a symbolic input, on which no layer
    computes anything. A model that cannot run so (its control flow depends on the data) is taken to end in
    the last layer with parameters that it registers. Either way each call of ``features`` checks that the
    model's output is what this ``Linear`` returned, and raises ``ValueError`` otherwise.

    ``features`` runs the whole original, so forward hooks on it see the call.

    Examples
    --------
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2))
    >>> model = as_feature_model(net)
    >>> model.feature_dim, model.num_classes
    (3, 2)
    >>> list(model.state_dict()) == list(net.state_dict())
    True
    >>> as_feature_model(nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=1)))
    Traceback (most recent call last):
        ...
    ValueError: Sequential ends in Softmax '1', not in an nn.Linear: ...
    """
    if isinstance(model, tuple):
        if len(model) != 2:
            raise TypeError(f"model must be an nn.Module or a pair (extractor, head), got {len(model)} parts")
        return FeatureModel(*model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or a pair (extractor, head), got {_kind(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model must be a plain nn.Module, got {_kind(model)}: wrap it before scripting it")
    splits = callable(getattr(model, "features", None)) and callable(getattr(model, "classify", None))
    if splits and not isinstance(model, SplitModel):
        return model
    name = _final_linear(model)
    _check_not_lazy(cast(nn.Linear, model.get_submodule(name)), repr(name))
    return _HeadTap(model, name)


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, frozen ones included, a shared one once; buffers are none.

    Examples
    --------
    >>> count_parameters(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    21
    """
    return sum(parameter.numel() for parameter in model.parameters())


_FIX = (
    "Features are read off a final nn.Linear whose outputs are the logits; leave out what follows it, give a "
    "pair (extractor, head), or define features() and classify()"
)


class _Tracer(fx.proxy.GraphAppendingTracer):  # type: ignore[misc, unused-ignore]
    """Lets tensors of the model meet symbolic values; the recorded constants are never used."""

    def create_arg(self, a: Any) -> Any:
        return None if isinstance(a, torch.Tensor) else super().create_arg(a)


def _final_linear(model: nn.Module) -> str:
    """Name of the ``Linear`` that gives the model's output."""
    if isinstance(model, nn.Linear):
        return ""
    modules = dict(model.named_modules())
    try:
        output = _trace(model)
    except Exception:  # anything can happen in a user's forward on symbolic input; features() checks later
        return _last_registered_linear(model)
    if not isinstance(output, fx.Proxy):
        raise ValueError(f"{_kind(model)} returns {_kind(output)}, not a tensor of logits. {_FIX}")
    node = output.node
    while node.op == "call_module" and isinstance(modules[cast(str, node.target)], nn.Identity):
        node = node.all_input_nodes[0]
    if node.op != "call_module":
        what = "its input" if node.op == "placeholder" else getattr(node.target, "__name__", str(node.target))
        raise ValueError(
            f"{_kind(model)} ends in {what}, not in an nn.Linear: outputs must be logits. {_FIX}"
        )
    name = cast(str, node.target)
    if not isinstance(modules[name], nn.Linear):
        raise ValueError(
            f"{_kind(model)} ends in {_kind(modules[name])} {name!r}, not in an nn.Linear: outputs must be "
            f"logits. {_FIX}"
        )
    return name


def _trace(model: nn.Module) -> Any:
    """Run a copy of the model on a symbolic input and return its output.

    ``fx.symbolic_trace`` would do the same by replacing ``nn.Module.__call__`` for the whole process, which
    breaks models that run in other threads. Here only the copy's leaves are replaced.
    """
    tracer = _Tracer(fx.Graph())
    twin = copy.deepcopy(model).eval()

    def record(name: str) -> Callable[..., fx.Proxy]:
        def forward(*args: Any, **kwargs: Any) -> fx.Proxy:
            return tracer.create_proxy("call_module", name, args, kwargs)

        return forward

    for name, module in twin.named_modules():
        # hooks are the user's, and may keep what they see
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        if name and _is_leaf(module):
            object.__setattr__(module, "forward", record(name))
    return twin(fx.Proxy(tracer.create_node("placeholder", "x", (), {}), tracer))


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
        raise ValueError(f"{_kind(model)} has no layer with parameters, so no final nn.Linear. {_FIX}")
    name, module = last
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"{_kind(model)}: its last layer with parameters is {_kind(module)} {name!r}, not an nn.Linear. "
            f"{_FIX}"
        )
    return name


def _flat_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers of nested ``Sequential`` in their order, without ``Identity``."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _flat_layers(child)
    elif not isinstance(module, nn.Identity):
        yield module


def check_size(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return a model's size or seed after checking it: TypeError if it is no whole number, else ValueError."""
    return whole_number(name, value, least, most, error=ValueError, type_error=TypeError)


def _size(name: str, given: int | None, read: int | None, head: nn.Module) -> int:
    if given is None:
        if read is None:
            raise ValueError(f"{name} cannot be read from a head of type {_kind(head)}: give {name}=")
        return read
    check_size(name, given, 1)
    if read is not None and given != read:
        raise ValueError(f"{name} is {given}, but the head's Linear has {read}")
    return given


def _check_not_lazy(linear: nn.Linear, name: str) -> None:
    if is_lazy(linear.weight):
        raise ValueError(f"{name} is a lazy Linear without a size yet: run the model on one batch first")


def _check_matrix(who: str, what: str, value: object, width: int | None = None) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{who}: {what} must be a tensor, got {_kind(value)}")
    if value.dim() != 2 or width not in (None, value.shape[1]):
        wanted = "[B, D]" if width is None else f"[B, {width}]"
        raise ValueError(f"{who}: {what} must have the shape {wanted}, got {list(value.shape)}")


def _version(tensor: object) -> int:
    # tensors made in inference mode have no version counter
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _kind(value: object) -> str:
    return type(value).__name__
