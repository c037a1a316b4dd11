"""Reading a recording: what it was begun with, and its rounds as they are at one moment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryCorruptedError, HistoryFormatError, RoundNotFoundError
from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.int8 import Int8Codec, num_blocks
from fedrec.history.codecs.rows import map_rows
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.encryption import Keys, master_key
from fedrec.history.lmdb.entries import read_entry
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.forgotten import broken_chain, noted
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    FORGOTTEN,
    GLOBAL_WEIGHTS,
    MANIFEST,
    REPAIRS,
    ROUND,
    StoredManifest,
    digest,
    key,
)
from fedrec.history.rounds import RoundArrays, RoundIndex

__all__ = ["Snapshot", "host_memory", "load", "not_stored"]

_EXACT = Float32Codec()
_MISSING = "they are missing"


def load(history: str, environment: Environment, source: str | None = None) -> StoredManifest:
    """Read what a recording was begun with, and its keys if it is encrypted.

    Args:
        history: How errors name the history.
        environment: Where it is.
        source: Where its master key comes from, as in `fedrec.history.lmdb.encryption.master_key`.

    Raises:
        HistoryFormatError: If it is not a history, or of a newer format version.
        HistoryCorruptedError: If it is not what was written.
        HistoryKeyError: If the master key is not that of the history.
    """
    with environment.read() as txn:
        record = environment.cursor(txn, "meta").get(key(0, MANIFEST), b"")
        recording = StoredManifest.load(history, bytes(record))
    if recording.manifest.encryption is not None:
        master = master_key(source, environment.directory)
        if master is not None:
            recording.keys = Keys.load(history, environment.directory, master)
    elif source is not None:
        raise HistoryFormatError(
            f"History `{history}` is not encrypted, but was opened with a master key. HINT: leave "
            "that out, or record to another path."
        )
    _load_forgotten(recording, environment)
    return recording


def _load_forgotten(recording: StoredManifest, environment: Environment) -> None:
    if not recording.is_locked:
        with environment.read() as txn:
            try:
                forgettings = Snapshot(recording, environment, txn).forgotten()
            except DamagedRecordError:  # `check` says so
                forgettings = []
        recording.forgotten = {f["client_id"]: f["when"] for f in forgettings}
    note = noted(environment.directory, recording.manifest.store_id)
    if note is not None:
        recording.pending = tuple(note["clients"])
        recording.forgotten |= dict.fromkeys(recording.pending, note["when"])


class _Vector(NamedTuple):
    """A vector to read: where it lies, the checksum that its entry says, and room for it.

    With room for the steps of its blocks, `out` is room for its whole numbers.
    """

    database: str
    client_index: int
    checksum: str
    codec: Codec
    out: NDArray[Any]
    steps: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Reads rounds inside one read transaction, and checks every byte of them.

    Args:
        recording: The recording that is read.
        environment: Where it is.
        txn: A read transaction of the environment; nothing that is returned depends on it.
    """

    recording: StoredManifest
    environment: Environment
    txn: lmdb.Transaction[memoryview]

    @property
    def parts(self) -> list[Snapshot]:
        """One for each file: this one."""
        return [self]

    @property
    def start(self) -> str:
        """What the first round record has as the hash of the one before it."""
        return digest(self.recording.record)

    def rounds(self) -> range:
        """Return the rounds that are stored.

        Raises:
            HistoryCorruptedError: If there is a gap.
        """
        count = self._num_rounds()
        if self.environment.count(self.txn, "rounds") != count:
            raise HistoryCorruptedError(
                f"History `{self.recording.history}` lacks rounds before round {count - 1}. "
                "HINT: restore it from a copy."
            )
        return range(count)

    def round_numbers(self) -> list[int]:
        """Return the rounds that have a record, whether or not some are missing."""
        cursor = self.environment.cursor(self.txn, "rounds")
        return sorted(int.from_bytes(k[:4], "big") for k in cursor.iternext(values=False))

    def repairs(self) -> list[dict[str, Any]]:
        """Return what repairs have dropped from this history, in the order they were made.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return self._list(REPAIRS, "repairs")

    def forgotten(self) -> list[dict[str, Any]]:
        """Return which clients were forgotten when, in that order.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return self._list(FORGOTTEN, "forgotten")

    def lists_damage(self) -> list[Damage]:
        """Return what is damaged in the lists of repairs and of forgotten clients."""
        damage = []
        try:
            self.repairs()
        except DamagedRecordError as error:
            damage.append(error.damage)
        try:
            damage += broken_chain(self.forgotten())
        except DamagedRecordError as error:
            damage.append(error.damage)
        return damage

    def _list(self, index: int, name: str) -> list[dict[str, Any]]:
        record = self.environment.cursor(self.txn, "meta").get(key(0, index))
        if record is None:
            return []
        content = json.loads(bytes(self.recording.unpack(record, 0, index)))
        result: list[dict[str, Any]] = content[name]
        return result

    def _num_rounds(self) -> int:
        cursor = self.environment.cursor(self.txn, "rounds")
        return int.from_bytes(cursor.key()[:4], "big") + 1 if cursor.last() else 0

    def entry(self, t: int) -> tuple[dict[str, Any], str]:
        """Return the entry of round `t`, which must not be changed, and the hash of its record.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        cursor = self.environment.cursor(self.txn, "rounds")
        if not (0 <= t < 2**32 and cursor.set_key(key(t, ROUND))):
            raise not_stored(self.recording.history, t, self.rounds())
        record = bytes(cursor.value())
        known = self.recording.known_entry(t, record)
        if known is None:
            payload = self.recording.unpack(memoryview(record), t, ROUND)
            entry = read_entry(payload, self.recording, t, self.environment.num_bytes())
            known = self.recording.keep_entry(t, record, entry)
        return known

    def index(self, t: int) -> RoundIndex:
        """Return what is known of round `t` without reading its vectors.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        entry, _ = self.entry(t)
        ids = self.recording.client_ids
        present, bounds = [ids[index] for index in entry["present"]], entry["bounds"]
        return RoundIndex(
            round=t,
            cohort=tuple(ids[index] for index in entry["cohort"]),
            refused={ids[index]: reason for index, reason in entry["refused"]},
            num_samples=dict(zip(present, entry["num_samples"], strict=True)),
            bounds={present[row]: bounds[row] for row in self.kept(entry)},
        )

    def kept(self, entry: dict[str, Any]) -> list[int]:
        """Return the rows of an entry, one for each client present, whose update is stored."""
        retention = self.recording.retention
        if retention.last is not None and retention.expired(entry["round"], self._num_rounds()):
            return []
        return [row for row, checksum in enumerate(entry["updates"]) if checksum is not None]

    def read(self, entry: dict[str, Any], client_ids: Sequence[str] | None) -> RoundArrays:
        """Return the round of an entry, or these clients' part of it.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        arrays, damage = self._read_rows(entry, self._rows(entry, client_ids))
        if damage:
            raise DamagedRecordError(self.recording.history, damage[0])
        return arrays

    def read_undecoded(
        self, entry: dict[str, Any], client_ids: Sequence[str] | None
    ) -> tuple[RoundArrays, NDArray[np.int8], NDArray[np.float32]]:
        """Return the round of an entry, stored as `int8`, without decoding updates.

        Returns:
            The round without its updates; and for each of them whole numbers, shape $(m, d)$, and
            the steps of their blocks, shape $(m, b)$.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        rows, d = self._rows(entry, client_ids), self.recording.manifest.num_parameters
        codes = np.empty((len(rows), d), np.int8)
        steps = np.empty((len(rows), num_blocks(d)), np.float32)
        arrays, damage = self._read_rows(entry, rows, (codes, steps))
        if damage:
            raise DamagedRecordError(self.recording.history, damage[0])
        return arrays, codes, steps

    def read_updates(
        self, entry: dict[str, Any], client_ids: Sequence[str], out: Sequence[NDArray[np.float32]]
    ) -> None:
        """Read these clients' updates of the round of an entry to their places.

        Args:
            entry: The entry.
            client_ids: The clients.
            out: For each of them room for $d$ numbers.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        vectors = self._updates(entry, self._rows(entry, client_ids), out)
        damage = self._read_vectors(entry["round"], vectors)
        if damage:
            raise DamagedRecordError(self.recording.history, damage[0])

    def _rows(self, entry: dict[str, Any], client_ids: Sequence[str] | None) -> list[int]:
        """Return the rows of clients, by default of all, whose updates must be stored.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
        """
        recording, t = self.recording, entry["round"]
        present = [recording.client_ids[index] for index in entry["present"]]
        row_of = {present[row]: row for row in self.kept(entry)}
        asked = present if client_ids is None else client_ids
        recording.require_known(asked)
        missing = [c for c in asked if c not in row_of]
        if missing:
            dropped = set(present) & set(missing)
            raise RoundNotFoundError(
                f"Round {t} of history `{recording.history}` has no update of "
                f"{', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}"
                + (f", as it keeps updates of {recording.retention}" if dropped else "")
                + f". HINT: ask for clients in `index({t}).{'kept' if dropped else 'present'}`."
            )
        return [row_of[c] for c in asked]

    def _updates(
        self,
        entry: dict[str, Any],
        rows: Sequence[int],
        out: Sequence[NDArray[Any]],
        steps: Sequence[NDArray[np.float32]] | None = None,
    ) -> list[_Vector]:
        """List the updates in these rows, to be read to these places."""
        codec = self.recording.codec
        vectors = [
            _Vector("updates", entry["present"][row], entry["updates"][row], codec, place)
            for row, place in zip(rows, out, strict=True)
        ]
        if steps is not None:
            pairs = zip(vectors, steps, strict=True)
            vectors = [vector._replace(steps=place) for vector, place in pairs]
        # In the order of the keys, so that the file is read from front to back.
        vectors.sort(key=attrgetter("client_index"))
        return vectors

    def damage(self, entry: dict[str, Any]) -> list[Damage]:
        """Return what is damaged in the vectors of an entry."""
        left_out = {self.recording.indices[c] for c in self.recording.pending}
        rows = [row for row in self.kept(entry) if entry["present"][row] not in left_out]
        return self._read_rows(entry, rows)[1]

    def _read_rows(
        self,
        entry: dict[str, Any],
        rows: Sequence[int],
        undecoded: tuple[NDArray[np.int8], NDArray[np.float32]] | None = None,
    ) -> tuple[RoundArrays, list[Damage]]:
        """Return the round of an entry with the updates of these rows, and what is damaged.

        With room for whole numbers and steps, updates are there and not in the round.
        """
        ids, manifest = self.recording.client_ids, self.recording.manifest
        present, d, b = entry["present"], manifest.num_parameters, manifest.num_buffers
        updates = host_memory(len(rows) if undecoded is None else 0, d)
        weights, aggregate = np.empty(d, np.float32), np.empty(d, np.float32)
        buffers = np.empty(b, manifest.buffer_dtype) if b else None
        if undecoded is None:
            vectors = self._updates(entry, rows, list(updates))
        else:
            codes, steps = undecoded
            vectors = self._updates(entry, rows, list(codes), list(steps))
        vectors += [
            _Vector("models", GLOBAL_WEIGHTS, entry["global_weights"], _EXACT, weights),
            _Vector("models", AGGREGATE, entry["aggregate"], _EXACT, aggregate),
        ]
        if buffers is not None:
            words = buffers.view(np.float32)
            vectors.append(_Vector("models", BUFFERS, entry["buffers"], _EXACT, words))
        damage = self._read_vectors(entry["round"], vectors)
        departure = entry["departure"]
        if departure is not None and departure["client"] is not None:
            departure = {**departure, "client": ids[departure["client"]]}
        arrays = RoundArrays(
            round=entry["round"],
            global_weights=weights,
            client_ids=tuple(ids[present[row]] for row in rows),
            updates=updates,
            num_samples=np.array([entry["num_samples"][row] for row in rows], np.int64),
            aggregate=aggregate,
            cohort=tuple(ids[index] for index in entry["cohort"]),
            refused={ids[index]: reason for index, reason in entry["refused"]},
            buffers=buffers,
            departure=departure,
        )
        return arrays, damage

    def _read_vectors(self, t: int, vectors: Sequence[_Vector]) -> list[Damage]:
        """Look up vectors of round `t`, check and decode them; return what is damaged."""
        cursors = {name: self.environment.cursor(self.txn, name) for name in ("updates", "models")}
        records, damage = [], []
        for vector in vectors:
            cursor = cursors[vector.database]
            if cursor.set_key(key(t, vector.client_index)):
                records.append((vector, cursor.value()))
            else:
                damage.append(self.recording.corrupted(t, vector.client_index, _MISSING).damage)
        num_bytes = sum(vector.out.nbytes for vector in vectors)
        decoded = map_rows(lambda pair: self._decode(t, *pair), records, num_bytes)
        return damage + [damaged for damaged in decoded if damaged is not None]

    def _decode(self, t: int, vector: _Vector, record: memoryview) -> Damage | None:
        """Check the record of a vector of round `t`, and decode it to its place."""
        codec, out = vector.codec, vector.out
        try:
            payload = self.recording.unpack(
                *(record, t, vector.client_index),
                codec=codec.id,
                dtype=FLOAT32,
                size=out.size,
                checksum=vector.checksum,
            )
            if vector.steps is None:
                codec.decode(payload, out)
            else:
                assert isinstance(codec, Int8Codec)
                out[:], vector.steps[:] = codec.parts(payload, out.size)
        except DamagedRecordError as error:
            return error.damage
        except ValueError as error:
            why = f"as `{codec.name}` they make no sense: {error}"
            return self.recording.corrupted(t, vector.client_index, why).damage
        return None

    def payload(
        self, t: int, database: str, index: int, checksum: str
    ) -> tuple[memoryview, int, int]:
        """Return the payload of a vector, checked and decrypted but not decoded.

        Returns:
            The payload, `Codec.id`, and how many numbers it holds.

        Raises:
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        manifest = self.recording.manifest
        codec = self.recording.codec if database == "updates" else _EXACT
        size = manifest.buffer_words if index == BUFFERS else manifest.num_parameters
        cursor = self.environment.cursor(self.txn, database)
        if not cursor.set_key(key(t, index)):
            raise self.recording.corrupted(t, index, _MISSING)
        payload = self.recording.unpack(
            *(cursor.value(), t, index),
            codec=codec.id,
            dtype=FLOAT32,
            size=size,
            checksum=checksum,
        )
        return payload, codec.id, size

    def holds(self, t: int, index: int) -> bool:
        """Whether there is a record for a client's update; it is not checked."""
        cursor = self.environment.cursor(self.txn, "updates")
        return bool(cursor.set_key(key(t, index)))

    def locked_damage(self, t: int) -> list[Damage]:
        """Return what is damaged in round `t`, as far as it shows without keys."""
        damage = []
        for database in ("updates", "models", "rounds"):
            cursor = self.environment.cursor(self.txn, database)
            cursor.set_range(key(t, 0))
            for record_key, record in cursor.iternext():
                if record_key[:4] != key(t, 0)[:4]:
                    break
                index = int.from_bytes(record_key[4:], "big")
                try:
                    self.recording.check(record, t, index)
                except DamagedRecordError as error:
                    damage.append(error.damage)
        return damage


def not_stored(history: str, t: int, rounds: range) -> RoundNotFoundError:
    """Return the error for a round that a history with these rounds does not have."""
    stored = f"rounds 0..{rounds[-1]}" if rounds else "no rounds yet"
    return RoundNotFoundError(
        f"Round {t} is not in history `{history}` ({stored}). HINT: ask for fewer rounds, or "
        "record more."
    )


def host_memory(*shape: int) -> NDArray[np.float32]:
    """Return float32 numbers, of any value, in memory that a GPU in use reads at full speed."""
    torch = sys.modules.get("torch")  # who has not imported it uses no GPU
    if torch is not None and torch.cuda.is_initialized():
        result: NDArray[np.float32] = torch.empty(shape, pin_memory=True).numpy()
        return result
    return np.empty(shape, np.float32)
