"""Predicted and true labels, from a model's outputs and a data set's targets."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.exceptions import ConfigurationError, ShapeError

__all__ = ["UndefinedRateError", "decisions", "has_one_logit_each", "num_classes"]

# Positions with this label are left out, as in torch's `cross_entropy`.
_IGNORED = -100


class UndefinedRateError(ConfigurationError):
    """Targets are numbers and not labels, so that no rate of wrong labels is defined."""


def decisions(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predicted and true labels, of one shape; flat if positions are left out.

    Logits with a NaN among them predict no label, which is written as -1: the argmax of a
    diverged model would be an arbitrary class, possibly the attacker's.

    Args:
        preds: Logits of classes $(B, C, ...)$; one logit for each label; or integer labels.
        target: Labels $(B, ...)$.

    Raises:
        UndefinedRateError: If the targets are numbers, not labels.
        ShapeError: If shapes or labels do not fit.
    """
    if preds.shape == target.shape and not preds.is_floating_point():
        return preds, target
    if has_one_logit_each(preds, target):
        _require_zero_or_one(target)
        target = target.reshape(preds.shape)
        return torch.where(preds.isnan(), -1, (preds > 0).long()), target.long()
    positions = (*preds.shape[:1], *preds.shape[2:])
    if not preds.is_floating_point() or preds.ndim < 2 or target.shape != positions:
        raise ShapeError(
            "Expected `preds` to be logits (B, C, ...) for `target` (B, ...), one logit for each "
            f"label in `target`, or integer labels, but got {preds.dtype} of shape "
            f"{tuple(preds.shape)} for {tuple(target.shape)}."
        )
    if target.is_floating_point():
        raise UndefinedRateError(_undefined(target))
    labels = torch.where(preds.isnan().any(dim=1), -1, preds.argmax(dim=1))
    kept, classes = target != _IGNORED, preds.shape[1]
    if not bool(kept.all()):
        labels, target = labels[kept], target[kept]
    outside = target[(target < 0) | (target >= classes)]
    if len(outside):
        raise ShapeError(
            f"Expected labels in 0..{classes - 1}, as many as the model has outputs, but got "
            f"{int(outside[0])}. HINT: give the model as many outputs as there are classes; a "
            f"label of {_IGNORED} leaves a position out."
        )
    return labels, target


def has_one_logit_each(preds: Tensor, target: Tensor) -> bool:
    """Whether there is one logit for each label: shapes are equal, except a dimension of 1."""
    if not preds.is_floating_point():
        return False
    shapes = {tuple(preds.shape), tuple(target.shape)}
    if len(shapes) == 1:
        return True
    longer, shorter = sorted(shapes, key=len, reverse=True)
    return longer[1:2] == (1,) and shorter == (*longer[:1], *longer[2:])


def num_classes(preds: Tensor, target: Tensor) -> int | None:
    """Return the number of labels that a prediction chooses from; `None` if `preds` are labels."""
    if has_one_logit_each(preds, target):
        return 2
    return preds.shape[1] if preds.is_floating_point() and preds.ndim > 1 else None


def _require_zero_or_one(target: Tensor) -> None:
    other = target[(target != 0) & (target != 1)]
    if not len(other):
        return
    if target.is_floating_point():
        raise UndefinedRateError(_undefined(other))
    raise ShapeError(
        f"Expected labels 0 and 1 where the model gives one logit for each label, but got "
        f"{other[0].item()}. HINT: give the model one output for each class; numbers to regress on "
        "have to be floating-point."
    )


def _undefined(target: Tensor) -> str:
    value = f"{target.flatten()[0].item():g}" if target.numel() else "none"
    return (
        f"The test error rate is undefined for targets that are numbers and not labels "
        f"({str(target.dtype).removeprefix('torch.')}, such as {value}). HINT: measure something "
        'else with `FederatedLoop(metrics={"mse": MeanSquaredError()})`, or `metrics` in a recipe; '
        "class labels are integers."
    )
