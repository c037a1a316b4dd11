"""Inner products, norms and distances of client updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_blocks, wide_dtype

__all__ = ["distances_of", "gram_matrix", "pairwise_squared_distances", "squared_norms"]


def gram_matrix(updates: Tensor, center: Tensor | None = None) -> Tensor:
    r"""Compute the inner products of every two clients' updates.

    $$(g_i - c)^\top (g_j - c)$$

    A block of columns at a time is widened to float64. Far from the origin, a center near most
    updates saves the digits that their differences would otherwise lose.

    Args:
        updates: Finite values, shape $(m, d)$.
        center: $c$, shape $(d,)$; `None` for the origin.

    Returns:
        Shape $(m, m)$, symmetric, float64 (float32 on a device without), on the device of
        `updates`.

    Examples:
        >>> gram_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[ 5., 11.],
                [11., 25.]], dtype=torch.float64)
    """
    m = len(updates)
    gram = torch.zeros(m, m, dtype=wide_dtype(updates.device), device=updates.device)
    for block in wide_blocks(updates.detach(), center):
        if block.device.type == "cpu" and torch.get_num_threads() > 1:
            values = block.numpy()
            # NumPy computes one half, twice as fast, on all processors there are.
            gram += torch.from_numpy(values @ values.T)
        else:
            gram.addmm_(block, block.mT)
    # A matrix product need not be symmetric to the last bit.
    return (gram + gram.mT) / 2


def squared_norms(updates: Tensor, center: Tensor | None = None) -> Tensor:
    r"""Compute the squared Euclidean norm of every client's update.

    $$\lVert g_i - c \rVert^2$$

    Args:
        updates: Finite values, shape $(m, d)$.
        center: $c$, shape $(d,)$; `None` for the origin.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without), on the device of `updates`: no finite
        float32 value overflows.

    Examples:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([25.,  1.], dtype=torch.float64)
    """
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    for block in wide_blocks(updates, center):
        total += torch.linalg.vecdot(block, block)
    return total


def pairwise_squared_distances(updates: Tensor) -> Tensor:
    r"""Compute the squared Euclidean distance of every two clients' updates.

    $$\lVert g_i - g_j \rVert^2 = \lVert g_i \rVert^2 + \lVert g_j \rVert^2 - 2 g_i^\top g_j$$

    All the products $g_i^\top g_j$ are one Gram matrix, computed in float64. The difference cancels
    digits: its error is up to some $10^{-14}$ of $\lVert g_i \rVert^2 + \lVert g_j \rVert^2$,
    hardly more than what rounding the updates to float32 does to it. That holds a pair at a time:
    however large the update of one client, the distances between the others keep their digits, and
    no finite float32 value overflows.

    Args:
        updates: Finite values, shape $(m, d)$.

    Returns:
        Shape $(m, m)$, float64 (float32 on a device without), on the device of `updates`:
        symmetric, non-negative, with zeros on the diagonal.

    References:
        - Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
          NeurIPS 2017.

    Examples:
        >>> pairwise_squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
    """
    return distances_of(gram_matrix(updates))


def distances_of(gram: Tensor) -> Tensor:
    """Compute the squared Euclidean distances of vectors, given their inner products.

    Args:
        gram: Shape $(m, m)$, symmetric, see `gram_matrix`.

    Returns:
        Shape $(m, m)$: symmetric, non-negative, with zeros on the diagonal.
    """
    norms = gram.diagonal()
    distances = norms[:, None] + norms - 2 * gram
    return distances.clamp_(min=0).fill_diagonal_(0)
