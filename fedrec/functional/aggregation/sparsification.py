"""What is left of updates without their smaller entries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["keep_largest", "positive_purity", "size_of_last"]


def size_of_last(row: Tensor, count: int) -> Tensor:
    """Return the size of the smallest of the largest entries.

    Args:
        row: Finite values, shape $(d,)$.
        count: How many entries count as the largest, from 1 to $d$.

    Returns:
        A number, shape $()$.

    Examples:
        >>> size_of_last(torch.tensor([3.0, -4.0, 0.5]), 2)
        tensor(3.)
    """
    sizes, rank = row.detach().abs(), len(row) - count
    if row.device.type == "cpu" and row.dtype in (torch.float32, torch.float64):
        # Many times as fast as torch's.
        return torch.from_numpy(np.partition(sizes.numpy(), rank)[rank : rank + 1])[0]
    return sizes.kthvalue(rank + 1).values


def keep_largest(updates: Tensor, count: int) -> Tensor:
    r"""Set all but the largest entries of every update to zero.

    Entries that are as large as the last of the $k$ are kept, too.

    Args:
        updates: Finite values, shape $(m, d)$.
        count: $k$, from 1 to $d$.

    Returns:
        Shape $(m, d)$: a new tensor.

    Examples:
        >>> keep_largest(torch.tensor([[3.0, -4.0, 0.5]]), 2)
        tensor([[ 3., -4.,  0.]])
    """
    limits = torch.stack([size_of_last(row, count) for row in updates])
    return torch.where(updates.abs() >= limits[:, None], updates, 0.0)


def positive_purity(updates: Tensor) -> Tensor:
    r"""Compute how far the entries of every update other than zero are positive.

    $$\rho_i = \frac12 \left( 1 + \frac{\sum_j \operatorname{sgn} g_{ij}}
    {\sum_j \lvert \operatorname{sgn} g_{ij} \rvert} \right)$$

    which is the fraction of them that are.

    Args:
        updates: Shape $(m, d)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without); 1/2 for an update of zeros.

    References:
        - Xu et al., Achieving Byzantine-Resilient Federated Learning via Layer-Adaptive Sparsified
          Model Aggregation, WACV 2025.

    Examples:
        >>> positive_purity(torch.tensor([[2.0, 0.0, -1.0, 5.0], [0.0, 0.0, 0.0, 0.0]]))
        tensor([0.6667, 0.5000], dtype=torch.float64)
    """
    wide = wide_dtype(updates.device)
    positive = (updates > 0).sum(dim=1).to(wide)
    negative = (updates < 0).sum(dim=1).to(wide)
    total = positive + negative
    return torch.where(total > 0, positive / total, 0.5)
