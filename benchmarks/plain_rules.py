"""Robust rules the plain way, in a few lines of torch each: what to measure fedrec's against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

__all__ = ["plain_rules"]


def _scores(distances: Tensor, neighbours: int) -> Tensor:
    others = distances.clone().fill_diagonal_(float("inf"))
    return others.topk(neighbours, dim=1, largest=False).values.sum(dim=1)


def krum(x: Tensor, f: int) -> Tensor:
    """Return one row."""
    return x[_scores(torch.cdist(x, x).square(), len(x) - f - 2).argmin()]


def multi_krum(x: Tensor, f: int) -> Tensor:
    """Average m - f rows."""
    scores = _scores(torch.cdist(x, x).square(), len(x) - f - 2)
    return x[scores.topk(len(x) - f, largest=False).indices].mean(dim=0)


def around_median(x: Tensor, kept: int) -> Tensor:
    """Sort for the median, then sort again by the distance from it."""
    ordered = x.sort(dim=0).values
    m = len(x)
    median = (ordered[(m - 1) // 2] + ordered[m // 2]) / 2
    nearest = (x - median).abs().sort(dim=0).indices[:kept]
    return x.gather(0, nearest).mean(dim=0)


def bulyan(x: Tensor, f: int) -> Tensor:
    """Krum on the rows that are left, then around the median."""
    distances = torch.cdist(x, x).square()
    left, picked = list(range(len(x))), []
    while len(picked) < len(x) - 2 * f:
        among = distances[left][:, left]
        picked.append(left.pop(int(_scores(among, max(len(left) - f - 2, 1)).argmin())))
    return around_median(x[picked], len(picked) - 2 * f)


def geometric_median(x: Tensor) -> Tensor:
    """Weiszfeld's algorithm on the updates themselves."""
    z = x.mean(dim=0)
    for _ in range(1000):
        weights = 1 / (x - z).norm(dim=1).clamp(min=1e-6)
        before, z = z, (weights / weights.sum()) @ x
        if (z - before).norm() <= 1e-6 * z.norm():
            break
    return z


def norm_clipping(x: Tensor) -> Tensor:
    """Scale every row, average."""
    norms = x.norm(dim=1)
    return (x * (norms.median() / norms).clamp(max=1)[:, None]).mean(dim=0)


def dnc(x: Tensor, f: int) -> Tensor:
    """Take the singular value decomposition of 10,000 coordinates."""
    some = x[:, torch.randperm(x.shape[1])[:10_000]]
    centered = some - some.mean(dim=0)
    direction = torch.linalg.svd(centered, full_matrices=False).Vh[0]
    scores = (centered @ direction).square()
    return x[scores.topk(len(x) - f, largest=False).indices].mean(dim=0)


def caf(x: Tensor, f: int) -> Tensor:
    """Center the updates and take their inner products anew in every pass."""
    c = torch.ones(len(x))
    smallest, best = float("inf"), x.mean(dim=0)
    while c.sum() > len(x) - 2 * f:
        mean = c @ x / c.sum()
        scaled = c.sqrt()[:, None] * (x - mean)
        values, vectors = torch.linalg.eigh(scaled @ scaled.T)
        if values[-1] / c.sum() < smallest:
            smallest, best = float(values[-1] / c.sum()), mean
        tau = ((x - mean) @ (vectors[:, -1] @ scaled)).square()
        c = torch.where(c > 0, c * (1 - tau / tau[c > 0].max()), 0)
    return best


def plain_rules(updates: Tensor, num_byzantine: int) -> dict[str, Callable[[], Tensor]]:
    """Return what to time, by the name of fedrec's rule."""
    x, f = updates, num_byzantine
    return {
        "Krum": partial(krum, x, f),
        "MultiKrum": partial(multi_krum, x, f),
        "Bulyan": partial(bulyan, x, f),
        "MeanAroundMedian": partial(around_median, x, len(x) - f),
        "GeometricMedian": partial(geometric_median, x),
        "NormClipping": partial(norm_clipping, x),
        "DnC": partial(dnc, x, f),
        "CAF": partial(caf, x, f),
    }
