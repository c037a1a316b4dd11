"""FLDetector's formulas: how well updates fit their prediction, and how many clusters there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedrec.exceptions import ShapeError
from fedrec.random import numpy_generator

__all__ = ["consistency_scores", "gap_statistic", "measured_consistency", "upper_cluster"]

# Of previous updates and updates, shape (k, d) each: a number a client, shape (k,).
Measure = Callable[[Tensor, Tensor], Tensor]

# Dispersions of scores in [0, 1] below this count as zero; keeps logarithms finite.
_TINY = 1e-12


def consistency_scores(previous: Tensor, updates: Tensor, hvp: Tensor) -> Tensor:
    r"""Measure how far each client's update is from the one predicted for it.

    $$\hat g_i^t = g_i^{t-1} + \hat H (w_t - w_{t-1}), \qquad
    d_i = \frac{\lVert \hat g_i^t - g_i^t \rVert_2}{\sum_k \lVert \hat g_k^t - g_k^t \rVert_2}$$

    Finite input gives finite scores: a client that sends entries so large that the norm overflows
    gets nearly all of the sum.

    Args:
        previous: The clients' updates of the round before, shape $(m, d)$, finite.
        updates: Their updates of this round, in the same order, shape $(m, d)$, finite.
        hvp: $\hat H (w_t - w_{t-1})$, the same for all clients, shape $(d,)$, finite.

    Returns:
        $d_i$ of shape $(m,)$, float64, on the CPU; $1/m$ each if all distances are zero. They do
        not depend on the order of the clients.

    References:
        - Zhang et al., FLDetector: Defending Federated Learning Against Model Poisoning Attacks
          via Detecting Malicious Clients, KDD 2022.

    Examples:
        >>> before = torch.zeros(2, 1)
        >>> consistency_scores(before, torch.tensor([[2.0], [4.0]]), torch.tensor([1.0]))
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    return measured_consistency(lambda measure: measure(previous, updates), hvp)


def measured_consistency(measured: Callable[[Measure], Tensor], hvp: Tensor) -> Tensor:
    r"""Compute `consistency_scores` of updates wherever they are.

    Args:
        measured: Returns what a function of previous updates and updates says of each client, one
            number a client, shape $(m,)$, on the CPU.
        hvp: $\hat H (w_t - w_{t-1})$, shape $(d,)$, finite.

    Returns:
        As in `consistency_scores`.
    """
    distances = measured(lambda old, new: _distances(old, new, hvp)).double()
    if not math.isfinite(sum(distances.tolist())):
        unit = max(float(measured(_largest).max()), float(hvp.abs().max()))
        distances = measured(lambda old, new: _scaled_distances(old, new, hvp, unit))
    total = math.fsum(distances.tolist())
    return distances / total if total > 0 else torch.full_like(distances, 1 / len(distances))


def _distances(previous: Tensor, updates: Tensor, hvp: Tensor) -> Tensor:
    # Row by row: a row fits the cache, and nothing of the size of all updates is allocated.
    rows = [
        torch.linalg.vector_norm(new - old - hvp)
        for old, new in zip(previous, updates, strict=True)
    ]
    return torch.stack(rows).cpu()


def _largest(previous: Tensor, updates: Tensor) -> Tensor:
    norms = [torch.linalg.vector_norm(x, ord=math.inf, dim=1) for x in (previous, updates)]
    return torch.maximum(*norms).cpu()


def _scaled_distances(previous: Tensor, updates: Tensor, hvp: Tensor, unit: float) -> Tensor:
    """Return the distances in units of the largest entry, which neither overflow nor need to.

    In float64, which only the CPU is sure to have.
    """
    shift = hvp.cpu().double() / unit
    rows = [
        torch.linalg.vector_norm(new.cpu().double() / unit - old.cpu().double() / unit - shift)
        for old, new in zip(previous, updates, strict=True)
    ]
    return torch.stack(rows)


def _dispersions(values: np.ndarray, max_clusters: int) -> np.ndarray:
    """Return the smallest within-cluster sum of squares for 1, 2, ... clusters of sorted values.

    Clusters on a line are intervals, so dynamic programming over the position of the last cut is
    exact, unlike k-means from random starts.
    """
    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    squares = np.concatenate([[0.0], np.cumsum(values**2)])
    first, last = np.arange(n)[:, None], np.arange(n)[None, :]
    size = np.where(last >= first, last - first + 1, 1)
    cost = squares[1:] - squares[:-1, None] - (sums[1:] - sums[:-1, None]) ** 2 / size
    cost = np.where(last >= first, np.maximum(cost, 0.0), np.inf)
    best = cost[0]  # best[j]: values 0..j in as many clusters as so far
    result = [best[-1]]
    for _ in range(1, max_clusters):
        before = np.concatenate([[np.inf], best[:-1]])
        best = (before[:, None] + cost).min(axis=0)
        result.append(best[-1])
    return np.maximum(result, _TINY)


@lru_cache(maxsize=64)
def _reference(
    num_values: int, max_clusters: int, num_references: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return log(mean W_k) and the standard error of log W_k over uniform reference sets."""
    draws = numpy_generator(seed, "gap-statistic").random((num_references, num_values))
    w = np.array([_dispersions(np.sort(row), max_clusters) for row in draws])
    return np.log(w.mean(axis=0)), np.sqrt(1 + 1 / num_references) * np.log(w).std(axis=0)


def gap_statistic(
    scores: Tensor,
    max_clusters: int = 7,
    num_references: int = 100,
    standard_errors: float = 1.0,
    seed: int = 0,
) -> int:
    r"""Estimate how many clusters the scores form; one means that nobody stands out.

    Scores are scaled to $[0, 1]$. With $W_k$ their within-cluster sum of squares for $k$ clusters
    and $W_k^*$ that of uniform reference sets of the same size,

    $$\mathrm{Gap}(k) = \log \overline{W_k^*} - \log W_k, \qquad
    s_k = \sqrt{1 + 1/B}\; \mathrm{std}(\log W_k^*)$$

    and the result is the smallest $k$ with
    $\mathrm{Gap}(k) - \mathrm{Gap}(k+1) + c\, s_{k+1} \ge 0$, or the largest $k$ tried if there is
    none. Clusters are optimal, not those of a random start.

    Structureless scores pass for two or more clusters at a rate that depends on $c$, and little on
    anything else: for uniform scores of 20 to 100 clients 18 to 23 % with $c = 1$ (the rule of the
    papers), 5 to 8 % with $c = 2$, 1 to 2 % with $c = 3$. More reference sets make the answer
    depend less on the seed; they do not make false alarms rarer.

    Args:
        scores: Shape $(n,)$.
        max_clusters: Largest $k$ tried (at most $n - 1$ are).
        num_references: Number $B$ of reference sets.
        standard_errors: $c$, how many standard errors one more cluster has to gain.
        seed: Seed of the reference sets.

    Returns:
        Number of clusters.

    References:
        - Tibshirani, Walther, Hastie, Estimating the Number of Clusters in a Data Set via the Gap
          Statistic, JRSS B 2001.
        - Zhang et al., FLDetector, KDD 2022.

    Examples:
        >>> gap_statistic(torch.tensor([0.1, 0.11, 0.12, 0.1, 0.13, 0.9, 0.91, 0.92]))
        2
        >>> gap_statistic(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]))
        1
    """
    if scores.ndim != 1 or not torch.isfinite(scores).all():
        raise ShapeError(f"Expected one finite score a client, but got {scores!r}.")
    values = np.sort(scores.detach().cpu().double().numpy())
    top = min(max_clusters, len(values) - 1)
    if top < 2 or values[-1] == values[0]:
        return 1
    values = (values - values[0]) / (values[-1] - values[0])
    expected, errors = _reference(len(values), top, num_references, seed)
    gap = expected - np.log(_dispersions(values, top))
    enough = gap[:-1] - gap[1:] + standard_errors * errors[1:] >= 0
    return int(np.argmax(enough)) + 1 if enough.any() else top


def upper_cluster(scores: Tensor) -> Tensor:
    """Split scores into two clusters (exact 2-means) and return who is in the higher one.

    Args:
        scores: Shape $(n,)$, at least two different values.

    Returns:
        Shape $(n,)$, bool.

    Examples:
        >>> upper_cluster(torch.tensor([0.9, 0.1, 0.2, 0.8]))
        tensor([ True, False, False,  True])
    """
    values = scores.detach().cpu().double()
    cuts = values.unique()[1:]
    spread = [
        sum(float((part - part.mean()).square().sum()) for part in (values[~up], values[up]))
        for up in (values >= cut for cut in cuts)
    ]
    return values.ge(cuts[int(np.argmin(spread))])
