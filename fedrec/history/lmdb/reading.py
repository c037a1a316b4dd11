"""A history as it is at one moment, whatever is written meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryCorruptedError, RoundNotFoundError
from fedrec.history.lmdb.audit import broken_entries
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.entries import read_entry
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    FORGOTTEN,
    GLOBAL_WEIGHTS,
    REPAIRS,
    ROUND,
    StoredManifest,
    digest,
    key,
)
from fedrec.history.lmdb.vectors import EXACT, VectorReader, Wanted
from fedrec.history.rounds import RoundArrays, RoundIndex

__all__ = ["Snapshot"]


class Snapshot:
    """Reads rounds inside one read transaction, and checks every byte of them.

    Args:
        recording: The recording that is read.
        environment: Where it is.
        txn: A read transaction of the environment; nothing that is returned depends on it.
    """

    def __init__(
        self,
        recording: StoredManifest,
        environment: Environment,
        txn: lmdb.Transaction[memoryview],
    ) -> None:
        self.recording = recording
        self._environment = environment
        self._txn = txn
        self._vectors = VectorReader(recording, environment, txn)

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
            bounds={present[k]: bounds[k] for k in self.kept(entry)},
        )

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
                + f". HINT: ask for clients in `index({t}).{'kept' if dropped else 'present'}`."
            )
        rows = [row[c] for c in wanted_ids]

        arrays, wanted = self._wanted(entry, rows)
        damage = self._vectors.read(t, wanted)
        if damage:
            raise DamagedRecordError(recording.history, damage[0])
        return arrays

    def damage(self, entry: dict[str, Any]) -> list[Damage]:
        """Return what is damaged in the round of a round record."""
        left = {self.recording.indices[c] for c in self.recording.pending}
        rows = [k for k in self.kept(entry) if entry["present"][k] not in left]
        _, wanted = self._wanted(entry, rows)
        return self._vectors.read(entry["round"], wanted)

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
        codec = self.recording.codec if database == "updates" else EXACT
        size = manifest.buffer_words if index == BUFFERS else manifest.num_parameters
        wanted = Wanted(database, index, checksum, codec, np.empty(0, np.float32))
        return self._vectors.payload(t, wanted, size), codec.id, size

    def holds(self, t: int, index: int) -> bool:
        """Whether a client's update lies on disk, unchecked."""
        cursor = self._environment.cursor(self._txn, "updates")
        return bool(cursor.set_key(key(t, index)))

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
    ) -> tuple[RoundArrays, list[Wanted]]:
        """Return a round with room for these of its updates, and what is to be read into it."""
        ids, manifest = self.recording.client_ids, self.recording.manifest
        d, b = manifest.num_parameters, manifest.num_buffers
        present = entry["present"]
        updates = _host_memory(len(rows), d)
        weights, aggregate = np.empty(d, np.float32), np.empty(d, np.float32)
        buffers = np.empty(b, manifest.buffer_dtype) if b else None
        wanted = [
            Wanted("updates", present[k], entry["updates"][k], self.recording.codec, out)
            for k, out in zip(rows, updates, strict=True)
        ]
        # In the order of the keys, so that the file is read from front to back.
        wanted.sort(key=attrgetter("client_index"))
        wanted += [
            Wanted("models", GLOBAL_WEIGHTS, entry["global_weights"], EXACT, weights),
            Wanted("models", AGGREGATE, entry["aggregate"], EXACT, aggregate),
        ]
        if buffers is not None:
            words = buffers.view(np.float32)
            wanted.append(Wanted("models", BUFFERS, entry["buffers"], EXACT, words))
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
            departure=self._departure(entry),
        )
        return arrays, wanted

    def _departure(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """Return why the executor had left its plan, with the id of a client for its index."""
        departure: dict[str, Any] | None = entry["departure"]
        if departure is None or departure["client"] is None:
            return departure
        return {**departure, "client": self.recording.client_ids[departure["client"]]}


def _host_memory(*shape: int) -> NDArray[np.float32]:
    """Return float32 numbers, of any value, in memory that a GPU in use reads at full speed."""
    torch = sys.modules.get("torch")  # who has not imported it uses no GPU
    if torch is not None and torch.cuda.is_initialized():
        result: NDArray[np.float32] = torch.empty(shape, pin_memory=True).numpy()
        return result
    return np.empty(shape, np.float32)
