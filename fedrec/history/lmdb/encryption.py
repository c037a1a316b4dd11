"""Encryption at rest: a master key from outside, and the data keys it wraps.

Every payload is encrypted by itself (AES-256-GCM): with the data key of the client whose update it
is, or with the shared data key. Data keys are random. They lie, encrypted by the master key, in a
file beside the data. Without its data key a client's updates are noise, wherever copies of them
are.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrec._files import write_atomically
from fedrec.exceptions import (
    ConfigurationError,
    ForgottenError,
    HistoryCorruptedError,
    HistoryError,
    HistoryKeyError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["CIPHER", "OVERHEAD", "Keys", "TamperedError", "check_source", "master_key", "new_key"]

CIPHER = "AES-256-GCM"
VARIABLE = "FEDREC_HISTORY_KEY"
KEYS = "keys.json"

_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
OVERHEAD = _NONCE_BYTES + _TAG_BYTES  # bytes that a sealed payload is longer
_PIECE = 2**30  # of a file; twice as much cannot be encrypted at once

_HOW = (
    "`file:PATH` (a file that holds it) or `env:NAME` (an environment variable), never the key "
    "itself"
)


class TamperedError(ValueError):
    """A sealed payload was not made with this key, for this place."""


class Keys:
    """The data keys of a history: one for each client, and one for all that is no client's.

    Args:
        history: How errors name the history.
        wrapped: Data keys, encrypted by the master key, by client id; `None` in place of one that
            was destroyed. The shared one has the name `None`.
        master: The master key.

    Raises:
        HistoryKeyError: If another master key wrapped them.
        MissingDependencyError: If `cryptography` is not installed.
    """

    def __init__(self, history: str, wrapped: Mapping[str | None, str | None], master: bytes):
        self.history = history
        self._wrapped = dict(wrapped)
        self._master = _cipher(master)
        self._ciphers: dict[str | None, AESGCM] = {}
        self._mutex = threading.Lock()
        self._cipher(None)

    @classmethod
    def create(cls, history: str, client_ids: Iterable[str], master: bytes) -> Keys:
        """Make new data keys."""
        wrapping = _cipher(master)
        wrapped: dict[str | None, str | None] = {}
        for name in (None, *client_ids):
            sealed = _seal(wrapping, secrets.token_bytes(_KEY_BYTES), _purpose(name))
            wrapped[name] = base64.b64encode(sealed).decode()
        return cls(history, wrapped, master)

    @classmethod
    def load(cls, history: str, directory: Path, master: bytes) -> Keys:
        """Read the data keys of a history.

        Raises:
            HistoryKeyError: If another master key wrapped them.
            HistoryCorruptedError: If the file is missing or is not what was written.
        """
        return cls(history, _read(history, directory), master)

    def write(self, directory: Path) -> None:
        """Write the wrapped keys; after a crash the old or the new file is there, whole."""
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, self._wrapped)

    def seal(self, name: str | None, payload: bytes | memoryview, bound: bytes) -> bytes:
        """Encrypt a payload.

        Args:
            name: Client it comes from, or `None`.
            payload: What to encrypt.
            bound: Bytes it is bound to: only with the same bytes can it be opened again.

        Raises:
            ForgottenError: If the client's key was destroyed.
        """
        return _seal(self._cipher(name), payload, bound)

    def open(self, name: str | None, sealed: memoryview, bound: bytes) -> memoryview:
        """Decrypt what `seal` returned.

        Raises:
            TamperedError: If it is not that, or was bound to something else.
            ForgottenError: If the client's key was destroyed.
        """
        return memoryview(_open(self._cipher(name), sealed, bound))

    def seal_file(self, content: bytes) -> bytes:
        """Encrypt the content of a file beside the history, with the shared key, in pieces."""
        size, whole = len(content), memoryview(content)
        starts = range(0, max(size, 1), _PIECE)
        pieces = [self.seal(None, whole[i : i + _PIECE], _of_file(i, size)) for i in starts]
        return b"".join(pieces)

    def open_file(self, sealed: memoryview) -> bytes:
        """Decrypt what `seal_file` returned.

        Raises:
            TamperedError: If it is not that.
        """
        step = _PIECE + OVERHEAD
        starts = range(0, max(len(sealed), 1), step)
        size = len(sealed) - len(starts) * OVERHEAD
        pieces = [
            self.open(None, sealed[i : i + step], _of_file(i // step * _PIECE, size))
            for i in starts
        ]
        return b"".join(pieces)

    def _cipher(self, name: str | None) -> AESGCM:
        with self._mutex:
            cipher = self._ciphers.get(name)
            if cipher is None:
                cipher = self._ciphers[name] = self._unwrap(name)
            return cipher

    def _unwrap(self, name: str | None) -> AESGCM:
        wrapped = self._wrapped.get(name)
        if wrapped is None:
            raise ForgottenError(
                f"Client `{name}` of history `{self.history}` was forgotten: its data key is "
                "destroyed. HINT: leave it out."
            )
        try:
            sealed = memoryview(base64.b64decode(wrapped, validate=True))
            return _cipher(_open(self._master, sealed, _purpose(name)))
        except ValueError as error:
            if name is None:
                raise HistoryKeyError(
                    f"The master key is not the one history `{self.history}` was encrypted with. "
                    "HINT: give the one it was recorded with."
                ) from error
            raise HistoryCorruptedError(
                f"The data key of client `{name}` of history `{self.history}` is not what was "
                f"written. HINT: restore `{KEYS}` from a copy."
            ) from error


def destroy(history: str, directory: Path, client_ids: Collection[str]) -> tuple[str, ...]:
    """Destroy the data keys of clients; the master key is not needed for it.

    The old file is overwritten before it is let go. A drive may write to other blocks instead and
    keep the old ones; they are of use only together with the master key.

    Returns:
        The clients whose keys were there.
    """
    wrapped = _read(history, directory)
    destroyed = tuple(c for c in client_ids if wrapped.get(c) is not None)
    if destroyed:
        with (directory / KEYS).open("r+b") as old:
            _write(directory, {**wrapped, **dict.fromkeys(destroyed)})
            old.write(bytes(os.fstat(old.fileno()).st_size))
            old.flush()
            os.fsync(old.fileno())
    return destroyed


def new_key(path: str | os.PathLike[str]) -> None:
    """Write a new random master key to a file that only its owner can read.

    Args:
        path: The file; it must not exist.

    Raises:
        HistoryError: If it cannot be made.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     new_key(folder + "/history.key")
        ...     len(Path(folder, "history.key").read_text().strip())
        64
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise HistoryError(
            f"The key file `{path}` cannot be made: {error.strerror}. HINT: choose another PATH; a "
            "key that is there is never written over."
        ) from error
    with open(file, "w") as text:  # noqa: PTH123 - of a descriptor
        text.write(secrets.token_hex(_KEY_BYTES) + "\n")
        text.flush()
        os.fsync(text.fileno())


def check_source(source: str) -> str:
    """Return where a master key comes from, if it says so.

    Raises:
        ConfigurationError: If it does not. The message does not repeat it: it may be a key.
    """
    kind, _, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind not in ("file", "env") or not rest:
        raise ConfigurationError(f"Expected `master_key` to be {_HOW}.")
    return source


def master_key(source: str | None, directory: Path) -> bytes | None:
    """Return the master key of a history.

    Args:
        source: `file:PATH` or `env:NAME`. `None`: the environment variable FEDREC_HISTORY_KEY, if
            it is set.
        directory: Directory of the history, in which the key must not lie.

    Returns:
        32 bytes, or `None` if there is no source.

    Raises:
        HistoryKeyError: If it is not there, is no key, or others can read the file.
    """
    if source is None:
        if VARIABLE not in os.environ:
            return None
        source = f"env:{VARIABLE}"
    kind, _, where = check_source(source).partition(":")
    if kind == "env":
        text = os.environ.get(where)
        if text is None:
            raise HistoryKeyError(
                f"The environment variable `{where}`, where the master key should be, is not set."
            )
    else:
        text = _read_key_file(Path(where), directory)
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise HistoryKeyError(
            f"Expected the master key (`{source}`) to be {2 * _KEY_BYTES} hexadecimal digits, but "
            "it is not. HINT: `fedrec history new-key PATH` makes one."
        )
    return key


def _read_key_file(path: Path, directory: Path) -> str:
    try:
        if path.resolve().is_relative_to(directory.resolve()):
            raise HistoryKeyError(
                f"The master key `{path}` lies in the history that it protects. HINT: move it out."
            )
        if path.stat().st_mode & 0o077:
            raise HistoryKeyError(
                f"The master key `{path}` can be used by others than its owner. HINT: "
                f"`chmod 600 {path}`."
            )
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise HistoryKeyError(
            f"The master key `{path}` cannot be read: {error.strerror}. HINT: `fedrec history "
            "new-key PATH` makes one for a new history."
        ) from error


def _cipher(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingDependencyError(
            "An encrypted history needs the package `cryptography`, which is not installed. "
            "HINT: `pip install 'fedrec[encryption]'`."
        ) from error
    return AESGCM(key)


def _seal(cipher: AESGCM, payload: bytes | memoryview, bound: bytes) -> bytes:
    # Nonces are 96 random bits: with fewer than 2**32 payloads a key, no two will be the same. A
    # client has one payload a round.
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, payload, bound)


def _open(cipher: AESGCM, sealed: memoryview, bound: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    if len(sealed) < OVERHEAD:
        raise TamperedError("it is too short")
    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], bound)
    except InvalidTag as error:
        raise TamperedError("it was not encrypted with this key for this place") from error


def _purpose(name: str | None) -> bytes:
    return b"fedrec shared key" if name is None else b"fedrec client key " + name.encode()


def _of_file(start: int, size: int) -> bytes:
    return f"fedrec file, from byte {start} of {size}".encode()


def _read(history: str, directory: Path) -> dict[str | None, str | None]:
    try:
        raw = json.loads((directory / KEYS).read_bytes())
        keys: dict[str, Any] = raw["keys"]
        if raw["checksum"] != _checksum(keys):
            raise ValueError("its checksum is wrong")
        clients: dict[str | None, str | None] = keys["clients"]
        return {None: keys["shared"], **clients}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HistoryCorruptedError(
            f"The wrapped keys of history `{history}` cannot be read: `{KEYS}`: {error}. Without "
            f"them, nothing in it can. HINT: restore `{KEYS}` from a copy."
        ) from error


def _write(directory: Path, wrapped: Mapping[str | None, str | None]) -> None:
    clients = {c: key for c, key in wrapped.items() if c is not None}
    keys = {"cipher": CIPHER, "shared": wrapped[None], "clients": clients}
    text = json.dumps({"checksum": _checksum(keys), "keys": keys}, indent=1) + "\n"
    write_atomically(directory / KEYS, text.encode(), private=True)


def _checksum(keys: Mapping[str, Any]) -> str:
    text = json.dumps(keys, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
