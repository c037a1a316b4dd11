"""What is fixed once a recording has begun: the manifest, and how its records look on disk.

A record is a 48-byte header and a payload. The checksum in the header covers the rest of the
header, the key and the payload, so that a record that was damaged, or moved to another round,
client or history, is found out. Header and checksum are the same in every format version; the
version says how to read everything else.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from fedrec.exceptions import HistoryCorruptedError, HistoryFormatError
from fedrec.history.codecs import CODECS
from fedrec.history.damage import Damage, DamagedRecordError
from fedrec.history.manifest import FORMAT_VERSION, Manifest

__all__ = ["Recording"]

JSON, FLOAT32 = 0, 1  # what a payload decodes to
# Client indices that stand for something else; those of clients count up from 0.
REPAIRS, MANIFEST, GLOBAL_WEIGHTS, AGGREGATE, BUFFERS, ROUND = range(2**32 - 6, 2**32)
NAMES = {
    REPAIRS: "the list of repairs",
    MANIFEST: "the manifest",
    GLOBAL_WEIGHTS: "the global weights",
    AGGREGATE: "the aggregate",
    BUFFERS: "the buffers",
    ROUND: "the round record",
}

_MAGIC = b"FREC"
_HEADER = struct.Struct("<4sHBBIIQ16s")  # all but its last 8 bytes, the checksum
_HEADER_BYTES = _HEADER.size + 8
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


class Recording:
    """The manifest of a history, and the records that belong to it.

    Args:
        history: How errors name the history.
        manifest: The manifest.

    Raises:
        HistoryFormatError: If the manifest is not one that this fedrec can work with.
    """

    def __init__(self, history: str, manifest: Manifest) -> None:
        if manifest.codec not in CODECS:
            raise HistoryFormatError(
                f"History `{history}` stores updates as `{manifest.codec}`, which this fedrec "
                f"does not know. Known: {', '.join(CODECS)}. HINT: if it is a codec of your own, "
                "call `fedrec.history.register_codec` first."
            )
        text = manifest.to_json()
        self.history = history
        self.manifest = Manifest.from_json(text)
        self.codec = CODECS[manifest.codec]
        self.client_ids = tuple(manifest.clients)
        self.indices = {client_id: index for index, client_id in enumerate(self.client_ids)}
        self._store_id = bytes.fromhex(manifest.store_id)
        self.record, _ = self.pack(0, MANIFEST, text.encode())

    @classmethod
    def load(cls, history: str, record: bytes) -> Recording:
        """Read the record of a manifest.

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
        found = _checksum(record[: _HEADER.size], key(0, MANIFEST), record[_HEADER_BYTES:])
        if found != _stored_checksum(record):
            raise HistoryCorruptedError(
                f"The manifest of history `{history}` is not what was written. HINT: restore the "
                "history from a copy."
            )
        if header.version != FORMAT_VERSION:
            raise HistoryFormatError(
                f"History `{history}` has format version {header.version}, but this fedrec reads "
                f"version {FORMAT_VERSION}. HINT: use the fedrec release that wrote it."
            )
        return cls(history, Manifest.from_json(record[_HEADER_BYTES:]))

    def pack(
        self,
        t: int,
        index: int,
        payload: bytes | memoryview,
        *,
        codec: int = 0,
        dtype: int = JSON,
        size: int | None = None,
    ) -> tuple[bytes, int]:
        """Make a record.

        Args:
            t: Round.
            index: Client index.
            payload: What to keep.
            codec: `Codec.id`.
            dtype: `JSON` or `FLOAT32`.
            size: Numbers in the payload; by default its bytes.

        Returns:
            The record and its checksum.
        """
        header = self._header(t, index, codec, dtype, len(payload) if size is None else size)
        checksum = _checksum(header, key(t, index), payload)
        return b"".join((header, checksum.to_bytes(8, "little"), payload)), checksum

    def unpack(
        self,
        record: memoryview,
        t: int,
        index: int,
        *,
        codec: int = 0,
        dtype: int = JSON,
        size: int | None = None,
        checksum: int | None = None,
    ) -> memoryview:
        """Check a record that was found under a key, and return its payload.

        Args:
            record: What was found.
            t: Round it must belong to.
            index: Client index it must belong to.
            codec: `Codec.id` it must have.
            dtype: `JSON` or `FLOAT32`.
            size: Numbers in the payload; by default its bytes.
            checksum: Checksum it must have, where that is known from elsewhere.

        Raises:
            HistoryCorruptedError: If it is not the record that was written there.
        """
        payload = record[_HEADER_BYTES:]
        header = self._header(t, index, codec, dtype, len(payload) if size is None else size)
        if record[: _HEADER.size] != header:
            raise self.corrupted(t, index, _difference(record, header))
        found = _checksum(header, key(t, index), payload)
        if found != _stored_checksum(record):
            raise self.corrupted(t, index, "its checksum is wrong")
        if checksum is not None and found != checksum:
            raise self.corrupted(t, index, "it is not the one the round was committed with")
        return payload

    def adopt(self, record: memoryview, t: int, index: int) -> tuple[bytes, int]:
        """Make the record of another recording, which was checked, one of this.

        Returns:
            The record and its checksum.
        """
        header = _Header(*_HEADER.unpack(record[: _HEADER.size]))
        payload = record[_HEADER_BYTES:]
        return self.pack(
            t, index, payload, codec=header.codec, dtype=header.dtype, size=header.size
        )

    def corrupted(self, t: int, index: int, why: str) -> DamagedRecordError:
        """Return the error for a record that is not what was written."""
        client_id = None if index in NAMES else self.client_ids[index]
        damage = Damage(
            part=NAMES.get(index, f"client `{client_id}`"),
            reason=f"the stored bytes are not those that were written ({why})",
            round=None if index in (REPAIRS, MANIFEST) else t,
            client_id=client_id,
        )
        return DamagedRecordError(self.history, damage)

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
    if len(record) < _HEADER_BYTES or record[: len(_MAGIC)] != _MAGIC:
        return None
    return _Header(*_HEADER.unpack(record[: _HEADER.size]))


def _stored_checksum(record: bytes | memoryview) -> int:
    return int.from_bytes(record[_HEADER.size : _HEADER_BYTES], "little")


def _checksum(header: bytes | memoryview, key: bytes, payload: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(header)
    state.update(key)
    state.update(payload)
    return state.intdigest()


def _difference(record: memoryview, header: bytes) -> str:
    found = _read_header(record)
    if found is None:
        return "it is not a record"
    wanted = _Header(*_HEADER.unpack(header))
    return "; ".join(
        f"its header says {name} {getattr(found, name)!r} instead of {value!r}"
        for name, value in wanted._asdict().items()
        if getattr(found, name) != value
    )
