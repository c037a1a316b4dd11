"""How well updates agree with other vectors, one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_blocks, wide_dtype

__all__ = ["row_cosines", "sign_agreement"]


def row_cosines(updates: Tensor, others: Tensor) -> Tensor:
    r"""Compute the cosine of the angle between every update and its counterpart.

    Args:
        updates: Finite values, shape $(m, d)$.
        others: Finite values: the counterparts, shape $(m, d)$, or one for all, shape $(d,)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without), in [-1, 1]; 0 where a vector is zero.

    Examples:
        >>> updates = torch.tensor([[2.0, 0.0], [0.0, -1.0]])
        >>> row_cosines(updates, torch.tensor([3.0, 4.0]))
        tensor([ 0.6000, -0.8000], dtype=torch.float64)
    """
    wide = wide_dtype(updates.device)
    products, left, right = torch.zeros(3, len(updates), dtype=wide, device=updates.device)
    pairs = zip(wide_blocks(updates), wide_blocks(torch.atleast_2d(others)), strict=True)
    for a, b in pairs:
        products += torch.linalg.vecdot(a, b)
        left += torch.linalg.vecdot(a, a)
        right += torch.linalg.vecdot(b, b)
    lengths = left.sqrt() * right.sqrt()
    return torch.where(lengths > 0, products / lengths, 0.0).clamp_(-1, 1)


def sign_agreement(before: Tensor, after: Tensor) -> Tensor:
    r"""Compute the fraction of every update's entries that had the same sign before.

    Args:
        before: Shape $(m, d)$.
        after: Shape $(m, d)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without), in [0, 1]. Zero is a sign of its own.

    Examples:
        >>> before = torch.tensor([[1.0, -2.0, 0.0, 3.0]])
        >>> sign_agreement(before, torch.tensor([[5.0, 1.0, 0.0, 1.0]]))
        tensor([0.7500], dtype=torch.float64)
    """
    return (before.sign() == after.sign()).to(wide_dtype(before.device)).mean(dim=1)
