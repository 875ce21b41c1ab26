"""What a model takes for a batch: one tensor, or several by name, such as a Hugging Face model's.

All code that handles inputs goes through these functions, so that methods need not know which of the two they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flwr_kd.checks import ConfigError, DataError

__all__ = [
    "Inputs",
    "NamedDataset",
    "NamedInputs",
    "call",
    "changed",
    "is_finite",
    "joined",
    "logits_of",
    "one_tensor",
    "shape_text",
]


class NamedInputs:
    """A batch of several tensors by name, whose rows belong together.

    ``len`` is the number of samples. A text as index gives the tensor of that name, and rows give a part of the
    batch. ``module(**inputs)`` hands a module the tensors by name.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        ``[B, ...]`` each, at least one; names are those of the parameters of the model's ``forward``.

    Raises
    ------
    DataError
        If there is none, a name is no text, a value is no tensor, or the numbers of samples differ.

    Examples
    --------
    >>> batch = NamedInputs({"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.ones(2, 2)})
    >>> len(batch), list(batch.keys()), batch[1:]["input_ids"].tolist()
    (2, ['input_ids', 'attention_mask'], [[7, 0]])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        if not self._tensors:
            raise DataError("named inputs must have at least one tensor, got none")
        for name, value in self._tensors.items():
            if not isinstance(name, str):
                raise DataError(f"names of inputs must be texts, got {name!r}")
            if not isinstance(value, Tensor) or not value.ndim:
                got = "a number" if isinstance(value, Tensor) else type(value).__name__
                raise DataError(f"input {name!r} must be a tensor [B, ...], got {got}")
        counts = {name: len(value) for name, value in self._tensors.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"inputs of one batch must have the same number of samples, got {counts}")

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def keys(self) -> Iterable[str]:
        """Return the names, in the order in which they were given."""
        return self._tensors.keys()

    @overload
    def __getitem__(self, key: str) -> Tensor: ...

    @overload
    def __getitem__(self, key: slice | Tensor) -> NamedInputs: ...

    def __getitem__(self, key: str | slice | Tensor) -> Tensor | NamedInputs:
        if isinstance(key, str):
            return self._tensors[key]
        if not isinstance(key, slice | Tensor):
            raise TypeError(
                f"named inputs take a name, a slice or a tensor of rows, got {type(key).__name__}"
            )
        return self.map(lambda tensor: tensor[key])

    def map(self, change: Callable[[Tensor], Tensor]) -> NamedInputs:
        """Return the batch with each tensor changed by a function."""
        return NamedInputs({name: change(tensor) for name, tensor in self._tensors.items()})

    def to(self, *args: Any, **kwargs: Any) -> NamedInputs:
        """Return the batch with each tensor converted by :meth:`torch.Tensor.to`."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    @property
    def device(self) -> torch.device:
        """That of the first tensor."""
        return next(iter(self._tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __repr__(self) -> str:
        return f"NamedInputs({shape_text(self)})"


class NamedDataset(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """A data set in memory for models with several inputs, as :class:`torch.utils.data.TensorDataset` is for one.

    Parameters
    ----------
    inputs : mapping of str to Tensor
        ``[N, ...]`` each; see :class:`NamedInputs`.
    labels : Tensor, optional
        ``[N]``; zeros if None, for data without labels.

    Raises
    ------
    DataError
        If the inputs cannot be used, or the numbers of rows differ.

    Examples
    --------
    >>> data = NamedDataset({"input_ids": torch.tensor([[5], [7]]), "attention_mask": torch.ones(2, 1)})
    >>> len(data), data[1]
    (2, ({'input_ids': tensor([7]), 'attention_mask': tensor([1.])}, tensor(0)))
    """

    items_are_rows_of_tensors = True
    """Whether :attr:`tensors` is all that items are made of, so that batches can be taken from it at once."""

    def __init__(self, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> None:
        named = NamedInputs(inputs)
        if labels is None:
            labels = torch.zeros(len(named), dtype=torch.int64, device=named.device)
        if len(labels) != len(named):
            raise DataError(
                f"inputs and labels must have the same length, got {len(named)} and {len(labels)}"
            )
        self.tensors = (named, labels)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = self.tensors
        return {name: inputs[name][index] for name in inputs.keys()}, labels[index]  # noqa: SIM118


Inputs: TypeAlias = Tensor | NamedInputs
"""A batch's inputs: a tensor ``[B, ...]``, or several by name."""


def call(module: nn.Module, x: Inputs) -> Any:
    """Return a module's output on a batch; named inputs become keyword arguments.

    A module with the attribute ``takes_named_inputs`` gets them as they are. This package's own wrappers have it.

    Raises
    ------
    TypeError
        If the module takes no argument of one of the names.

    Examples
    --------
    >>> class Sum(nn.Module):
    ...     def forward(self, left, right):
    ...         return left + right
    >>> call(Sum(), NamedInputs({"right": torch.ones(1), "left": torch.zeros(1)})), call(nn.ReLU(), -torch.ones(1))
    (tensor([1.]), tensor([0.]))
    """
    if isinstance(x, Tensor) or getattr(module, "takes_named_inputs", False):
        return module(x)
    try:
        return module(**x)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise TypeError(
            f"{type(module).__name__} does not take the inputs {', '.join(x.keys())} by name ({error}): name those "
            "that it takes, for example input_key=['input_ids', 'attention_mask']"
        ) from error


def logits_of(output: Any) -> Any:
    """Return the ``logits`` of an output that has them, as those of Hugging Face's classifiers; else the output.

    >>> from types import SimpleNamespace
    >>> logits_of(SimpleNamespace(loss=None, logits=torch.ones(1))), logits_of(torch.zeros(1))
    (tensor([1.]), tensor([0.]))
    """
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def changed(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return a batch with its tensor, or each of them, changed by a function.

    >>> changed(torch.ones(1), torch.neg), changed(NamedInputs({"a": torch.ones(1)}), torch.neg)["a"]
    (tensor([-1.]), tensor([-1.]))
    """
    return change(x) if isinstance(x, Tensor) else x.map(change)


def is_finite(x: Inputs) -> bool:
    """Return whether all values of a batch are finite.

    >>> is_finite(NamedInputs({"ids": torch.ones(1), "values": torch.tensor([torch.nan])}))
    False
    """
    tensors = [x] if isinstance(x, Tensor) else [x[name] for name in x.keys()]  # noqa: SIM118
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def joined(batches: Sequence[Inputs]) -> Inputs:
    """Return batches as one; at least one must be given.

    Raises
    ------
    RuntimeError
        If their samples have different shapes.

    Examples
    --------
    >>> joined([torch.zeros(1), torch.ones(1)]), len(joined([NamedInputs({"ids": torch.ones(2, 1)})] * 2))
    (tensor([0., 1.]), 4)
    """
    if isinstance(batches[0], Tensor):
        return torch.cat([batch for batch in batches if isinstance(batch, Tensor)])
    named = [batch for batch in batches if isinstance(batch, NamedInputs)]
    return NamedInputs({name: torch.cat([batch[name] for batch in named]) for name in named[0].keys()})  # noqa: SIM118


def shape_text(x: Inputs) -> str:
    """Return the shape of one sample, or that of each of its inputs, for an error message.

    >>> shape_text(torch.zeros(2, 3)), shape_text(NamedInputs({"ids": torch.zeros(2, 3)}))
    ('[3]', 'ids [3]')
    """
    if isinstance(x, Tensor):
        return str(list(x.shape[1:]))
    return ", ".join(f"{name} {list(x[name].shape[1:])}" for name in x.keys())  # noqa: SIM118


def one_tensor(x: Inputs, refusal: Callable[[str], str]) -> Tensor:
    """Return a batch's only tensor, for a method that computes with the inputs themselves.

    Parameters
    ----------
    x : Tensor or NamedInputs
        The batch.
    refusal : callable
        Is given the names and shapes of what is refused, and returns the error's text: see
        :func:`flwr_kd.registry.needs_one_tensor`.

    Raises
    ------
    ConfigError
        If there are several inputs by name.

    Examples
    --------
    >>> one_tensor(NamedInputs({"input_ids": torch.ones(1, 2)}), lambda got: f"mine needs one tensor, got {got}")
    Traceback (most recent call last):
    flwr_kd.ConfigError: mine needs one tensor, got named inputs (input_ids [2])
    """
    if isinstance(x, Tensor):
        return x
    raise ConfigError(refusal(f"named inputs ({shape_text(x)})"))
