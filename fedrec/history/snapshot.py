"""A history as it is at one moment, whatever is written meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryCorruptedError, RoundNotFoundError
from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.damage import Damage, DamagedRecordError
from fedrec.history.environment import Environment
from fedrec.history.recording import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    MANIFEST,
    REPAIRS,
    ROUND,
    Recording,
    digest,
    key,
)
from fedrec.history.rounds import RoundArrays

__all__ = ["Snapshot", "load"]

_EXACT = Float32Codec()


class _Wanted(NamedTuple):
    """A vector to read, and where it goes."""

    database: str
    client_index: int
    checksum: str
    codec: Codec
    out: NDArray[np.float32]


class Snapshot:
    """Reads rounds inside one read transaction, and checks every byte of them.

    Args:
        recording: The recording that is read.
        environment: Where it is.
        txn: A read transaction of the environment; nothing that is returned depends on it.
    """

    def __init__(
        self, recording: Recording, environment: Environment, txn: lmdb.Transaction[memoryview]
    ) -> None:
        self.recording = recording
        self._environment = environment
        self._txn = txn

    def rounds(self) -> range:
        """Return the rounds that are stored.

        Raises:
            HistoryCorruptedError: If there is a gap.
        """
        cursor = self._environment.cursor(self._txn, "rounds")
        count = int.from_bytes(cursor.key()[:4], "big") + 1 if cursor.last() else 0
        if self._environment.count(self._txn, "rounds") != count:
            raise HistoryCorruptedError(
                f"History `{self.recording.history}` lacks rounds before round {count - 1}. "
                "HINT: restore it from a copy."
            )
        return range(count)

    def stored(self) -> list[int]:
        """Return the rounds that have a round record, whether or not some are missing."""
        cursor = self._environment.cursor(self._txn, "rounds")
        return sorted(int.from_bytes(key[:4], "big") for key in cursor.iternext(values=False))

    def repairs(self) -> list[dict[str, Any]]:
        """Return what repairs have dropped from this history, in the order they were made.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        found = self._environment.cursor(self._txn, "meta").get(key(0, REPAIRS))
        if found is None:
            return []
        repairs: list[dict[str, Any]] = json.loads(bytes(self.recording.unpack(found, 0, REPAIRS)))[
            "repairs"
        ]
        return repairs

    def entry(self, t: int) -> tuple[dict[str, Any], str]:
        """Return the round record of round `t`, and its hash.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        cursor = self._environment.cursor(self._txn, "rounds")
        if not (0 <= t < 2**32 and cursor.set_key(key(t, ROUND))):
            rounds = self.rounds()
            stored = f"rounds 0..{rounds[-1]}" if rounds else "no rounds yet"
            raise RoundNotFoundError(
                f"Round {t} is not in history `{self.recording.history}` ({stored}). "
                "HINT: ask for fewer rounds, or record more."
            )
        record = cursor.value()
        payload = self.recording.unpack(record, t, ROUND)
        return json.loads(bytes(payload)), digest(record)

    def read(self, entry: dict[str, Any], client_ids: Sequence[str] | None) -> RoundArrays:
        """Return the round of a round record, or these clients' part of it.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        recording, t = self.recording, entry["round"]
        present = [recording.client_ids[index] for index in entry["present"]]
        rows = list(range(len(present)))
        if client_ids is not None:
            row = {client_id: k for k, client_id in enumerate(present)}
            missing = [c for c in client_ids if c not in row]
            if missing:
                raise RoundNotFoundError(
                    f"Round {t} of history `{recording.history}` has no update of "
                    f"{', '.join(missing)}. HINT: ask for clients in its `client_ids`."
                )
            rows = [row[c] for c in client_ids]

        arrays, wanted = self._wanted(entry, rows)
        damage = self._fill(t, wanted)
        if damage:
            raise DamagedRecordError(recording.history, damage[0])
        return arrays

    def damage(self, entry: dict[str, Any]) -> list[Damage]:
        """Return what is damaged in the round of a round record."""
        _, wanted = self._wanted(entry, range(len(entry["present"])))
        return self._fill(entry["round"], wanted)

    def record(self, t: int, database: str, index: int, checksum: str) -> memoryview:
        """Return the record of a vector, checked but not decoded.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        manifest = self.recording.manifest
        codec = self.recording.codec if database == "updates" else _EXACT
        size = manifest.num_buffers if index == BUFFERS else manifest.num_parameters
        wanted = _Wanted(database, index, checksum, codec, np.empty(0, np.float32))
        record = self._find(self._environment.cursor(self._txn, database), t, wanted)
        self._payload(t, wanted, record, size)
        return record

    def _wanted(
        self, entry: dict[str, Any], rows: Sequence[int]
    ) -> tuple[RoundArrays, list[_Wanted]]:
        """Return a round with room for these of its updates, and what is to be read into it."""
        ids, manifest = self.recording.client_ids, self.recording.manifest
        d, b = manifest.num_parameters, manifest.num_buffers
        present = entry["present"]
        updates = np.empty((len(rows), d), np.float32)
        weights, aggregate = np.empty(d, np.float32), np.empty(d, np.float32)
        buffers = np.empty(b, np.float32) if b else None
        wanted = [
            _Wanted("updates", present[k], entry["updates"][k], self.recording.codec, out)
            for k, out in zip(rows, updates, strict=True)
        ]
        # In the order of the keys, so that the file is read from front to back.
        wanted.sort(key=attrgetter("client_index"))
        wanted += [
            _Wanted("models", GLOBAL_WEIGHTS, entry["global_weights"], _EXACT, weights),
            _Wanted("models", AGGREGATE, entry["aggregate"], _EXACT, aggregate),
        ]
        if buffers is not None:
            wanted.append(_Wanted("models", BUFFERS, entry["buffers"], _EXACT, buffers))
        arrays = RoundArrays(
            round=entry["round"],
            global_weights=weights,
            client_ids=tuple(ids[present[k]] for k in rows),
            updates=updates,
            num_samples=np.array([entry["num_samples"][k] for k in rows], np.int64),
            aggregate=aggregate,
            cohort=tuple(ids[index] for index in entry["cohort"]),
            refused={ids[index]: reason for index, reason in entry["refused"]},
            buffers=buffers,
        )
        return arrays, wanted

    def _fill(self, t: int, wanted: list[_Wanted]) -> list[Damage]:
        """Read, check and decode vectors of round `t`; return what is damaged."""
        cursors = {
            name: self._environment.cursor(self._txn, name) for name in ("updates", "models")
        }
        found, damage = [], []
        for one in wanted:
            try:
                found.append((one, self._find(cursors[one.database], t, one)))
            except DamagedRecordError as error:
                damage.append(error.damage)
        decoded = map_rows(partial(self._decode, t), found, sum(one.out.nbytes for one in wanted))
        return damage + [one for one in decoded if one is not None]

    def _find(self, cursor: lmdb.Cursor[memoryview], t: int, wanted: _Wanted) -> memoryview:
        """Find the record of a vector of round `t`."""
        if not cursor.set_key(key(t, wanted.client_index)):
            raise self.recording.corrupted(t, wanted.client_index, "they are missing")
        return cursor.value()

    def _payload(self, t: int, wanted: _Wanted, record: memoryview, size: int) -> memoryview:
        """Check the record of a vector of round `t`."""
        return self.recording.unpack(
            record,
            t,
            wanted.client_index,
            codec=wanted.codec.id,
            dtype=FLOAT32,
            size=size,
            checksum=int(wanted.checksum, 16),
        )

    def _decode(self, t: int, found: tuple[_Wanted, memoryview]) -> Damage | None:
        """Check and decode the record of a vector of round `t`; return what is wrong with it."""
        wanted, record = found
        codec = wanted.codec
        try:
            codec.decode(self._payload(t, wanted, record, wanted.out.size), wanted.out)
        except DamagedRecordError as error:
            return error.damage
        except ValueError as error:
            why = f"as `{codec.name}` they make no sense: {error}"
            return self.recording.corrupted(t, wanted.client_index, why).damage
        return None


def load(history: str, environment: Environment) -> Recording:
    """Read what a history was begun with.

    Raises:
        HistoryFormatError: If it is not a history, or of a newer format version.
        HistoryCorruptedError: If it is not what was written.
    """
    with environment.read() as txn:
        found = environment.cursor(txn, "meta").get(key(0, MANIFEST), b"")
        return Recording.load(history, bytes(found))
