"""The history in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedrec.exceptions import HistoryFormatError, RoundNotFoundError
from fedrec.history.base import HistoryStore
from fedrec.history.manifest import Manifest
from fedrec.history.retention import Retention
from fedrec.history.rounds import RoundArrays, RoundIndex

__all__ = ["MemoryHistory"]


class MemoryHistory(HistoryStore):
    """A history that is gone with the process: for tests and small experiments.

    It takes and gives exactly what `LMDBHistory` does.

    Args:
        keep: Which client updates are stored, as in `LMDBHistory`.

    Raises:
        ConfigurationError: If `keep` is not the arguments of `Retention`.

    Examples:
        >>> history = MemoryHistory()
        >>> history.is_empty, history.rounds()
        (True, range(0, 0))
    """

    in_memory = True

    def __init__(self, *, keep: Mapping[str, Any] | None = None) -> None:
        self.keep = None if keep is None else Retention.of(keep).spec()
        self._retention = Retention()
        self._sampled: frozenset[str] = frozenset()
        self._manifest: Manifest | None = None
        self._rounds: list[RoundArrays] = []
        self._bounds: list[dict[str, float]] = []

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If nothing has been recorded yet.
        """
        if self._manifest is None:
            raise HistoryFormatError("Nothing has been recorded in this history yet.")
        return self._manifest

    @property
    def is_empty(self) -> bool:
        """Whether nothing, not even a manifest, has been written yet."""
        return self._manifest is None

    def begin(self, manifest: Manifest) -> None:
        """Start a recording in an empty store.

        Raises:
            HistoryFormatError: If the store already holds a recording.
        """
        if self._manifest is not None:
            raise HistoryFormatError(
                f"The history already holds a recording of {len(self._rounds)} rounds. "
                "HINT: resume it, or record to another history."
            )
        if self.keep is not None:
            manifest = replace(manifest, keep=self.keep)
        self._retention = Retention.of(manifest.keep)
        self._sampled = self._retention.sample(tuple(manifest.clients), manifest.seed)
        self._manifest = Manifest.from_json(manifest.to_json())  # as a file would give it back

    def append(self, arrays: RoundArrays) -> None:
        """Append a round.

        Raises:
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
        """
        arrays.check(self.manifest, len(self._rounds))
        bounds = dict(zip(arrays.row_ids, arrays.magnitudes(), strict=True))
        kept = self._sampled if self._retention.stores(arrays.round) else frozenset()
        self._rounds.append(arrays.keep(kept))
        self._bounds.append({c: bound for c, bound in bounds.items() if c in kept})
        if self._retention.last is not None and arrays.round >= self._retention.last:
            expired = arrays.round - self._retention.last
            self._rounds[expired] = self._rounds[expired].keep(())
            self._bounds[expired] = {}

    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round as arrays; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
        """
        return self._round(t).select(client_ids)

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Raises:
            RoundNotFoundError: If the round is not stored.
        """
        return self._round(t).index(self._bounds[t])

    def _round(self, t: int) -> RoundArrays:
        if t not in self.rounds():
            raise RoundNotFoundError(
                f"Round {t} is not in the history, which has {len(self._rounds)} rounds. "
                "HINT: ask for fewer rounds, or record more."
            )
        return self._rounds[t]

    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""
        return range(len(self._rounds))

    def num_bytes(self) -> int:
        """Return the bytes of the vectors."""
        return sum(
            array.nbytes
            for r in self._rounds
            for array in (r.global_weights, r.updates, r.aggregate, r.buffers)
            if array is not None
        )
