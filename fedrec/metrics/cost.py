"""The ledger of what clients are asked for in a recovery."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedrec._checks import check_float, check_int
from fedrec._files import csv_text, write_atomically
from fedrec._frames import categories, data_frame
from fedrec.exceptions import ConfigurationError, expected

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["REASONS", "CostEntry", "CostLedger"]

REASONS = ("warmup", "correction", "abnormality", "final", "fallback", "scratch", "other")
"""Why a client may be asked for an exact update."""


class CostEntry(NamedTuple):
    """One request to one client.

    Args:
        client_id: The client that was asked.
        round: Round of the recovery.
        reason: Why it was asked, one of `REASONS`.
        local_steps: Mini-batch steps the client took.
        num_bytes: Bytes sent to and received from the client.
        seconds: Seconds the client spent, to a microsecond; 0 where that was not measured.
    """

    client_id: str
    round: int
    reason: str
    local_steps: int
    num_bytes: int
    seconds: float


class CostLedger:
    r"""Every request for an exact update during a recovery: client, round and reason.

    $$ \mathrm{CP}_i = \frac{T_i - T_{r,i}}{T_i}, \qquad
       \mathrm{ACP} = \frac{1}{n'} \sum_i \mathrm{CP}_i $$

    Both are fractions, at most 1; papers report them in percent. $T_i$ is the number of rounds
    client $i$ would compute in when training from scratch, and $T_{r,i}$ the number of rounds in
    which it was asked (once or more often). The mean runs over the $n'$ clients that remain in the
    recovery: the clients of `num_rounds` without those with $T_i = 0$.

    Args:
        num_rounds: $T_i$ by client, for the clients that remain in the recovery.

    Raises:
        ConfigurationError: If a number of rounds is negative or no integer.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023, evaluation metrics.

    Examples:
        >>> ledger = CostLedger({"a": 8, "b": 8})
        >>> ledger.add("a", 0, "warmup")
        >>> ledger.add("b", 0, "warmup")
        >>> ledger.add("b", 4, "abnormality")
        >>> ledger.cp(), ledger.acp()
        ({'a': 0.875, 'b': 0.75}, 0.8125)
        >>> ledger.exact_rounds_by_reason()["abnormality"]
        0.5
        >>> ledger.to_pandas()
          client_id  round       reason  local_steps  num_bytes  seconds
        0         a      0       warmup            1          0      0.0
        1         b      0       warmup            1          0      0.0
        2         b      4  abnormality            1          0      0.0
    """

    def __init__(self, num_rounds: Mapping[str, int]) -> None:
        self.num_rounds = {
            client_id: check_int(f"num_rounds[{client_id}]", value, minimum=0)
            for client_id, value in num_rounds.items()
        }
        self._client_index = {client_id: i for i, client_id in enumerate(self.num_rounds)}
        self._reason_index = {reason: i for i, reason in enumerate(REASONS)}
        # One flat array, six numbers an entry: a long recovery has hundreds of thousands of
        # entries.
        self._rows = array("q")

    def add(
        self,
        client_id: str,
        round: int,
        reason: str,
        local_steps: int = 1,
        num_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Note that a client was asked for an exact update.

        Args:
            client_id: One of the clients that remain.
            round: Round of the recovery.
            reason: One of `REASONS`.
            local_steps: Mini-batch steps the client took.
            num_bytes: Bytes sent to and received from the client.
            seconds: Seconds the client spent.

        Raises:
            ConfigurationError: If the client or the reason is unknown, or a number is negative.
        """
        client = self._client_index.get(client_id)
        if client is None:
            raise ConfigurationError(
                expected("client_id", "a client of this ledger", client_id, known=self.num_rounds)
            )
        index = self._reason_index.get(reason)
        if index is None:
            raise ConfigurationError(expected("reason", "a known reason", reason, known=REASONS))
        t = check_int("round", round, minimum=0)
        local_steps = check_int("local_steps", local_steps, minimum=0)
        num_bytes = check_int("num_bytes", num_bytes, minimum=0)
        seconds = check_float("seconds", seconds, minimum=0)
        self._rows.extend((client, t, index, local_steps, num_bytes, int(seconds * 1e6 + 0.5)))

    @property
    def entries(self) -> tuple[CostEntry, ...]:
        """All entries in the order they were added."""
        client_ids = tuple(self.num_rounds)
        numbers = iter(self._rows)
        return tuple(
            CostEntry(client_ids[client], t, REASONS[reason], steps, size, micros / 1e6)
            for client, t, reason, steps, size, micros in zip(*[numbers] * 6, strict=True)
        )

    def _table(self) -> NDArray[np.int64]:
        return np.array(self._rows, dtype=np.int64).reshape(len(self), 6)

    def _first_requests(self) -> NDArray[np.int64]:
        """Return, for each client and round, the row of the first request to the client."""
        rows = self._table()
        pairs = rows[:, 0] * (rows[:, 1].max(initial=0) + 1) + rows[:, 1]
        return rows[np.unique(pairs, return_index=True)[1]]

    def _counted(self) -> NDArray[np.bool_]:
        """Return, for each client, whether it counts in the ACP: whether $T_i > 0$."""
        return np.array(list(self.num_rounds.values()), dtype=np.int64) > 0

    def cp(self) -> dict[str, float]:
        """Return the CP of every client: the fraction of its rounds that it is spared, at most 1.

        Clients with $T_i = 0$ are left out.
        """
        asked = np.bincount(self._first_requests()[:, 0], minlength=len(self.num_rounds)).tolist()
        return {
            client_id: (total - count) / total
            for (client_id, total), count in zip(self.num_rounds.items(), asked, strict=True)
            if total > 0
        }

    def acp(self) -> float:
        """Return the mean of the CP, a fraction, at most 1; NaN if no client has rounds to save."""
        cp = self.cp()
        return sum(cp.values()) / len(cp) if cp else float("nan")

    def exact_rounds_by_reason(self) -> dict[str, float]:
        """Return, for every reason, the mean number of rounds in which a client was asked.

        A round in which a client was asked twice counts for the first reason only. So the sum over
        reasons is the mean of $T_{r,i}$ over the clients that count in the ACP.
        """
        first = self._first_requests()
        counted = self._counted()
        counts = np.bincount(first[counted[first[:, 0]], 2], minlength=len(REASONS))
        num_clients = max(int(counted.sum()), 1)
        return {r: count / num_clients for r, count in zip(REASONS, counts.tolist(), strict=True)}

    def mean_local_steps(self) -> float:
        """Return the mean number of mini-batch steps of the clients that count in the ACP."""
        rows = self._table()
        counted = self._counted()
        steps = int(rows[counted[rows[:, 0]], 3].sum())
        return steps / max(int(counted.sum()), 1)

    def before(self, round: int) -> CostLedger:
        """Return a ledger with only the entries of rounds before `round`.

        Args:
            round: The first round that is left out, 0-based.
        """
        ledger = CostLedger(self.num_rounds)
        rows = self._table()
        ledger._rows = array("q", rows[rows[:, 1] < round].flatten().tolist())
        return ledger

    def total_bytes(self) -> int:
        """Return the bytes sent to and received from all clients."""
        return sum(self._rows[4::6])

    def total_seconds(self) -> float:
        """Return the seconds that all clients spent."""
        return sum(self._rows[5::6]) / 1e6

    def by_client(self) -> dict[str, tuple[int, int, float]]:
        """Return, for each client, the number of requests, the bytes and the seconds."""
        rows, size = self._table(), len(self.num_rounds)
        sums = [np.bincount(rows[:, 0], rows[:, k], size).tolist() for k in (4, 5)]
        counts = np.bincount(rows[:, 0], minlength=size).tolist()
        return {
            client_id: (count, int(num_bytes), micros / 1e6)
            for client_id, count, num_bytes, micros in zip(
                self.num_rounds, counts, *sums, strict=True
            )
        }

    def from_scratch(self) -> dict[str, tuple[int, int, float]]:
        """Return, for each client, what training from scratch would have cost it.

        That is $T_i$ requests, each of which costs what one to the same client has cost here, on
        average; for a client that was never asked, what one to any client has.

        Returns:
            Requests, bytes and seconds, as in `by_client`.

        Examples:
            >>> ledger = CostLedger({"a": 8, "b": 4})
            >>> ledger.add("a", 0, "warmup", num_bytes=100, seconds=0.5)
            >>> ledger.from_scratch()
            {'a': (8, 800, 4.0), 'b': (4, 400, 2.0)}
        """
        spent, costs = self.by_client(), {}
        every = (len(self), self.total_bytes(), self.total_seconds())
        for client_id, total in self.num_rounds.items():
            count, num_bytes, seconds = spent[client_id] if spent[client_id][0] else every
            times = total / max(count, 1)
            costs[client_id] = (total, round(times * num_bytes), times * seconds)
        return costs

    def to_pandas(self) -> pd.DataFrame:
        """Return a `DataFrame` with one row per entry, in the order they were added.

        Returns:
            Columns as in `CostEntry`: `client_id` and `reason` (categories), `round` (0-based),
            `local_steps` (mini-batches), `num_bytes` (sent to and received from the client) and
            `seconds` (that the client spent, where it was measured).

        Raises:
            MissingDependencyError: If pandas is not installed.
        """
        client, t, reason, steps, size, micros = self._table().T
        return data_frame(
            {
                "client_id": categories(client, tuple(self.num_rounds)),
                "round": t,
                "reason": categories(reason, REASONS),
                "local_steps": steps,
                "num_bytes": size,
                "seconds": micros / 1e6,
            }
        )

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file: the names of the columns, then one line per entry, in order."""
        write_atomically(Path(path), csv_text([CostEntry._fields, *self.entries]).encode())

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], num_rounds: Mapping[str, int]) -> CostLedger:
        """Return the ledger that `to_csv` wrote.

        Args:
            path: The file.
            num_rounds: $T_i$ by client, which the file does not hold.

        Raises:
            ConfigurationError: If a line is not an entry, or names an unknown client or reason.
        """
        ledger = cls(num_rounds)
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if next(lines, None) != list(CostEntry._fields):
                raise ConfigurationError(
                    f"Expected `{path}` to start with the columns {', '.join(CostEntry._fields)}."
                )
            for line in lines:
                try:
                    client_id, t, reason, steps, size, seconds = line
                    ledger.add(client_id, int(t), reason, int(steps), int(size), float(seconds))
                except ValueError as error:
                    raise ConfigurationError(f"{path}, line {lines.line_num}: {error}") from error
        return ledger

    def state_dict(self) -> dict[str, Any]:
        """Return all entries as an int64 tensor, with the clients and reasons that it numbers."""
        return {
            "num_rounds": dict(self.num_rounds),
            "reasons": list(REASONS),
            "rows": torch.from_numpy(self._table()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all entries by those of a state that `state_dict` returned.

        Raises:
            ConfigurationError: If the state is of a recovery of other clients or lengths.
        """
        if list(state["num_rounds"].items()) != list(self.num_rounds.items()):
            raise ConfigurationError(
                "Expected the stored costs to be of the same clients and numbers of rounds, "
                f"but got {state['num_rounds']} instead of {self.num_rounds}."
            )
        rows = state["rows"].clone()
        # Reasons are matched by name: a later version may number them otherwise.
        index = torch.tensor([self._reason_index[reason] for reason in state["reasons"]])
        rows[:, 2] = index[rows[:, 2]]
        self._rows = array("q", rows.flatten().tolist())

    def __len__(self) -> int:
        return len(self._rows) // 6

    def __repr__(self) -> str:
        return f"CostLedger({len(self.num_rounds)} clients, {len(self)} entries)"

    def _repr_html_(self) -> str:
        from fedrec.report.notebook import ledger_html

        return ledger_html(self)
