"""Searching files for pieces of updates."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["PROBE_BYTES", "Probes"]

PROBE_BYTES = 64
_PROBES = 4  # of a vector
_TRIES = 64
_DISTINCT = 16  # different bytes in a probe; runs of zeros are everybody's
_CHUNK = 2**20
_ANCHOR = np.dtype("<u8")
_TABLE_BITS = 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, which spreads all bits


class Probes:
    """Pieces of 64 bytes of vectors, to be searched for.

    Examples:
        >>> probes = Probes()
        >>> vector = np.random.default_rng(0).standard_normal(1000, np.float32).tobytes()
        >>> probes.add(vector)
        4
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "file"
        ...     _ = path.write_bytes(b"x" + vector)
        ...     len(probes.find(path))
        4
    """

    def __init__(self) -> None:
        self.pieces: set[bytes] = set()
        self._prepared = 0

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Probes:
        """Return probes of pieces that were found."""
        probes = cls()
        probes.pieces |= set(pieces)
        return probes

    def __len__(self) -> int:
        return len(self.pieces)

    def add(self, data: bytes | memoryview) -> int:
        """Take up to four pieces of the bytes of a vector, spread over it; return how many.

        A piece that says little, as with a run of zeros, is not taken.
        """
        found = 0
        places = np.linspace(0, len(data) - PROBE_BYTES, _TRIES) if len(data) >= PROBE_BYTES else ()
        # First the ends of each quarter, then between them.
        order = sorted(range(len(places)), key=lambda k: (k % (_TRIES // _PROBES), k))
        for k in order:
            start = int(places[k]) // 4 * 4
            piece = bytes(data[start : start + PROBE_BYTES])
            if len(set(piece)) >= _DISTINCT:
                self.pieces.add(piece)
                found += 1
            if found == _PROBES:
                break
        return found

    def find(self, path: Path) -> set[bytes]:
        """Return the pieces that a file holds; a zip archive is unpacked for it."""
        if not self.pieces:
            return set()
        with path.open("rb") as file:
            found = self._find(file)
        if zipfile.is_zipfile(path):
            try:
                with zipfile.ZipFile(path) as archive:
                    for name in archive.namelist():
                        with archive.open(name) as member:
                            found |= self._find(cast(BinaryIO, member))
            except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, EOFError, ValueError):
                pass  # no archive after all, and its bytes were searched
        return found

    def find_in(self, data: bytes) -> set[bytes]:
        """Return the pieces that are in these bytes."""
        return self._find(io.BytesIO(data))

    def _prepare(self) -> None:
        """Set up the table that tells places worth a look from the others."""
        if self._prepared == len(self.pieces):
            return
        self._prepared = len(self.pieces)
        pieces = b"".join(piece[: _ANCHOR.itemsize] for piece in self.pieces)
        self._anchors = np.unique(np.frombuffer(pieces, _ANCHOR))
        self._table = np.zeros(2**_TABLE_BITS, bool)
        self._table[_hash(self._anchors)] = True

    def _find(self, file: BinaryIO) -> set[bytes]:
        self._prepare()
        found = set()
        rest = b""
        for chunk in _chunks(file):
            data = rest + chunk
            for start in self._candidates(data):
                piece = data[start : start + PROBE_BYTES]
                if piece in self.pieces:
                    found.add(piece)
            rest = data[-(PROBE_BYTES - 1) :]
        return found

    def _candidates(self, data: bytes) -> Iterator[int]:
        """Yield the places where a piece may begin: those that have its first eight bytes."""
        size = _ANCHOR.itemsize
        for shift in range(min(size, len(data) - size + 1)):
            words = np.frombuffer(data, _ANCHOR, (len(data) - shift) // size, shift)
            places = np.flatnonzero(self._table[_hash(words)])
            at = np.searchsorted(self._anchors, words[places])
            same = self._anchors[np.minimum(at, len(self._anchors) - 1)] == words[places]
            yield from (places[same] * size + shift).tolist()


def _hash(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    return ((words * _FACTOR) >> np.uint64(64 - _TABLE_BITS)).view(np.int64)  # ready as an index


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
