"""Where the figures of a run go: metrics.csv and Lightning's loggers."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.checkpoint import write_atomically

__all__ = ["MetricsLog", "read_metrics"]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a metrics.csv: one dict per round, without the empty cells.

    Args:
        path: File; an absent one gives no rows.
    """
    if not path.exists():
        return []
    rows: list[dict[str, float]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                values = {k: float(v) for k, v in row.items() if v and k != "round"}
                rows.append({"round": int(row["round"]), **values})
            except (TypeError, ValueError, KeyError):
                break  # the last line of a killed run may be cut
    return rows


class MetricsLog:
    """Appends one row per round to a CSV file, and passes it to loggers.

    A row is in the file before the round is stored, so a run that was killed and resumed has every
    row once.

    Args:
        path: metrics.csv, or `None` for no file.
        loggers: Lightning loggers.
        prefix: Put before the names for loggers, such as `"record/"`.
        first_round: Rows from this round on are dropped from an existing file.
    """

    def __init__(
        self, path: Path | None, loggers: Sequence[Any], prefix: str, first_round: int
    ) -> None:
        self._loggers = loggers
        self._prefix = prefix
        self._file = None
        self._columns: list[str] | None = None
        self.rows: list[dict[str, float]] = []
        if path is None:
            return
        self.rows = [row for row in read_metrics(path) if row["round"] < first_round]
        lines = [self._line(row) for row in self.rows]
        write_atomically(path, "".join(lines).encode())
        self._file = path.open("a", newline="")

    def _line(self, row: Mapping[str, float]) -> str:
        """Return the row as text, after the header if it is the first one."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            rest = [name for name in row if name not in {"round", "ter", "asr"}]
            self._columns = ["round", "ter", "asr", *rest]
            writer.writerow(self._columns)
        writer.writerow([repr(row[c]) if c in row else "" for c in self._columns])
        return text.getvalue()

    def write(self, t: int, values: Mapping[str, float]) -> None:
        """Write the row of round `t`."""
        row = {"round": t, **values}
        self.rows.append(row)
        if self._file is not None:
            self._file.write(self._line(row))
            self._file.flush()
        for logger in self._loggers:
            logger.log_metrics({self._prefix + k: v for k, v in values.items()}, step=t)

    def curve(self) -> list[dict[str, float]]:
        """Return the rows that have an evaluation."""
        return [
            {k: row[k] for k in ("round", "ter", "asr") if k in row}
            for row in self.rows
            if "ter" in row
        ]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
