"""Errors of estimated updates, measured in simulation, without costs for clients."""

from __future__ import annotations

import csv
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from fedrec._derived import register_derived
from fedrec._files import csv_text, write_atomically
from fedrec.functional.consistency import row_cosines
from fedrec.functional.recovery.relative_errors import relative_errors
from fedrec.types import CohortUpdates, EstimateError

__all__ = ["EstimateErrors", "read_estimate_errors"]


def read_estimate_errors(path: Path) -> list[EstimateError]:
    """Return the rows of a diagnostics.csv.

    Args:
        path: The file; if it does not exist, there are no rows.
    """
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            try:
                error, cosine = float(row["relative_error"]), float(row["cosine"])
                rows.append(EstimateError(row["client_id"], int(row["round"]), error, cosine))
            except (TypeError, ValueError, KeyError):
                break  # the last line of a killed run may be cut
    return rows


class EstimateErrors:
    """Collects errors of estimates, and appends them to a file, which is made for the first error.

    A round's rows are in the file before the recovery stores its next checkpoint, so the file of a
    run that was killed and resumed has every row once.

    Args:
        folder: The folder of diagnostics.csv, or `None` for no file.
        first_round: Rows from this round on are dropped from an existing file.
        without: Clients that are not compared.

    Examples:
        >>> import torch
        >>> errors = EstimateErrors(None, 0)
        >>> known = {"client_ids": ("client-0",), "num_samples": torch.tensor([10])}
        >>> exact = CohortUpdates(updates=torch.tensor([[3.0, 4.0]]), **known)
        >>> errors.add(7, CohortUpdates(updates=torch.tensor([[3.0, 3.0]]), **known), exact)
        >>> errors.rows[0].relative_error, round(errors.rows[0].cosine, 2)
        (0.2, 0.99)
    """

    def __init__(
        self, folder: Path | None, first_round: int, without: Collection[str] = ()
    ) -> None:
        self._without = without
        self._path = None if folder is None else folder / "diagnostics.csv"
        self._file: TextIO | None = None
        self.rows: list[EstimateError] = []
        if self._path is not None:
            self.rows = [row for row in read_estimate_errors(self._path) if row.round < first_round]

    def add(self, t: int, estimates: CohortUpdates, exact: CohortUpdates) -> None:
        """Compare the updates of a round.

        Args:
            t: The round.
            estimates: The estimated updates.
            exact: The exact updates of the same clients, in the same order.
        """
        found = estimates.measured(lambda a, b: _compared(a.updates, b.updates), exact).tolist()
        rows = [
            EstimateError(client_id, t, error, cosine)
            for client_id, (error, cosine) in zip(estimates.client_ids, found, strict=True)
        ]
        self.rows += rows
        if self._path is None:
            return
        if self._file is None:
            register_derived(self._path, without=self._without)
            write_atomically(self._path, csv_text([EstimateError._fields, *self.rows]).encode())
            self._file = self._path.open("a", newline="", encoding="utf-8")
        else:
            self._file.write(csv_text(rows))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _compared(estimates: Tensor, exact: Tensor) -> Tensor:
    """Return relative error and cosine of each row, shape (k, 2), on the CPU."""
    return torch.stack(
        [relative_errors(estimates, exact), row_cosines(estimates, exact)], dim=1
    ).cpu()
