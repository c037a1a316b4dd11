"""The mean of the values nearest to the median, coordinate by coordinate."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.exceptions import AggregationError
from fedrec.functional.aggregation.order_statistics import sorted_blocks
from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["mean_around_median"]


def mean_around_median(updates: Tensor, num_kept: int, rows: Tensor | None = None) -> Tensor:
    r"""Average the $k$ values of every coordinate that are nearest to its median.

    In a sorted column these are $k$ neighbours, found by comparing the two ends of the column:
    nothing is sorted a second time. Where a value below and a value above are equally near and
    only one of them belongs to the $k$, each counts half, so that neither side is favoured.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_kept: $k$, between 1 and $m$.
        rows: Row numbers of those of the $m$ clients that count; `None` for all. They are not
            copied as a whole.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Raises:
        AggregationError: If `num_kept` is not between 1 and $m$.

    References:
        - Xie et al., Generalized Byzantine-tolerant SGD, 2018.

    Examples:
        >>> mean_around_median(torch.tensor([[1.0], [2.0], [4.0], [100.0], [3.0]]), num_kept=4)
        tensor([2.5000])
    """
    m = len(updates if rows is None else rows)
    if not 1 <= num_kept <= m:
        raise AggregationError(
            f"Cannot keep {num_kept} of m={m} updates. HINT: keep between 1 and m."
        )
    parts = [_window_mean(block, num_kept) for block in sorted_blocks(updates, rows)]
    return torch.cat(parts).to(updates.dtype)


def _window_mean(ordered: Tensor, num_kept: int) -> Tensor:
    """Average the values of sorted rows, shape (c, m), that are nearest to the row's middle."""
    m = ordered.shape[1]
    wide = wide_dtype(ordered.device)
    # Twice the median. Values j and j + k are not both kept, and as near if they add up to it.
    middle = ordered[:, (m - 1) // 2, None].to(wide) + ordered[:, m // 2, None].to(wide)
    dropped = m - num_kept
    lower, upper = ordered[:, :dropped], ordered[:, num_kept:]
    half = torch.tensor(0.5, dtype=wide, device=ordered.device)
    upper_share = torch.heaviside(middle - (lower.to(wide) + upper), half).to(ordered)
    if dropped <= num_kept:  # what is between the ends is kept in any case
        total = ordered[:, dropped:num_kept].sum(dim=1, dtype=wide)
        total += (lower * (1 - upper_share)).sum(dim=1, dtype=wide)
        total += (upper * upper_share).sum(dim=1, dtype=wide)
    else:
        share = torch.ones_like(ordered)
        share[:, :dropped] -= upper_share
        share[:, num_kept:] -= 1 - upper_share
        total = (ordered * share).sum(dim=1, dtype=wide)
    return total / num_kept
