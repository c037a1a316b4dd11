"""Mixing client updates before they are aggregated."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.distances import pairwise_squared_distances

__all__ = ["bucket_means", "mixing_of", "nearest_neighbor_mixing"]


def nearest_neighbor_mixing(updates: Tensor, num_neighbors: int) -> Tensor:
    r"""Replace every update by the mean of those that are nearest to it, itself included.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_neighbors: How many are averaged, $m - f$ in the paper; from 1 to $m$.

    Returns:
        Shape $(m, d)$, dtype and device of `updates`.

    References:
        - Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity,
          AISTATS 2023.

    Examples:
        >>> nearest_neighbor_mixing(torch.tensor([[0.0], [2.0], [9.0]]), num_neighbors=2)
        tensor([[1.0000],
                [1.0000],
                [5.5000]])
    """
    # A matrix product takes no more memory than its result; gathering the rows, k times that.
    return mixing_of(pairwise_squared_distances(updates), num_neighbors).to(updates) @ updates


def mixing_of(distances: Tensor, num_neighbors: int) -> Tensor:
    """Return the matrix that `nearest_neighbor_mixing` multiplies the updates with.

    Args:
        distances: Of every two updates, shape $(m, m)$.
        num_neighbors: See `nearest_neighbor_mixing`.

    Returns:
        Shape $(m, m)$; rows with sum 1.
    """
    nearest = distances.argsort(dim=1, stable=True)[:, :num_neighbors]
    return torch.zeros_like(distances).scatter_(1, nearest, 1 / num_neighbors)


def bucket_means(updates: Tensor, order: Tensor, bucket_size: int) -> Tensor:
    r"""Average client updates within buckets.

    Args:
        updates: Shape $(m, d)$.
        order: A permutation of the rows, shape $(m,)$: each bucket takes the next ones.
        bucket_size: Rows of a bucket, $s$. The last one may get fewer, and is divided by their
            number.

    Returns:
        Shape $(\lceil m / s \rceil, d)$, dtype and device of `updates`.

    References:
        - Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing,
          ICLR 2022.

    Examples:
        >>> bucket_means(torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([0, 2, 1]), 2)
        tensor([[3.5000],
                [2.0000]])
    """
    m = len(updates)
    bucket = torch.empty(m, dtype=torch.int64)
    bucket[order.cpu()] = torch.arange(m) // bucket_size
    members = torch.nn.functional.one_hot(bucket).T.double()
    return (members / members.sum(dim=1, keepdim=True)).to(updates) @ updates
