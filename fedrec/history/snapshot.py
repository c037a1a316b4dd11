"""A history as it is at one moment, whatever is written meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryCorruptedError, RoundNotFoundError
from fedrec.history.audit import broken_entries
from fedrec.history.buffers import Buffers
from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.damage import Damage, DamagedRecordError
from fedrec.history.entries import read_entry
from fedrec.history.environment import Environment
from fedrec.history.recording import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    FORGOTTEN,
    GLOBAL_WEIGHTS,
    HEADER_BYTES,
    REPAIRS,
    ROUND,
    Recording,
    digest,
    key,
)
from fedrec.history.rounds import RoundArrays

__all__ = ["Snapshot"]

_EXACT = Float32Codec()
# From here on it pays to read a vector from the file instead of copying it from the map.
_LARGE = 2**16
# What a thread reads in one call, and checks while the processor's cache has it. Fewer calls wait
# less for Python's lock.
_AT_ONCE = 2**20
# Of more vectors in a row, the last one is looked up, too.
_SHORT_ROW = 2**22


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
        buffers: Where memory for updates comes from.
    """

    def __init__(
        self,
        recording: Recording,
        environment: Environment,
        txn: lmdb.Transaction[memoryview],
        buffers: Buffers | None = None,
    ) -> None:
        self.recording = recording
        self._buffers = buffers or Buffers()
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
        return self._list(REPAIRS, "repairs")

    def forgotten(self) -> list[dict[str, Any]]:
        """Return which clients were forgotten, in the order that happened.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return self._list(FORGOTTEN, "forgotten")

    def lists_damage(self) -> list[Damage]:
        """Return what is damaged in the lists of repairs and of forgotten clients."""
        damage = []
        for read in (self.repairs, self.forgotten):
            try:
                entries = read()
            except DamagedRecordError as error:
                damage.append(error.damage)
                continue
            if read == self.forgotten:
                damage += broken_entries(entries)
        return damage

    def _list(self, index: int, name: str) -> list[dict[str, Any]]:
        found = self._environment.cursor(self._txn, "meta").get(key(0, index))
        if found is None:
            return []
        entries: list[dict[str, Any]] = json.loads(bytes(self.recording.unpack(found, 0, index)))[
            name
        ]
        return entries

    def entry(self, t: int) -> tuple[dict[str, Any], str]:
        """Return the round record of round `t`, which must not be changed, and its hash.

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
        record = bytes(cursor.value())
        # Who is there, whose update was kept, and what was sent is asked one after the other.
        last = self.recording.last_entry
        if last is None or last[0] != record or last[1]["round"] != t:
            payload = self.recording.unpack(memoryview(record), t, ROUND)
            size = self._environment.num_bytes()
            entry = read_entry(payload, self.recording, t, size)
            last = self.recording.last_entry = record, entry, digest(record)
        return last[1:]

    def kept(self, entry: dict[str, Any]) -> list[int]:
        """Return which of the clients present in a round record have their update stored."""
        cursor = self._environment.cursor(self._txn, "rounds")
        num_rounds = int.from_bytes(cursor.key()[:4], "big") + 1 if cursor.last() else 0
        if self.recording.retention.expired(entry["round"], num_rounds):
            return []
        return [k for k, checksum in enumerate(entry["updates"]) if checksum is not None]

    def read(self, entry: dict[str, Any], client_ids: Sequence[str] | None) -> RoundArrays:
        """Return the round of a round record, or these clients' part of it.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        recording, t = self.recording, entry["round"]
        present = [recording.client_ids[index] for index in entry["present"]]
        row = {present[k]: k for k in self.kept(entry)}
        wanted_ids = present if client_ids is None else client_ids
        recording.require_known(wanted_ids)
        missing = [c for c in wanted_ids if c not in row]
        if missing:
            dropped = set(present) & set(missing)
            raise RoundNotFoundError(
                f"Round {t} of history `{recording.history}` has no update of "
                f"{', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}"
                + (f", as it keeps updates of {recording.retention}" if dropped else "")
                + f". HINT: ask for clients in its `{'kept' if dropped else 'client_ids'}`."
            )
        rows = [row[c] for c in wanted_ids]

        arrays, wanted = self._wanted(entry, rows)
        left = self._read_in_a_row(t, wanted, sorted(entry["present"][k] for k in row.values()))
        damage = self._fill(t, left)
        if damage:
            raise DamagedRecordError(recording.history, damage[0])
        return arrays

    def damage(self, entry: dict[str, Any]) -> list[Damage]:
        """Return what is damaged in the round of a round record."""
        left = {self.recording.indices[c] for c in self.recording.pending}
        rows = [k for k in self.kept(entry) if entry["present"][k] not in left]
        _, wanted = self._wanted(entry, rows)
        return self._fill(entry["round"], wanted)

    def payload(
        self, t: int, database: str, index: int, checksum: str
    ) -> tuple[memoryview, int, int]:
        """Return what is kept of a vector, checked and decrypted but not decoded.

        Returns:
            The payload, `Codec.id`, and how many numbers it holds.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        manifest = self.recording.manifest
        codec = self.recording.codec if database == "updates" else _EXACT
        size = manifest.num_buffers if index == BUFFERS else manifest.num_parameters
        wanted = _Wanted(database, index, checksum, codec, np.empty(0, np.float32))
        record = self._find(self._environment.cursor(self._txn, database), t, wanted)
        return self._payload(t, wanted, record, size), codec.id, size

    def stored_payload(self, t: int, index: int) -> memoryview | None:
        """Return a client's update as it lies on disk, unchecked; `None` if it is not stored."""
        cursor = self._environment.cursor(self._txn, "updates")
        return cursor.value()[HEADER_BYTES:] if cursor.set_key(key(t, index)) else None

    def locked_damage(self, t: int) -> list[Damage]:
        """Return what is damaged in round `t`, as far as that can be told without keys."""
        damage = []
        for database in ("updates", "models", "rounds"):
            cursor = self._environment.cursor(self._txn, database)
            cursor.set_range(key(t, 0))
            for found, record in cursor.iternext():
                if found[:4] != key(t, 0)[:4]:
                    break
                index = int.from_bytes(found[4:], "big")
                try:
                    self.recording.check(record, t, index)
                except DamagedRecordError as error:
                    damage.append(error.damage)
        return damage

    def _wanted(
        self, entry: dict[str, Any], rows: Sequence[int]
    ) -> tuple[RoundArrays, list[_Wanted]]:
        """Return a round with room for these of its updates, and what is to be read into it."""
        ids, manifest = self.recording.client_ids, self.recording.manifest
        d, b = manifest.num_parameters, manifest.num_buffers
        present = entry["present"]
        updates = self._buffers.take(len(rows), d)
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

    def _read_in_a_row(self, t: int, wanted: list[_Wanted], stored: list[int]) -> list[_Wanted]:
        """Read vectors from where they should be; return what is left to be looked for.

        LMDB's binding touches every page of a value that it finds, which takes as long as reading
        it. Vectors that were stored as they are, one after the other, are expected to lie that
        way. Their checksums tell whether they do.
        """
        split = sum(one.database == "updates" for one in wanted)
        if not split or not self._is_exact(wanted[0]):
            return wanted
        num_bytes = wanted[0].out.nbytes
        step = self._environment.pages_bytes(HEADER_BYTES + num_bytes)
        rank = {index: number for number, index in enumerate(stored)}
        first = self._offset(t, wanted[0])
        if first is not None:
            self._environment.file.expect(first, step * (len(stored) + 2))
        updates = [(one, step * rank[one.client_index]) for one in wanted[:split]]
        models = [(one, step * k) for k, one in enumerate(wanted[split : split + 2])]
        places = self._places(t, updates, first)
        places += self._places(t, models, self._offset(t, models[0][0]))
        at_once = -(-_AT_ONCE // num_bytes)
        groups = [places[k : k + at_once] for k in range(0, len(places), at_once)]
        missed = chain.from_iterable(map_rows(partial(self._try, t), groups, num_bytes * split))
        there = {one.client_index for one, _ in places}
        return [*missed, *(one for one in wanted if one.client_index not in there)]

    def _places(
        self, t: int, row: list[tuple[_Wanted, int]], first: int | None
    ) -> list[tuple[_Wanted, int]]:
        """Return where in the file vectors should be.

        Args:
            t: Their round.
            row: Vectors that were stored one after the other, with their distances from any place.
            first: Where the first one is; `None` if that is not known.
        """
        if first is None:
            return []
        (_, begin), (last, end) = row[0], row[-1]
        if end - begin <= _SHORT_ROW or self._offset(t, last) == first + end - begin:
            return [(one, first + distance - begin) for one, distance in row]
        half = len(row) // 2
        second = self._offset(t, row[half][0])
        return self._places(t, row[:half], first) + self._places(t, row[half:], second)

    def _offset(self, t: int, wanted: _Wanted) -> int | None:
        """Return where in the file the record of a vector lies that is stored as it is."""
        try:
            found = self._find(self._environment.cursor(self._txn, wanted.database), t, wanted)
        except DamagedRecordError:
            return None
        as_it_is = len(found) == HEADER_BYTES + wanted.out.nbytes
        return self._environment.file.offset(found) if as_it_is else None

    def _try(self, t: int, places: list[tuple[_Wanted, int]]) -> list[_Wanted]:
        """Read records as they are from places in the file; return those that are not there."""
        headers = [bytearray(HEADER_BYTES) for _ in places]
        buffers = [one.out.data.cast("B") for one, _ in places]
        offsets = [offset for _, offset in places]
        if not self._environment.file.read_into(
            zip(offsets, zip(headers, buffers, strict=True), strict=True)
        ):
            return [one for one, _ in places]
        return [
            one
            for (one, _), header, payload in zip(places, headers, buffers, strict=True)
            if self._decode(t, one, memoryview(header), payload) is not None
        ]

    def _is_exact(self, wanted: _Wanted) -> bool:
        """Whether the bytes on disk are those of the vector, and worth a call of their own."""
        is_plain = wanted.codec.id == _EXACT.id and not self.recording.manifest.encryption
        return is_plain and wanted.out.nbytes >= _LARGE

    def _fill(self, t: int, wanted: list[_Wanted]) -> list[Damage]:
        """Find, check and decode vectors of round `t`; return what is damaged."""
        cursors = {k: self._environment.cursor(self._txn, k) for k in ("updates", "models")}
        found, damage = [], []
        for one in wanted:
            try:
                found.append((one, self._find(cursors[one.database], t, one)))
            except DamagedRecordError as error:
                damage.append(error.damage)
        num_bytes = sum(one.out.nbytes for one in wanted)
        decoded = map_rows(lambda pair: self._decode(t, *pair), found, num_bytes)
        return damage + [one for one in decoded if one is not None]

    def _find(self, cursor: lmdb.Cursor[memoryview], t: int, wanted: _Wanted) -> memoryview:
        """Find the record of a vector of round `t`."""
        if not cursor.set_key(key(t, wanted.client_index)):
            raise self.recording.corrupted(t, wanted.client_index, "they are missing")
        return cursor.value()

    def _payload(
        self,
        t: int,
        wanted: _Wanted,
        record: memoryview,
        size: int,
        payload: memoryview | None = None,
    ) -> memoryview:
        """Check the record of a vector of round `t`."""
        return self.recording.unpack(
            *(record, t, wanted.client_index),
            codec=wanted.codec.id,
            dtype=FLOAT32,
            size=size,
            checksum=int(wanted.checksum, 16),
            payload=payload,
        )

    def _decode(
        self, t: int, wanted: _Wanted, record: memoryview, there: memoryview | None = None
    ) -> Damage | None:
        """Check and decode a record, or its header and what is `there` already."""
        codec, out = wanted.codec, wanted.out
        try:
            payload = self._payload(t, wanted, record, out.size, there)
            if there is None:
                codec.decode(payload, out)
        except DamagedRecordError as error:
            return error.damage
        except ValueError as error:
            why = f"as `{codec.name}` they make no sense: {error}"
            return self.recording.corrupted(t, wanted.client_index, why).damage
        return None
