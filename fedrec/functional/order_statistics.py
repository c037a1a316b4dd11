"""Order statistics over clients, coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedrec.exceptions import AggregationError

__all__ = ["check_trim", "coordinate_median", "trimmed_mean"]

# Values sorted at a time: small enough to stay in a core's cache, large enough to forget Python.
_BLOCK = 1 << 16


def _reduce_sorted(updates: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Sort each column and reduce it; `reduce` gets sorted values along the last axis.

    NumPy's vectorised sort is several times as fast as torch's on a CPU. It wants a column's values
    next to each other, hence the transposed copies, a block of columns at a time.
    """
    if (
        updates.device.type != "cpu"
        or updates.dtype not in {torch.float32, torch.float64}
        or updates.requires_grad
    ):
        return reduce(updates.mT.sort(dim=-1).values).to(updates.dtype).contiguous()
    rows = updates.numpy()
    m, d = rows.shape
    out = torch.empty(d, dtype=updates.dtype)
    step = max(_BLOCK // m, 1)
    for start in range(0, d, step):
        block = np.array(rows[:, start : start + step].T, order="C")
        block.sort(axis=1)
        out[start : start + step] = reduce(torch.from_numpy(block))
    return out


def coordinate_median(updates: Tensor) -> Tensor:
    r"""Take the median of every coordinate over the clients.

    For an even number of clients it is the mean of the two middle values, so that it favours
    neither side.

    Args:
        updates: Finite values, shape $(m, d)$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> coordinate_median(torch.tensor([[1.0], [2.0], [4.0], [100.0]]))
        tensor([3.])
    """
    low, high = (len(updates) - 1) // 2, len(updates) // 2
    if low == high:
        return _reduce_sorted(updates, lambda x: x[:, low])
    # Halving first cannot overflow.
    return _reduce_sorted(updates, lambda x: x[:, low] * 0.5 + x[:, high] * 0.5)


def check_trim(num_trim: int, num_clients: int) -> None:
    """Raise `AggregationError` unless trimming leaves at least one of the clients.

    Args:
        num_trim: Entries removed at each end, $k$.
        num_clients: $m$.
    """
    if num_trim < 0 or 2 * num_trim >= num_clients:
        raise AggregationError(
            f"Cannot trim 2*{num_trim}={2 * num_trim} of m={num_clients} updates. "
            "HINT: lower `trim` or let more clients take part."
        )


def trimmed_mean(updates: Tensor, num_trim: int) -> Tensor:
    r"""Average every coordinate over the clients, without its largest and smallest values.

    $$\frac{1}{m - 2k} \sum_{i=k+1}^{m-k} g_{(i)j}$$

    with $g_{(1)j} \le \dots \le g_{(m)j}$ the sorted values of coordinate $j$. Values are summed in
    float64, so that the mean of equal float32 values is that value.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_trim: Entries removed at each end of every coordinate, $k$, with $2k < m$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Raises:
        AggregationError: If `num_trim` is negative or nothing would be left.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [6.0], [100.0]]), num_trim=1)
        tensor([4.])
    """
    m = len(updates)
    check_trim(num_trim, m)
    kept = slice(num_trim, m - num_trim)
    wide = torch.float32 if updates.device.type == "mps" else torch.float64  # MPS has no float64
    return _reduce_sorted(updates, lambda x: x[:, kept].mean(dim=1, dtype=wide))
