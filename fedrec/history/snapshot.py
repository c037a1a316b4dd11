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
from fedrec.history.environment import Environment
from fedrec.history.recording import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    ROUND,
    Recording,
    digest,
    key,
)
from fedrec.history.rounds import RoundArrays

__all__ = ["Snapshot"]

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
        ids, d = recording.client_ids, recording.manifest.num_parameters
        present = [ids[index] for index in entry["present"]]
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

        updates = np.empty((len(rows), d), np.float32)
        wanted = [
            _Wanted("updates", entry["present"][k], entry["updates"][k], recording.codec, out)
            for k, out in zip(rows, updates, strict=True)
        ]
        # In the order of the keys, so that the file is read from front to back.
        wanted.sort(key=attrgetter("client_index"))
        weights, aggregate = np.empty(d, np.float32), np.empty(d, np.float32)
        wanted += [
            _Wanted("models", GLOBAL_WEIGHTS, entry["global_weights"], _EXACT, weights),
            _Wanted("models", AGGREGATE, entry["aggregate"], _EXACT, aggregate),
        ]
        buffers = None
        if recording.manifest.num_buffers:
            buffers = np.empty(recording.manifest.num_buffers, np.float32)
            wanted.append(_Wanted("models", BUFFERS, entry["buffers"], _EXACT, buffers))
        cursors = {
            name: self._environment.cursor(self._txn, name) for name in ("updates", "models")
        }
        found = [(one, self._find(cursors[one.database], t, one)) for one in wanted]
        map_rows(partial(self._decode, t), found, sum(one.out.nbytes for one in wanted))
        return RoundArrays(
            round=t,
            global_weights=weights,
            client_ids=tuple(present[k] for k in rows),
            updates=updates,
            num_samples=np.array([entry["num_samples"][k] for k in rows], np.int64),
            aggregate=aggregate,
            cohort=tuple(ids[index] for index in entry["cohort"]),
            refused={ids[index]: reason for index, reason in entry["refused"]},
            buffers=buffers,
        )

    def _find(self, cursor: lmdb.Cursor[memoryview], t: int, wanted: _Wanted) -> memoryview:
        """Find the record of a vector of round `t`."""
        if not cursor.set_key(key(t, wanted.client_index)):
            raise self.recording.corrupted(t, wanted.client_index, "they are missing")
        return cursor.value()

    def _decode(self, t: int, found: tuple[_Wanted, memoryview]) -> None:
        """Check and decode the record of a vector of round `t`."""
        (_, index, checksum, codec, out), record = found
        payload = self.recording.unpack(
            record,
            t,
            index,
            codec=codec.id,
            dtype=FLOAT32,
            size=out.size,
            checksum=int(checksum, 16),
        )
        try:
            codec.decode(payload, out)
        except ValueError as error:
            raise self.recording.corrupted(
                t, index, f"as `{codec.name}` they make no sense: {error}"
            ) from error
