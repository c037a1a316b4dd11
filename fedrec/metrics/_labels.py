"""Predicted labels from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.exceptions import ShapeError

__all__ = ["predicted_labels"]


def predicted_labels(preds: Tensor, target: Tensor) -> Tensor:
    """Return predicted labels $(B,)$, given logits $(B, C)$ or labels $(B,)$.

    A row of logits with a NaN predicts no label at all, which is written as -1: the argmax of a
    diverged model would be an arbitrary class, possibly the attacker's.
    """
    is_logits = preds.ndim == 2 and preds.is_floating_point()
    is_labels = preds.ndim == 1 and not preds.is_floating_point()
    if not (is_logits or is_labels) or target.shape != preds.shape[:1]:
        raise ShapeError(
            "Expected `preds` to be logits (B, C) or integer labels (B,) and `target` to be (B,), "
            f"but got {preds.dtype} of shape {tuple(preds.shape)} and {tuple(target.shape)}."
        )
    if is_labels:
        return preds
    return torch.where(preds.isnan().any(dim=1), -1, preds.argmax(dim=1))
