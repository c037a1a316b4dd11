"""Every coordinate of the updates, cut into two clusters of clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["two_means"]

# Columns sorted at a time.
_COLUMNS = 4096


def two_means(updates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Cluster the clients by every coordinate alone, into the two clusters of 2-means.

    On a line the clusters are the values up to some cut and those above, so that trying every cut
    of the sorted values finds the best, without random starts.

    Args:
        updates: Finite values, shape $(m, d)$, $m \ge 2$.

    Returns:
        The distance of the two centres, shape $(d,)$; the spread within the clusters (the root mean
        square distance of a value from its centre), shape $(d,)$; both float64 on the device of
        `updates`; and who is in the upper cluster, shape $(m, d)$, bool. Where all values are
        equal, nobody is.

    Examples:
        >>> distance, spread, upper = two_means(torch.tensor([[0.0], [2.0], [9.0], [11.0]]))
        >>> distance.item(), spread.item(), upper[:, 0].tolist()
        (9.0, 1.0, [False, False, True, True])
    """
    parts = [_block(columns) for columns in updates.split(_COLUMNS, dim=1)]
    distance, spread, upper = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
    return distance, spread, upper


def _block(columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = len(columns)
    wide = wide_dtype(columns.device)
    values = columns.to(wide).sort(dim=0).values
    # Around the mean, so that sums of squares do not cancel.
    centered = values - values.mean(dim=0)
    sums = centered.cumsum(dim=0)[:-1]
    below = torch.arange(1, m, dtype=wide, device=columns.device)[:, None]
    # The sums of the upper clusters are those of the lower ones, with the other sign.
    between = sums.square() * (1 / below + 1 / (m - below))
    best = between.argmax(dim=0, keepdim=True)
    count, total = below[best[0]].squeeze(1), sums.gather(0, best)[0]
    distance = (-total / count - total / (m - count)).clamp(min=0)
    within = (centered.square().sum(dim=0) - between.gather(0, best)[0]).clamp(min=0)
    # What rounding leaves of a sum of squares is no spread.
    within = torch.where(within > 1e-12 * centered.square().sum(dim=0), within, 0.0)
    cut = values.gather(0, best)[0]
    return distance, (within / m).sqrt(), columns.to(wide) > cut
