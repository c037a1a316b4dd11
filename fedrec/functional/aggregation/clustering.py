"""Which clients belong together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["largest_mode", "majority_cluster"]

_MAX_SHIFTS = 300
_TOLERANCE = 1e-3


def majority_cluster(distances: Tensor) -> Tensor:
    r"""Find the densest group of more than half of the clients.

    The group is the smallest set of at least $\lfloor m/2 \rfloor + 1$ clients that single linkage
    joins. It is what HDBSCAN with this `min_cluster_size`, `min_samples=1` and a single cluster
    allowed returns: two clusters of that size cannot exist, so the tree is cut where the only one
    would fall apart.

    Args:
        distances: Shape $(m, m)$, symmetric.

    Returns:
        Shape $(m,)$, bool, on the CPU.

    References:
        - Campello et al., Density-Based Clustering Based on Hierarchical Density Estimates, PAKDD
          2013.

    Examples:
        >>> x = torch.tensor([0.0, 1.0, 1.5, 2.0, 7.0])
        >>> majority_cluster((x[:, None] - x).abs())
        tensor([False,  True,  True,  True, False])
    """
    matrix = distances.cpu().double().numpy()
    m = len(matrix)
    # Prim's tree enters a group that is within a distance only once, so groups are stretches of its
    # order between edges that are longer.
    order, heights = np.zeros(m, dtype=int), np.full(m, np.inf)
    nearest, left = matrix[0].copy(), np.ones(m, dtype=bool)
    left[0] = False
    for step in range(1, m):
        order[step] = np.where(left, nearest, np.inf).argmin()
        heights[step] = nearest[order[step]]
        left[order[step]] = False
        nearest = np.minimum(nearest, matrix[order[step]])
    inside = torch.zeros(m, dtype=torch.bool)
    size = m // 2 + 1
    if size == 1:
        return ~inside
    reach = np.lib.stride_tricks.sliding_window_view(heights[1:], size - 1).max(axis=1)
    limit, begin = reach.min(), int(reach.argmin())
    end = begin + size
    while heights[begin] <= limit:
        begin -= 1
    while end < m and heights[end] <= limit:
        end += 1
    inside[torch.from_numpy(order[begin:end])] = True
    return inside


def largest_mode(points: Tensor) -> Tensor:
    r"""Find the largest cluster by mean shift with a flat kernel.

    The bandwidth is the distance from a point to the farthest of the half of the points that is
    nearest to it, itself included, averaged over the points. Every point moves to the mean of the
    points within the bandwidth until no point moves any more. Modes within the bandwidth of a more
    populous one are dropped, and every point belongs to the nearest mode within the bandwidth, or
    to none.

    Args:
        points: Shape $(m, p)$.

    Returns:
        Shape $(m,)$, bool, on the CPU.

    References:
        - Comaniciu and Meer, Mean Shift: A Robust Approach toward Feature Space Analysis, PAMI
          2002.

    Examples:
        >>> largest_mode(torch.tensor([[0.0], [0.1], [0.2], [0.9]]))
        tensor([ True,  True,  True, False])
    """
    points = points.cpu().double()
    m = len(points)
    bandwidth = _distances(points, points).sort(dim=1).values[:, max(m // 2, 1) - 1].mean()
    modes = points
    for _ in range(_MAX_SHIFTS):
        near = (_distances(modes, points) <= bandwidth).double()
        shifted = near @ points / near.sum(dim=1, keepdim=True)
        moved = (shifted - modes).norm(dim=1).max()
        modes = shifted
        if moved <= _TOLERANCE * bandwidth:
            break
    populations = (_distances(modes, points) <= bandwidth).sum(dim=1).tolist()
    ranked = sorted(zip(populations, modes.tolist(), strict=True), reverse=True)
    kept: list[Tensor] = []
    for _, mode in ranked:
        candidate = torch.tensor([mode], dtype=torch.float64)
        if not kept or bool((_distances(candidate, torch.cat(kept)) > bandwidth).all()):
            kept.append(candidate)
    nearest = _distances(points, torch.cat(kept)).min(dim=1)
    labels = torch.where(nearest.values <= bandwidth, nearest.indices, len(kept))
    sizes = labels.bincount(minlength=len(kept))[: len(kept)]
    return labels == int(sizes.argmax())


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
