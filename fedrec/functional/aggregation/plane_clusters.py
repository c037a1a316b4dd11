"""Clusters of points in a plane, whose number is not known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.random import numpy_generator

__all__ = ["gap_clusters"]

# Dispersions of points in the unit cube below this count as zero; keeps logarithms finite.
_TINY = 1e-12
_STARTS = 3


def gap_clusters(
    points: Tensor, max_clusters: int = 10, num_references: int = 5, seed: int = 0
) -> Tensor:
    r"""Cut points into as many clusters as the gap statistic finds, by k-means.

    With $W_k$ the sum of squared distances to the centres of $k$ clusters and $W_k^*$ that of
    reference sets of the same size, uniform over the range of every coordinate,

    $$\mathrm{Gap}(k) = \overline{\log W_k^*} - \log W_k, \qquad
    s_k = \sqrt{1 + 1/B}\; \mathrm{std}(\log W_k^*)$$

    the number of clusters is the smallest $k$ with $\mathrm{Gap}(k) \ge \mathrm{Gap}(k+1) -
    s_{k+1}$, or the largest tried.

    Args:
        points: Shape $(m, p)$, finite.
        max_clusters: Largest number of clusters tried (at most $m - 1$ are).
        num_references: Number $B$ of reference sets.
        seed: Seed of the reference sets and of the starts of k-means.

    Returns:
        Shape $(m,)$, int64, on the CPU: the cluster of every point, counted from 0. It does not
        depend on the order of the points.

    References:
        - Tibshirani, Walther, Hastie, Estimating the Number of Clusters in a Data Set via the Gap
          Statistic, JRSS B 2001.

    Examples:
        >>> x = torch.tensor([[0.0, 0.1], [0.1, 0.0], [0.1, 0.1], [9.0, 9.0], [9.1, 9.0]])
        >>> gap_clusters(x).tolist()
        [0, 0, 0, 1, 1]
    """
    values = points.detach().cpu().double().numpy()
    order = np.lexsort(values.T[::-1])  # k-means starts from random rows
    extent = values.max(axis=0) - values.min(axis=0)
    unit = extent.max() if extent.max() > 0 else 1.0
    scaled = (values[order] - values.min(axis=0)) / unit
    scaled = scaled.round(12)  # points that rounding alone tells apart are one
    top = min(max_clusters, len(np.unique(scaled, axis=0)) - 1)
    if top < 2:
        return torch.zeros(len(values), dtype=torch.int64)
    draws = numpy_generator(seed, "gap-clusters").random((num_references, *values.shape))
    draws = draws * extent / unit
    inflation = np.sqrt(1 + 1 / num_references)
    found, before = np.zeros(len(values), dtype=np.int64), -np.inf
    for k in range(1, top + 1):
        clusters, spread = _clustered(scaled, k, seed)
        w = np.log([max(_clustered(x, k, seed)[1], _TINY) for x in draws])
        gap = w.mean() - np.log(max(spread, _TINY))
        if before >= gap - inflation * w.std():
            break
        found, before = clusters, gap
    labels = np.empty(len(values), dtype=np.int64)
    labels[order] = np.unique(found, return_inverse=True)[1]
    # Named in the order of the rows' coordinates, whatever names k-means gave.
    first = {label: place for place, label in reversed(list(enumerate(labels[order].tolist())))}
    names = {label: i for i, label in enumerate(sorted(first, key=first.__getitem__))}
    return torch.tensor([names[label] for label in labels.tolist()])


def _clustered(points: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, float]:
    """Return labels, and the sum of squared distances to the centres."""
    from sklearn.cluster import KMeans  # takes a second to import

    found = KMeans(num_clusters, n_init=_STARTS, random_state=seed % 2**32).fit(points)
    return found.labels_, float(found.inertia_)
