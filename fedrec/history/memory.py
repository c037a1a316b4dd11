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
        stored = self._sampled if self._retention.stores(arrays.round) else frozenset()
        rows = [k for k, c in enumerate(arrays.client_ids) if c in stored]
        largest = arrays.magnitudes()
        self._bounds.append({arrays.client_ids[k]: largest[k] for k in rows})
        if len(rows) < len(arrays.client_ids):
            arrays = replace(arrays, updates=arrays.updates[rows])
        self._rounds.append(arrays.copy())
        expired = self._retention.last and len(self._rounds) - 1 - self._retention.last
        if expired is not None and expired >= 0:
            self._bounds[expired] = {}
            old = self._rounds[expired]
            self._rounds[expired] = replace(old, updates=old.updates[:0].copy())

    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round as arrays; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
        """
        stored = self._stored(t)
        wanted = stored.client_ids if client_ids is None else tuple(client_ids)
        if wanted == stored.client_ids and len(stored.updates) == len(wanted):
            return stored.copy()
        row = {client_id: k for k, client_id in enumerate(self._bounds[t])}
        missing = [c for c in wanted if c not in row]
        if missing:
            dropped = set(missing) & set(stored.client_ids)
            raise RoundNotFoundError(
                f"Round {t} of the history has no update of {', '.join(missing[:10])}"
                f"{', ...' if len(missing) > 10 else ''}"
                + (f", as it keeps updates of {self._retention}" if dropped else "")
                + f". HINT: ask for clients in `index({t}).{'kept' if dropped else 'present'}`."
            )
        return replace(
            stored,
            client_ids=wanted,
            updates=stored.updates[[row[c] for c in wanted]],
            num_samples=stored.num_samples[[stored.client_ids.index(c) for c in wanted]],
            global_weights=stored.global_weights.copy(),
            aggregate=stored.aggregate.copy(),
            buffers=None if stored.buffers is None else stored.buffers.copy(),
        )

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Raises:
            RoundNotFoundError: If the round is not stored.
        """
        stored = self._stored(t)
        return RoundIndex(
            round=t,
            cohort=stored.cohort,
            refused=dict(stored.refused),
            num_samples=dict(zip(stored.client_ids, stored.num_samples.tolist(), strict=True)),
            bounds=dict(self._bounds[t]),
        )

    def _stored(self, t: int) -> RoundArrays:
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
