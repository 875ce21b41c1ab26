"""Checks that the models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flwr_kd.checks import is_whole_number, whole_number

__all__ = ["check_matrix", "check_shape", "check_size", "type_name"]


def check_size(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return a model's size or seed; raise TypeError if it is no whole number, ValueError if out of range."""
    return whole_number(name, value, least, most, error=ValueError, type_error=TypeError)


def check_shape(
    name: str, smallest_side: int | None, shape: Sequence[int], argument: str = "input_shape"
) -> tuple[int, ...]:
    """Return the shape of one sample after checking it.

    Parameters
    ----------
    name
        The model, for error messages.
    smallest_side
        Least height and width of an image; None for models that take any shape.
    shape
        The shape, without the batch.
    argument
        The parameter's name, for error messages.

    Raises
    ------
    TypeError
        If the shape is not a sequence of ints.
    ValueError
        If it is empty, has a size below 1, or is not that of an image of at least the smallest side.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not all(map(is_whole_number, shape)):
        raise TypeError(f"{argument} must be a tuple of ints, got {shape!r}")
    sizes = tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{argument} must have at least one size and all at least 1, got {sizes}")
    if smallest_side is None:
        return sizes
    if len(sizes) != 3:
        raise ValueError(f"{name} takes an input_shape (channels, height, width), got {sizes}")
    if min(sizes[1:]) < smallest_side:
        raise ValueError(
            f"{name} cannot take {sizes[1]}x{sizes[2]} images: its smallest is {smallest_side}x{smallest_side}"
        )
    return sizes


def check_matrix(owner: str, what: str, value: object, width: int | None = None) -> None:
    """Raise ValueError unless a value is a tensor ``[B, width]``; any width where it is None."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{owner}: {what} must be a tensor, got {type_name(value)}")
    if value.dim() != 2 or width not in (None, value.shape[1]):
        expected = "[B, D]" if width is None else f"[B, {width}]"
        raise ValueError(f"{owner}: {what} must have the shape {expected}, got {list(value.shape)}")


def type_name(value: object) -> str:
    """Return the name of a value's class."""
    return type(value).__name__
