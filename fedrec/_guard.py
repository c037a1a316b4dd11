"""Checks of what components return, and that they leave alone what they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedrec.exceptions import FedrecError, ShapeError

__all__ = ["left_alone", "returned"]


@contextmanager
def left_alone(who: str, error: type[FedrecError], **shown: Tensor | None) -> Iterator[None]:
    """Refuse that tensors are changed in place: others are shown them, and the history stores them.

    Args:
        who: Whose turn it is, for the error.
        error: Class of the error.
        shown: The tensors by name, or `None` for none.
    """
    before = {name: version_of(tensor) for name, tensor in shown.items()}
    yield
    for name, tensor in shown.items():
        if version_of(tensor) != before[name]:
            raise error(
                f"Expected {who} to leave `{name}` as it was given, but it changed it in place. "
                f"HINT: work on `{name}.clone()`."
            )


def version_of(tensor: Tensor | None) -> int | None:
    """Return a number that every change in place increases; inference tensors have none."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def returned(
    what: str,
    value: object,
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    error: type[FedrecError] = ShapeError,
) -> Tensor:
    """Return the tensor that a component has returned, without the graph it was computed by.

    Args:
        what: The method, for the error.
        value: What it returned.
        shape: The shape that it has to have.
        dtype: The dtype that it has to have.
        error: Class of the error.
    """
    if not isinstance(value, Tensor):
        raise error(
            f"Expected {what} to return a tensor of shape {tuple(shape)}, "
            f"but got {type(value).__name__}."
        )
    if value.shape != shape:
        raise error(
            f"Expected {what} to return shape {tuple(shape)}, but got {tuple(value.shape)}."
        )
    if value.dtype != dtype:
        raise error(f"Expected {what} to return {dtype}, but got {value.dtype}.")
    return value.detach() if value.requires_grad else value
