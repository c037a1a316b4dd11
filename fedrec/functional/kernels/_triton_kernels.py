"""The middle mean on a GPU: a tile of columns is sorted in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["middle_mean"]

# Values a program sorts: 32 for each of its 128 threads.
_TILE = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    values,
    out,
    num_rows,
    num_columns,
    row_stride,
    num_trim,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    inside = columns < num_columns
    tile = tl.load(
        values + columns[:, None] + rows[None, :].to(tl.int64) * row_stride,
        mask=inside[:, None] & (rows < num_rows)[None, :],
        other=float("inf"),
    )
    # Not every version sorts 16-bit values, or converts them from and to float64.
    ordered = tl.sort(tile.to(WIDE))
    kept = (rows >= num_trim) & (rows < num_rows - num_trim)
    total = tl.sum(tl.where(kept[None, :], ordered.to(tl.float64), 0.0), axis=1)
    mean = total / (num_rows - 2 * num_trim)
    tl.store(out + columns, mean.to(WIDE).to(out.dtype.element_ty), mask=inside)


def middle_mean(updates: Tensor, num_trim: int) -> Tensor:
    """Average every column without its `num_trim` smallest and largest values.

    Args:
        updates: Shape (m, d).
        num_trim: Entries removed at each end, k, with 2k < m.

    Returns:
        Shape (d,).
    """
    updates = updates if updates.stride(1) == 1 else updates.contiguous()
    m, d = updates.shape
    rows = max(triton.next_power_of_2(m), 2)
    columns = max(_TILE // rows, 1)
    wide = tl.float64 if updates.dtype == torch.float64 else tl.float32
    out = torch.empty(d, dtype=updates.dtype, device=updates.device)
    _kernel[(triton.cdiv(d, columns),)](
        updates, out, m, d, updates.stride(0), num_trim, rows, columns, wide
    )
    return out
