"""Weighted means and sums of client updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["mean_of_rows", "shares", "weighted_mean", "weighted_sum"]


def weighted_mean(updates: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Average client updates.

    $$\sum_{i=1}^m \frac{n_i}{\sum_k n_k} g_i$$

    Args:
        updates: Shape $(m, d)$.
        weights: $n_i \ge 0$ of any scale and with a positive sum, shape $(m,)$; `None` for equal
            ones. They are normalised in float64.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Examples:
        >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([200, 100]))
        tensor([2.])
    """
    if weights is None:
        weights = torch.ones(len(updates), dtype=torch.float64)
    return weighted_sum(updates, shares(weights, updates))


def weighted_sum(updates: Tensor, factors: Tensor) -> Tensor:
    """Add up client updates.

    Args:
        updates: Shape $(m, d)$.
        factors: Of the updates, with their dtype and device, shape $(m,)$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Examples:
        >>> weighted_sum(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 0.5]))
        tensor([4.])
    """
    if updates.dtype != torch.float32 or updates.requires_grad:
        return factors @ updates
    if choose_kernel(updates.device, *updates.shape) != "numba":
        return factors @ updates
    from fedrec.functional.kernels import _numba_sums

    total = torch.empty_like(updates[0])
    rows = updates.contiguous().numpy()
    _numba_sums.weighted_sum(rows, factors.numpy(), total.numpy(), torch.get_num_threads())
    return total


def shares(weights: Tensor, like: Tensor) -> Tensor:
    """Return weights divided by their sum, with the dtype and device of a tensor.

    The sum is in float64 where there is that.
    """
    weights = weights.to(wide_dtype(weights.device))
    return (weights / weights.sum()).to(like)


def mean_of_rows(updates: Tensor, rows: Tensor) -> Tensor:
    """Average some of the client updates, without copying them.

    Args:
        updates: Finite values, shape $(m, d)$.
        rows: Their row numbers, at least one, each once.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Examples:
        >>> mean_of_rows(torch.tensor([[1.0], [4.0], [3.0]]), torch.tensor([0, 2]))
        tensor([2.])
    """
    return weighted_mean(updates, torch.zeros(len(updates)).index_fill_(0, rows.cpu(), 1.0))
