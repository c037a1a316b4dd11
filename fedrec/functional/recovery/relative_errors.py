"""How far vectors are from what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_blocks, wide_dtype

__all__ = ["relative_errors"]


def relative_errors(estimates: Tensor, exact: Tensor) -> Tensor:
    r"""Compute $\lVert \hat g^i - g^i \rVert / \lVert g^i \rVert$ for every row.

    Args:
        estimates: $\hat g$, shape $(m, d)$.
        exact: $g$, shape $(m, d)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without). Where the exact row is zero: 0 if the
        estimate is zero, too, else infinity.

    Examples:
        >>> relative_errors(torch.tensor([[3.0, 3.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.0]] * 2))
        tensor([0.2000, 1.0000], dtype=torch.float64)
    """
    difference, length = torch.zeros(
        2, len(exact), dtype=wide_dtype(exact.device), device=exact.device
    )
    for a, b in zip(wide_blocks(estimates), wide_blocks(exact), strict=True):
        difference += torch.linalg.vecdot(a - b, a - b)
        length += torch.linalg.vecdot(b, b)
    return torch.where(difference > 0, (difference / length).sqrt(), 0.0)
