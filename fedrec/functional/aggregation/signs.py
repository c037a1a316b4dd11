"""What clients agree on about the sign of a coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sign_votes"]

# Columns whose signs are in memory at a time.
_COLUMNS = 1 << 14


def sign_votes(updates: Tensor) -> Tensor:
    r"""Count how many more clients want to raise than to lower each coordinate, or fewer.

    $$\sum_{i=1}^m \operatorname{sgn} g_i$$

    Args:
        updates: Shape $(m, d)$.

    Returns:
        Shape $(d,)$, float32, whole numbers.

    References:
        - Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault
          Tolerant, ICLR 2019.

    Examples:
        >>> sign_votes(torch.tensor([[5.0, -1.0, 0.0], [1.0, 7.0, -2.0]]))
        tensor([ 2.,  0., -1.])
    """
    blocks = updates.split(_COLUMNS, dim=1)
    return torch.cat([columns.sign().sum(dim=0, dtype=torch.float32) for columns in blocks])
