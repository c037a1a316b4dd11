"""Logging the figures of a run, to metrics.csv and to Lightning's loggers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedrec._files import csv_text, write_atomically
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["MetricsLog", "read_metrics"]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a metrics.csv: one dict per round, without the empty cells.

    Args:
        path: The file; if it does not exist, there are no rows.
    """
    if not path.exists():
        return []
    rows: list[dict[str, float]] = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            try:
                values = {k: _parsed(v) for k, v in row.items() if v and k != "round"}
                rows.append({"round": int(row["round"]), **values})
            except (TypeError, ValueError, KeyError):
                break  # the last line of a killed run may be cut
    return rows


def _parsed(text: str) -> float:
    try:
        return int(text)  # integers stay integers when a resumed run writes the row again
    except ValueError:
        return float(text)


def _number(name: str, value: Any) -> float:
    """Return a logged value as a Python number; integers stay integers."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, str):
            raise TypeError("text is no number")
        return plain if type(plain) is int else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigurationError(expected(name, "a number", value)) from error


class MetricsLog:
    """Appends one row per round to a CSV file, and passes it to loggers.

    A row is in the file before the round is stored, so the file of a run that was killed and
    resumed has every row once. Any number may be logged, also as a tensor of one element. The file
    gets a new column when a name is logged for the first time.

    Args:
        path: Path of metrics.csv, or `None` for no file.
        loggers: Lightning loggers.
        prefix: Prefix of the names that loggers get, such as `"record/"`.
        first_round: Rows from this round on are dropped from an existing file.
        metrics: Names of the metrics that are evaluated besides TER and ASR.
    """

    def __init__(
        self,
        path: Path | None,
        loggers: Sequence[Any],
        prefix: str,
        first_round: int,
        metrics: Iterable[str] = (),
    ) -> None:
        self._evaluated = frozenset(("ter", "asr", *metrics))
        self._loggers = loggers
        self._prefix = prefix
        self._path = path
        self._file: TextIO | None = None
        self._columns: list[str] = []
        self.rows: list[dict[str, float]] = []
        if path is None:
            return
        self.rows = [row for row in read_metrics(path) if row["round"] < first_round]
        self._file = self._rewrite(path)

    def _rewrite(self, path: Path) -> TextIO:
        """Write header and all rows; return the file, open for appending."""
        names = [name for row in self.rows for name in row]
        self._columns = list(dict.fromkeys(["round", "ter", "asr", *names])) if names else []
        lines = [self._columns, *map(self._cells, self.rows)] if names else []
        write_atomically(path, csv_text(lines).encode())
        return path.open("a", newline="", encoding="utf-8")

    def _cells(self, row: Mapping[str, float]) -> list[str]:
        return [repr(row[name]) if name in row else "" for name in self._columns]

    def write(
        self, t: int, values: Mapping[str, Any], evaluated: Mapping[str, Any] | None = None
    ) -> None:
        """Write the row of round `t`.

        Args:
            t: The round.
            values: The values that were logged in the round, by name.
            evaluated: The results on the test data, by name.

        Raises:
            ConfigurationError: If a value is no number, or a value was logged under the name of a
                test result.
        """
        taken = self._evaluated.intersection(values)
        if taken:
            raise ConfigurationError(
                f"{sorted(taken)} was logged in round {t}, but that is what results on the test "
                "data are called. HINT: log it under another name, such as "
                f"`train_{min(taken)}`."
            )
        values = {**values, **(evaluated or {})}
        numbers = {name: _number(name, value) for name, value in values.items()}
        row = {"round": t, **numbers}
        self.rows.append(row)
        if self._file is not None and self._path is not None:
            if row.keys() <= set(self._columns):
                self._file.write(csv_text([self._cells(row)]))
                self._file.flush()
            else:
                self._file.close()
                self._file = self._rewrite(self._path)
        for logger in self._loggers:
            logger.log_metrics({self._prefix + k: v for k, v in numbers.items()}, step=t)

    def curve(self) -> list[dict[str, float]]:
        """Return the rows that have an evaluation."""
        return [
            {k: v for k, v in row.items() if k == "round" or k in self._evaluated}
            for row in self.rows
            if not self._evaluated.isdisjoint(row)
        ]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
