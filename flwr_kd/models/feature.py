"""Classifiers that consist of a feature extractor and a head, and how to split any classifier into these two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_kd.inputs import Inputs, call
from flwr_kd.models.checks import check_matrix, check_size, type_name
from flwr_kd.models.given import plain_model
from flwr_kd.models.head import HeadTap, final_linear

__all__ = ["FeatureModel", "SplitModel", "as_feature_model", "count_parameters", "find_head"]

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
        ``D``, at least 1. If None, it is read from the head, which must be a ``Linear`` or a ``Sequential`` with
        a ``Linear`` in it.
    num_classes
        ``C``, at least 1. If None, it is read from the head, which must be a ``Linear`` or a ``Sequential`` that
        ends in one.

    Attributes
    ----------
    extractor, head
        The two modules; names in the state start with ``extractor.`` and ``head.``.
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
    >>> import torch
    >>> model = FeatureModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
    >>> model.feature_dim, model.num_classes
    (3, 2)
    >>> model.features(torch.zeros(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """

    feature_dim: int
    num_classes: int
    takes_named_inputs = True
    # Below 1 within slimmed(), where there are fewer features.
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
        extractor, head = plain_model((extractor, head))
        for name, part in (("extractor", extractor), ("head", head)):
            if not isinstance(part, nn.Module):
                raise TypeError(f"{name} must be an nn.Module, got {type_name(part)}")
        layers = list(_flat_layers(head))
        if layers and isinstance(layers[-1], _NOT_LOGITS):
            raise ValueError(
                f"head ends in {type_name(layers[-1])}: its outputs must be logits, leave that layer out"
            )
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        for linear in linears:
            _check_not_lazy(linear, "head")
        inputs = linears[0].in_features if linears else None
        outputs = linears[-1].out_features if linears and layers[-1] is linears[-1] else None
        if feature_dim is not None and layers and layers[0] not in linears:
            inputs = None  # a layer before the Linear may change the width, so that both numbers can be right
        self.feature_dim = _size("feature_dim", feature_dim, inputs, head)
        self.num_classes = _size("num_classes", num_classes, outputs, head)
        self.extractor = extractor
        self.head = head

    def features(self, x: Inputs) -> Tensor:
        """Return the features of a batch.

        Parameters
        ----------
        x
            Inputs of the extractor, batch first: ``[B, ...]``.

        Returns
        -------
        Tensor
            ``[B, D]``.

        Raises
        ------
        ValueError
            If the extractor returns another shape.
        """
        h = call(self.extractor, x)
        check_matrix("extractor", "features", h, self.feature_dim if self._width == 1.0 else None)
        return cast(Tensor, h)

    def classify(self, h: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of features ``[B, D]``; raise ValueError if the head returns another shape."""
        logits = self.head(h)
        check_matrix("head", "logits", logits, self.num_classes)
        return cast(Tensor, logits)

    def forward(self, x: Inputs) -> Tensor:
        """Return logits ``[B, C]`` of a batch ``[B, ...]``."""
        return self.classify(self.features(x))


class SplitModel(nn.Module):
    """A feature extractor and a predictor, for features of any shape such as maps ``[B, K, H, W]``.

    It is for methods that send features and train a second predictor on them (FedGKT, FedDKC). For methods that
    need vectors, :func:`as_feature_model` uses the inputs of the predictor's last ``Linear`` as features.

    Parameters
    ----------
    extractor
        Maps a batch to features ``[B, ...]``.
    predictor
        Maps features to logits ``[B, C]``; must end in a ``Linear``.
    feature_shape
        Shape of one sample's features, which is then checked. If None, a client determines it from its data.

    Raises
    ------
    TypeError
        If a part is not an ``nn.Module``.
    ValueError
        If the predictor does not end in a ``Linear``.

    Examples
    --------
    >>> import torch
    >>> stem = nn.Conv2d(1, 4, 3, padding=1)
    >>> model = SplitModel(stem, nn.Sequential(nn.Flatten(), nn.Linear(256, 10)))
    >>> model.features(torch.zeros(2, 1, 8, 8)).shape, model.num_classes
    (torch.Size([2, 4, 8, 8]), 10)
    """

    num_classes: int
    takes_named_inputs = True
    # Below 1 within slimmed(), where there are fewer features.
    _width: float = 1.0

    def __init__(
        self, extractor: nn.Module, predictor: nn.Module, *, feature_shape: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        extractor, predictor = plain_model((extractor, predictor))
        for name, part in (("extractor", extractor), ("predictor", predictor)):
            if not isinstance(part, nn.Module):
                raise TypeError(f"{name} must be an nn.Module, got {type_name(part)}")
        self.num_classes = cast(int, as_feature_model(predictor).num_classes)
        self.feature_shape = None if feature_shape is None else tuple(feature_shape)
        self.extractor = extractor
        self.predictor = predictor

    def features(self, x: Inputs) -> Tensor:
        """Return features ``[B, ...]`` of a batch; raise ValueError if they do not have `feature_shape`."""
        h = cast(Tensor, call(self.extractor, x))
        given = self.feature_shape if self._width == 1.0 else None
        if given is not None and tuple(h.shape[1:]) != given:
            raise ValueError(
                f"extractor: features must have the shape [B, {', '.join(map(str, given))}], "
                f"got {list(h.shape)}"
            )
        return h

    def classify(self, h: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of features."""
        logits = self.predictor(h)
        check_matrix("predictor", "logits", logits, self.num_classes)
        return cast(Tensor, logits)

    def forward(self, x: Inputs) -> Tensor:
        """Return logits ``[B, C]`` of a batch ``[B, ...]``."""
        return self.classify(self.features(x))


def as_feature_model(model: nn.Module | tuple[nn.Module, nn.Module]) -> nn.Module:
    """Give any classifier `features` and `classify`.

    Parameters
    ----------
    model
        One of: a module that already has ``features()`` and ``classify()``; a pair ``(extractor, head)``;
        any other module whose output is that of an ``nn.Linear``, including a :class:`SplitModel`. Other layers
        may precede that ``Linear``; only ``Identity`` may follow it.

    Returns
    -------
    nn.Module
        In the first case `model` itself, in the second a `FeatureModel`. In the third a wrapper whose
        features ``[B, D]`` are the inputs of the final ``Linear``, with ``feature_dim`` and ``num_classes``.
        The wrapper shares `model`'s parameters, buffers and training mode. Its ``state_dict`` has the
        original's names and shapes, for saving and for loading. Its output is the original's, bit for bit. It can
        be pickled and deep-copied if the original can. Of a model that went through ``torch.compile``, the module
        inside counts.

    Raises
    ------
    TypeError
        If `model` is neither a module nor a pair of modules, is a ``ScriptModule``, or is wrapped for training on
        several devices.
    ValueError
        If the model computes per-sample gradients (Opacus). If the output is known not to be a ``Linear``'s: no
        ``Linear``, a softmax or another layer after it, a tuple as output; or if the ``Linear`` is lazy and has not
        seen data.

    Notes
    -----
    The final ``Linear`` is found by running a copy of the model on a symbolic input, on which no layer
    computes anything. If this fails (for example because the control flow depends on the data), the last
    registered layer with parameters is used. In both cases each call of ``features`` checks that the
    model's output is what this ``Linear`` returned, and raises ``ValueError`` otherwise.

    ``features`` runs the whole original, including its forward hooks.

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
        raise TypeError(f"model must be an nn.Module or a pair (extractor, head), got {type_name(model)}")
    model = plain_model(model)
    splits = callable(getattr(model, "features", None)) and callable(getattr(model, "classify", None))
    if splits and not isinstance(model, SplitModel):
        return model
    name = final_linear(model)
    _check_not_lazy(cast(nn.Linear, model.get_submodule(name)), repr(name))
    return HeadTap(model, name)


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the module that maps features to logits in a model of :func:`as_feature_model`.

    None of a model with ``features`` and ``classify`` of its own that has no module named ``head``.

    >>> find_head(as_feature_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))))
    Linear(in_features=3, out_features=2, bias=True)
    """
    if isinstance(model, HeadTap):
        return model.tapped_linear()
    head = model.predictor if isinstance(model, SplitModel) else getattr(model, "head", None)
    return head if isinstance(head, nn.Module) else None


def count_parameters(model: nn.Module) -> int:
    """Count the parameters, including frozen ones. A shared one counts once; buffers do not count.

    Examples
    --------
    >>> count_parameters(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    21
    """
    return sum(parameter.numel() for parameter in model.parameters())


def _flat_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested ``Sequential`` in their order, without ``Identity``."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _flat_layers(child)
    elif not isinstance(module, nn.Identity):
        yield module


def _size(name: str, given: int | None, of_head: int | None, head: nn.Module) -> int:
    """Return a size that was given, or else that of the head; raise ValueError if the two differ."""
    if given is None:
        if of_head is None:
            raise ValueError(f"{name} cannot be read from a head of type {type_name(head)}: give {name}=")
        return of_head
    check_size(name, given, 1)
    if of_head is not None and given != of_head:
        raise ValueError(f"{name} is {given}, but the head's Linear has {of_head}")
    return given


def _check_not_lazy(linear: nn.Linear, name: str) -> None:
    if is_lazy(linear.weight):
        raise ValueError(f"{name} is a lazy Linear without a size yet: run the model on one batch first")
