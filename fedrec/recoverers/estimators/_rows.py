"""Rows of clients in matrices that have one for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrec.types import RoundRecord

__all__ = ["picking", "rows_of"]


def rows_of(record: RoundRecord, rows: Mapping[str, int]) -> Tensor:
    """Return the rows of the clients of a round, in order, shape (k,)."""
    return torch.tensor([rows[c] for c in record.client_ids], dtype=torch.int64)


def picking(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return what picks these rows: without a copy where they follow each other."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows.to(device)
