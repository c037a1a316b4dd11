"""What is fixed once a recording has begun: the manifest, and how its records look on disk.

The words of this package:

- history: a directory with one LMDB file;
- recording: what the file holds, a manifest and rounds. `recording` in the code is what is the same
  for all rounds, a `StoredManifest`;
- record: the value under one key, a 48-byte header and a payload;
- key: a round, and an index;
- index: a client's number in the recording, or a number below that stands for something else;
- vector: float32 numbers that a payload decodes to: a client's update, or one of the model;
- row: a client's place among the updates of a round;
- round record: the record of a round, which is written last and makes the round count;
- entry: what the round record says, JSON;
- snapshot: what one read transaction sees.

The checksum in a header covers the rest of the header, the key and the payload, so that a record
that was damaged, or moved to another round, client or history, is detected. Header and checksum
are the same in every format version; the version says how to read everything else.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import xxhash

from fedrec.exceptions import (
    ForgottenError,
    HistoryCorruptedError,
    HistoryFormatError,
    HistoryKeyError,
)
from fedrec.history.codecs import CODECS
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.encryption import CIPHER, OVERHEAD, VARIABLE, Keys, TamperedError
from fedrec.history.manifest import FORMAT_VERSION, Manifest
from fedrec.history.retention import Retention

__all__ = ["StoredManifest"]

JSON, FLOAT32 = 0, 1  # what a payload decodes to
SEALED = 0x80  # added to it where the payload is encrypted
# Client indices that stand for something else; those of clients count up from 0.
FORGOTTEN, REPAIRS, MANIFEST, GLOBAL_WEIGHTS, AGGREGATE, BUFFERS, ROUND = range(2**32 - 7, 2**32)
# What errors call them.
NAMES = {
    FORGOTTEN: "the list of forgotten clients",
    REPAIRS: "the list of repairs",
    MANIFEST: "the manifest",
    GLOBAL_WEIGHTS: "the global weights",
    AGGREGATE: "the aggregate",
    BUFFERS: "the buffers",
    ROUND: "the round record",
}

_MAGIC = b"FREC"
_HEADER = struct.Struct("<4sHBBIIQ16s")  # of a record, besides the last 8 bytes, the checksum
HEADER_BYTES = _HEADER.size + 8
_KEY = struct.Struct(">II")  # big-endian, so that the order of keys is the order of rounds


class _Header(NamedTuple):
    magic: bytes
    version: int
    codec: int
    dtype: int
    round: int
    client_index: int
    size: int
    store_id: bytes


# Of records whose entries are kept; with its entry, one takes five times as much memory.
_ENTRY_BYTES = 4 << 20
_WRONG_CHECKSUM = "its checksum is wrong"


class StoredManifest:
    """The manifest of a history as it is stored, and the records that belong to it.

    Args:
        history: How errors name the history.
        manifest: The manifest.
        keys: Data keys of an encrypted history. Without them, `check` is all that can be done with
            its records.

    Raises:
        HistoryFormatError: If the manifest is not one that this fedrec can work with.
    """

    def __init__(self, history: str, manifest: Manifest, keys: Keys | None = None) -> None:
        if manifest.codec not in CODECS:
            raise HistoryFormatError(
                f"History `{history}` stores updates as `{manifest.codec}`, which this fedrec "
                f"does not know. Known: {', '.join(CODECS)}. HINT: if it is a codec of your own, "
                "call `fedrec.history.register_codec` first."
            )
        if manifest.encryption not in (None, CIPHER):
            raise HistoryFormatError(
                f"History `{history}` is encrypted with `{manifest.encryption}`, which this fedrec "
                f"does not know. Known: {CIPHER}."
            )
        text = manifest.to_json()
        self.history = history
        self.keys = keys
        #: Clients that were forgotten, or are being forgotten, with the time.
        self.forgotten: dict[str, str] = {}
        #: Clients that are being forgotten: updates of theirs may be left.
        self.pending: tuple[str, ...] = ()
        self._entries: dict[int, tuple[bytes, dict[str, Any], str]] = {}
        self._entry_bytes = 0
        self.manifest = Manifest.from_json(text)
        self.codec = CODECS[manifest.codec]
        self.retention = Retention.of(manifest.keep)
        self.sampled = self.retention.sample(tuple(manifest.clients), manifest.seed)
        #: What entries say of the execution plan.
        self.execution = digest(canonical(manifest.execution))
        self.client_ids = tuple(manifest.clients)
        self.indices = {client_id: index for index, client_id in enumerate(self.client_ids)}
        #: Of all records but the manifest's, which says whether the others are encrypted.
        self._seal = SEALED if manifest.encryption else 0
        self._store_id = bytes.fromhex(manifest.store_id)
        self.record, _ = self.pack(0, MANIFEST, text.encode())

    @classmethod
    def load(cls, history: str, record: bytes) -> StoredManifest:
        """Read the record of a manifest. An encrypted history is without its keys then.

        Raises:
            HistoryFormatError: If it is not one, or of a newer format version.
            HistoryCorruptedError: If it is not what was written.
        """
        header = _read_header(record)
        if header is None:
            raise HistoryFormatError(
                f"`{history}` does not hold a fedrec history. HINT: check the path."
            )
        # The version counts only if the checksum is right, or any flipped bit could be one.
        checksum = _checksum(record[: _HEADER.size], key(0, MANIFEST), record[HEADER_BYTES:])
        if record[_HEADER.size : HEADER_BYTES] != checksum:
            raise HistoryCorruptedError(
                f"The manifest of history `{history}` is not what was written. HINT: restore the "
                "history from a copy."
            )
        if header.version != FORMAT_VERSION:
            raise HistoryFormatError(
                f"History `{history}` has format version {header.version}, but this fedrec reads "
                f"version {FORMAT_VERSION}. HINT: use the fedrec release that wrote it."
            )
        return cls(history, Manifest.from_json(record[HEADER_BYTES:]))

    @property
    def is_locked(self) -> bool:
        """Whether the history is encrypted and its keys are not known."""
        return bool(self._seal) and self.keys is None

    def require_keys(self) -> Keys:
        """Return the data keys.

        Raises:
            HistoryKeyError: If they are not known.
        """
        if self.keys is None:
            raise HistoryKeyError(
                f"History `{self.history}` is encrypted. HINT: give its master key: "
                f"`master_key=`, `--key-file`, or the environment variable {VARIABLE}."
            )
        return self.keys

    def require_known(self, client_ids: Iterable[str], *, writing: bool = False) -> None:
        """Check that none of these clients was forgotten.

        Args:
            client_ids: The clients.
            writing: Whether they have sent a round's updates that are to be written.

        Raises:
            ForgottenError: If one was.
        """
        for client_id in client_ids:
            if client_id in self.pending:
                raise ForgottenError(f"History `{self.history}`: {self.unfinished()}.")
            if client_id in self.forgotten:
                hint = "leave it out"
                if writing:
                    hint = (
                        "a recording does not go on with it: recover from the rounds that are "
                        f"stored, in Python by `loop.recover(..., exclude=[{client_id!r}])`, or "
                        "record anew without it, under another name"
                    )
                raise ForgottenError(
                    f"Client `{client_id}` of history `{self.history}` was forgotten on "
                    f"{self.forgotten[client_id]}: none of its updates is left. HINT: {hint}."
                )

    def unfinished(self) -> str:
        """Return what errors say about clients that are half forgotten."""
        words = "".join(f" --client {client_id}" for client_id in self.pending)
        return (
            f"forgetting {', '.join(self.pending)} was interrupted. HINT: finish it with "
            f"`fedrec history forget {self.history}{words}`"
        )

    def known_entry(self, t: int, record: bytes) -> tuple[dict[str, Any], str] | None:
        """Return what was read from this very record of round `t`, if it is still there.

        An entry is asked for several times: what is in a round, and where its vectors lie.
        """
        known = self._entries.get(t)
        return None if known is None or known[0] != record else known[1:]

    def keep_entry(
        self, t: int, record: bytes, entry: dict[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """Keep an entry, in place of all others if these take too much memory.

        Returns:
            The entry, and the hash of its record.
        """
        if self._entry_bytes > _ENTRY_BYTES:
            self._entries, self._entry_bytes = {}, 0
        self._entry_bytes += len(record)
        self._entries[t] = known = record, entry, digest(record)
        return known[1:]

    def pack(
        self,
        t: int,
        index: int,
        payload: bytes | memoryview,
        *,
        codec: int = 0,
        dtype: int = JSON,
        size: int | None = None,
    ) -> tuple[bytes, str]:
        """Make a record.

        Args:
            t: Round.
            index: Client index.
            payload: Its payload.
            codec: `Codec.id`.
            dtype: `JSON` or `FLOAT32`.
            size: Numbers in the payload; by default its bytes.

        Returns:
            The record, and its checksum as entries have it: 16 hexadecimal digits.
        """
        place, sealed = key(t, index), self._seal if index != MANIFEST else 0
        size = len(payload) if size is None else size
        header = self._header(t, index, codec, dtype | sealed, size)
        if sealed:
            payload = self.require_keys().seal(self._owner(index), payload, header + place)
        checksum = _checksum(header, place, payload)
        return b"".join((header, checksum, payload)), checksum[::-1].hex()

    def unpack(
        self,
        record: memoryview,
        t: int,
        index: int,
        *,
        codec: int = 0,
        dtype: int = JSON,
        size: int | None = None,
        checksum: str | None = None,
    ) -> memoryview:
        """Check the record under a key, and return its payload, decrypted.

        Args:
            record: The record.
            t: Round it must belong to.
            index: Client index it must belong to.
            codec: `Codec.id` it must have.
            dtype: `JSON` or `FLOAT32`.
            size: Numbers in the payload; by default its bytes.
            checksum: Checksum it must have, where an entry says so.

        Raises:
            HistoryCorruptedError: If it is not the record that was written there.
            HistoryKeyError: If it is encrypted and the keys are not known.
        """
        payload, place = record[HEADER_BYTES:], key(t, index)
        sealed = self._seal if index != MANIFEST else 0
        if size is None:
            size = max(0, len(payload) - OVERHEAD if sealed else len(payload))
        header = self._header(t, index, codec, dtype | sealed, size)
        if record[: _HEADER.size] != header:
            raise self.corrupted(t, index, _difference(record, header))
        computed = _checksum(header, place, payload)
        if record[_HEADER.size : HEADER_BYTES] != computed:
            raise self.corrupted(t, index, _WRONG_CHECKSUM)
        if checksum is not None and checksum != computed[::-1].hex():
            raise self.corrupted(t, index, "it is not the one the round was committed with")
        if not sealed:
            return payload
        try:
            return self.require_keys().open(self._owner(index), payload, header + place)
        except TamperedError as error:
            raise self.corrupted(t, index, str(error)) from error

    def check(self, record: memoryview, t: int, index: int) -> None:
        """Check a record as far as that is possible without keys.

        Raises:
            HistoryCorruptedError: If it is not a record that was written there.
        """
        stored = _read_header(record)
        if stored is None:
            raise self.corrupted(t, index, "it is not a record")
        header = self._header(t, index, stored.codec, stored.dtype | SEALED, stored.size)
        if record[: _HEADER.size] != header:
            raise self.corrupted(t, index, _difference(record, header))
        checksum = _checksum(header, key(t, index), record[HEADER_BYTES:])
        if record[_HEADER.size : HEADER_BYTES] != checksum:
            raise self.corrupted(t, index, _WRONG_CHECKSUM)

    def corrupted(self, t: int, index: int, why: str) -> DamagedRecordError:
        """Return the error for a record that is not what was written."""
        client_id = self._owner(index)
        damage = Damage(
            part=NAMES.get(index, f"client `{client_id or index}`"),
            reason=f"the stored bytes are not those that were written ({why})",
            round=None if index in (FORGOTTEN, REPAIRS, MANIFEST) else t,
            client_id=client_id,
        )
        return DamagedRecordError(self.history, damage)

    def _owner(self, index: int) -> str | None:
        return self.client_ids[index] if index < len(self.client_ids) else None

    def _header(self, t: int, index: int, codec: int, dtype: int, size: int) -> bytes:
        return _HEADER.pack(_MAGIC, FORMAT_VERSION, codec, dtype, t, index, size, self._store_id)


def key(t: int, index: int) -> bytes:
    """Return the key of the record of a round and client index."""
    return _KEY.pack(t, index)


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(record: bytes | memoryview) -> str:
    """Return the hash of a record that chains it to the next one."""
    return hashlib.sha256(record).hexdigest()


def _read_header(record: bytes | memoryview) -> _Header | None:
    if len(record) < HEADER_BYTES or record[: len(_MAGIC)] != _MAGIC:
        return None
    return _Header(*_HEADER.unpack(record[: _HEADER.size]))


def _checksum(header: bytes | memoryview, key: bytes, payload: bytes | memoryview) -> bytes:
    """Return the checksum of a record as its 8 bytes in the header, the lowest first."""
    state = xxhash.xxh3_64(header)
    state.update(key)
    state.update(payload)
    return state.digest()[::-1]


def _difference(record: memoryview, header: bytes) -> str:
    """Say what a header says instead of what it should."""
    stored = _read_header(record)
    if stored is None:
        return "it is not a record"
    expected = _Header(*_HEADER.unpack(header))
    return "; ".join(
        f"its header says {name} {getattr(stored, name)!r} instead of {value!r}"
        for name, value in expected._asdict().items()
        if getattr(stored, name) != value
    )
