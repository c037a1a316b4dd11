"""The vectors of a round, looked up in a database, or read from where they lie in its file."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.records import FLOAT32, HEADER_BYTES, Recording, key

__all__ = ["EXACT", "VectorReader", "Wanted"]

EXACT = Float32Codec()
# From here on it pays to read a vector from the file instead of copying it from the map.
_LARGE = 2**16
# What a thread reads in one call, and checks while the processor's cache has it. Fewer calls wait
# less for Python's lock.
_AT_ONCE = 2**20
# Of more bytes of vectors in a row, the last one is looked up, too.
_SHORT_ROW = 2**22


class Wanted(NamedTuple):
    """A vector to read, and where it goes."""

    database: str
    client_index: int
    checksum: str
    codec: Codec
    out: NDArray[np.float32]


class VectorReader:
    """Finds, checks and decodes vectors inside one read transaction.

    Args:
        recording: The recording that is read.
        environment: Where it is.
        txn: A read transaction of the environment.
    """

    def __init__(
        self, recording: Recording, environment: Environment, txn: lmdb.Transaction[memoryview]
    ) -> None:
        self._recording = recording
        self._environment = environment
        self._txn = txn

    def read(self, t: int, wanted: list[Wanted], stored: list[int]) -> list[Damage]:
        """Read vectors of round `t`; return what is damaged, as far as that shows.

        Bytes that are right are taken for what was written, even if nothing refers to them any
        more: `look_up` tells.

        Args:
            t: The round.
            wanted: Updates in the order of their clients, then global weights, aggregate, and
                buffers, if there are any.
            stored: All clients whose update is stored, in order.
        """
        return self.look_up(t, self._read_in_a_row(t, wanted, stored))

    def look_up(self, t: int, wanted: list[Wanted]) -> list[Damage]:
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

    def payload(self, t: int, wanted: Wanted, size: int) -> memoryview:
        """Return what is kept of a vector of so many numbers, checked but not decoded.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        cursor = self._environment.cursor(self._txn, wanted.database)
        return self._unpack(t, wanted, self._find(cursor, t, wanted), size)

    def _read_in_a_row(self, t: int, wanted: list[Wanted], stored: list[int]) -> list[Wanted]:
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
            num_updates = rank[wanted[split - 1].client_index] - rank[wanted[0].client_index] + 1
            self._environment.file.expect(first, step * (num_updates + 2))  # with the models
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
        self, t: int, row: list[tuple[Wanted, int]], first: int | None
    ) -> list[tuple[Wanted, int]]:
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

    def _offset(self, t: int, wanted: Wanted) -> int | None:
        """Return where in the file the record of a vector lies that is stored as it is."""
        try:
            found = self._find(self._environment.cursor(self._txn, wanted.database), t, wanted)
        except DamagedRecordError:
            return None
        as_it_is = len(found) == HEADER_BYTES + wanted.out.nbytes
        return self._environment.file.offset(found) if as_it_is else None

    def _try(self, t: int, places: list[tuple[Wanted, int]]) -> list[Wanted]:
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

    def _is_exact(self, wanted: Wanted) -> bool:
        """Whether the bytes on disk are those of the vector, and worth a call of their own."""
        is_plain = wanted.codec.id == EXACT.id and not self._recording.manifest.encryption
        return is_plain and wanted.out.nbytes >= _LARGE

    def _find(self, cursor: lmdb.Cursor[memoryview], t: int, wanted: Wanted) -> memoryview:
        """Find the record of a vector of round `t`."""
        if not cursor.set_key(key(t, wanted.client_index)):
            raise self._recording.corrupted(t, wanted.client_index, "they are missing")
        return cursor.value()

    def _unpack(
        self,
        t: int,
        wanted: Wanted,
        record: memoryview,
        size: int,
        payload: memoryview | None = None,
    ) -> memoryview:
        """Check the record of a vector of round `t`."""
        return self._recording.unpack(
            *(record, t, wanted.client_index),
            codec=wanted.codec.id,
            dtype=FLOAT32,
            size=size,
            checksum=int(wanted.checksum, 16),
            payload=payload,
        )

    def _decode(
        self, t: int, wanted: Wanted, record: memoryview, there: memoryview | None = None
    ) -> Damage | None:
        """Check and decode a record, or its header and what is `there` already."""
        codec, out = wanted.codec, wanted.out
        try:
            payload = self._unpack(t, wanted, record, out.size, there)
            if there is None:
                codec.decode(payload, out)
        except DamagedRecordError as error:
            return error.damage
        except ValueError as error:
            why = f"as `{codec.name}` they make no sense: {error}"
            return self._recording.corrupted(t, wanted.client_index, why).damage
        return None
