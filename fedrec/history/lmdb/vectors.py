"""The vectors of a round, looked up in a database."""

from __future__ import annotations

from typing import NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.records import FLOAT32, StoredManifest, key

__all__ = ["EXACT", "VectorReader", "Wanted"]

EXACT = Float32Codec()


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
        self, recording: StoredManifest, environment: Environment, txn: lmdb.Transaction[memoryview]
    ) -> None:
        self._recording = recording
        self._environment = environment
        self._txn = txn

    def read(self, t: int, wanted: list[Wanted]) -> list[Damage]:
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

    def _find(self, cursor: lmdb.Cursor[memoryview], t: int, wanted: Wanted) -> memoryview:
        """Find the record of a vector of round `t`."""
        if not cursor.set_key(key(t, wanted.client_index)):
            raise self._recording.corrupted(t, wanted.client_index, "they are missing")
        return cursor.value()

    def _unpack(self, t: int, wanted: Wanted, record: memoryview, size: int) -> memoryview:
        """Check the record of a vector of round `t`."""
        return self._recording.unpack(
            *(record, t, wanted.client_index),
            codec=wanted.codec.id,
            dtype=FLOAT32,
            size=size,
            checksum=int(wanted.checksum, 16),
        )

    def _decode(self, t: int, wanted: Wanted, record: memoryview) -> Damage | None:
        """Check and decode a record."""
        codec, out = wanted.codec, wanted.out
        try:
            codec.decode(self._unpack(t, wanted, record, out.size), out)
        except DamagedRecordError as error:
            return error.damage
        except ValueError as error:
            why = f"as `{codec.name}` they make no sense: {error}"
            return self._recording.corrupted(t, wanted.client_index, why).damage
        return None
