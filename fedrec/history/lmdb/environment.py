"""The LMDB environment below a history, opened with care.

LMDB has no checksums, kills the process that reads a truncated file, must not be used after a
fork, and cannot be opened twice in a process. This module deals with all but the first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from fedrec._files import sync
from fedrec.exceptions import HistoryCorruptedError, HistoryError, HistoryFormatError
from fedrec.history.lmdb.errors import foreign, full_disk, in_use, write_error
from fedrec.history.lmdb.pages import require_sound_pages

__all__ = ["Environment", "beside", "put_in_place"]

DATA = "data.mdb"
DATABASES = ("meta", "models", "updates", "rounds")
MAP_SIZE = 2**40
_SMALLEST_MAP_SIZE = 2**26
_META_PAGES = 2
_SMALLEST_FILE = _META_PAGES * 4096
_SLACK = 2**20
_MODE = 0o600
_MAX_READERS = 1024
_LOCK_BYTES = 64 * (_MAX_READERS + 2)


class Environment:
    """An open LMDB environment, shared by all stores of one directory in a process.

    Use `acquire`, not the constructor.

    Args:
        directory: Directory of the history, an absolute path.
        map_size: Bytes of address space to reserve, or `None` for 1 TiB.
        sync: Whether every commit is durable; otherwise that is up to `sync`.

    Raises:
        HistoryFormatError: If the directory holds something else than a history.
        HistoryCorruptedError: If the file is truncated or damaged.
        HistoryError: If it cannot be opened.
    """

    _shared: ClassVar[dict[tuple[int, int], Environment]] = {}
    _mutex = threading.RLock()  # a store may be collected while its thread holds it

    def __init__(self, directory: Path, map_size: int | None, sync: bool = True) -> None:
        self.directory = directory
        self.syncs = sync
        self.pid = os.getpid()
        self._users = 0
        self._data = directory / DATA
        size = self._data.stat().st_size
        if size < _SMALLEST_FILE:  # LMDB would take an empty file for a new one
            raise self._truncated(size, _SMALLEST_FILE)
        # All that have the file open share this lock; who replaces the file has it alone.
        self._use = os.open(directory, os.O_RDONLY)
        try:
            self._lock(fcntl.LOCK_SH, "being compacted or repaired")
            self._env = _open_lmdb(directory, map_size, sync)
        except BaseException:
            os.close(self._use)
            raise
        try:
            self._page_bytes = self._env.stat()["psize"]
            self.num_bytes()  # raises if the file was cut
            require_sound_pages(self._env, self._data, self._page_bytes)
            self._env.reader_check()
            # For a moment this waits for a process that is just committing a round: handles that
            # are opened in a read transaction do not outlive it.
            self._databases = {
                name: self._env.open_db(name.encode(), create=False) for name in DATABASES
            }
        except BaseException as error:
            self._close()
            if isinstance(error, lmdb.NotFoundError):
                raise foreign(directory) from error
            if isinstance(error, lmdb.Error):
                raise self._damaged(error) from error
            raise

    @classmethod
    def create(cls, directory: Path, records: Mapping[bytes, bytes], map_size: int | None) -> None:
        """Put a new environment with these records in its `meta` database on disk.

        It is made beside its place and moved there when it is complete and durable.

        Raises:
            HistoryError: If it cannot be done; nothing is left in place then.
        """
        with beside(directory) as new:
            env = _open_lmdb(new, map_size)
            try:
                databases = {name: env.open_db(name.encode()) for name in DATABASES}
                with env.begin(write=True) as txn:
                    for key, record in records.items():
                        txn.put(key, record, db=databases["meta"])
            except lmdb.Error as error:
                size = sum(map(len, records.values()))
                raise write_error(directory, error, size) from error
            finally:
                env.close()
            put_in_place(new, directory)

    @classmethod
    def acquire(cls, directory: Path, map_size: int | None, *, sync: bool = True) -> Environment:
        """Return this process's environment of a directory, opening it if need be.

        If it is open already, it syncs or not as it was opened.

        Raises:
            HistoryFormatError: If there is none on disk.
        """
        with cls._mutex:
            try:
                status = (directory / DATA).stat()
            except OSError as error:
                raise HistoryFormatError(
                    f"Nothing has been recorded in `{directory}`. HINT: check the path."
                ) from error
            identity = (status.st_dev, status.st_ino)
            shared = cls._shared.get(identity)
            if shared is not None and shared.pid != os.getpid():
                shared._close()  # inherited by a fork; LMDB must not use it here
                shared = None
            if shared is None:
                shared = cls._shared[identity] = cls(directory, map_size, sync)
            shared._users += 1
            return shared

    def release(self) -> None:
        """Give back what `acquire` returned; the last user closes the environment."""
        with self._mutex:
            self._users -= 1
            if self._users == 0 and self.pid == os.getpid():
                fcntl.flock(self._use, fcntl.LOCK_UN)  # a fork may still have it open
                self._close()
                for identity in [i for i, shared in self._shared.items() if shared is self]:
                    del self._shared[identity]

    def sync(self) -> None:
        """Make all that was committed durable.

        Raises:
            HistoryError: If it cannot be written.
        """
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise write_error(self.directory, error, 0) from error

    def claim(self) -> None:
        """Keep everyone else from opening the file, until the environment is released.

        Raises:
            HistoryLockedError: If another store or process has it open.
        """
        with self._mutex:
            if self._users > 1:
                raise in_use(self.directory, "used")
            self._lock(fcntl.LOCK_EX, "used")

    def copy(self, directory: Path) -> None:
        """Write a compact copy into an empty directory.

        Raises:
            HistoryFullError: If there is no room.
        """
        with self.read() as txn:
            needed = self.compact_bytes(txn)
        if shutil.disk_usage(directory).free < needed:
            raise full_disk(directory, needed, "a copy needs as much")
        try:
            self._env.copy(str(directory), compact=True)
            (directory / DATA).chmod(_MODE)
        except lmdb.Error as error:
            raise write_error(directory, error, needed) from error

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """Begin a read transaction; its values are views that die with it."""
        self.num_bytes()  # raises if the file was cut
        try:
            with self._env.begin(buffers=True) as txn:
                yield txn
        except (lmdb.ReadersFullError, lmdb.MapResizedError, lmdb.PanicError) as error:
            raise HistoryError(
                f"History `{self.directory}` cannot be read now: {error}. HINT: close it and "
                "open it again."
            ) from error
        except lmdb.Error as error:
            raise self._damaged(error) from error

    @contextmanager
    def write(self, num_bytes: int) -> Iterator[lmdb.Transaction[bytes]]:
        """Begin a write transaction, to be committed at the end.

        Args:
            num_bytes: About how much is to be written, for the error message.

        Raises:
            HistoryFullError: If there is no room.
            HistoryError: If it cannot be written.
        """
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise write_error(self.directory, error, num_bytes) from error

    def cursor(self, txn: lmdb.Transaction[Any], database: str) -> lmdb.Cursor[Any]:
        """Return a cursor over one of the databases."""
        return txn.cursor(self._databases[database])

    def stored_bytes(self, txn: lmdb.Transaction[Any], database: str) -> int:
        """Return the bytes of the pages that one of the databases takes."""
        return _pages(txn.stat(self._databases[database])) * self._page_bytes

    def compact_bytes(self, txn: lmdb.Transaction[Any]) -> int:
        """Return the size of a file with all of it and nothing else."""
        pages = _META_PAGES + _pages(self._env.stat())
        return pages * self._page_bytes + sum(self.stored_bytes(txn, name) for name in DATABASES)

    def num_bytes(self) -> int:
        """Return the size of the file.

        Raises:
            HistoryCorruptedError: If the file ends before its last page.
        """
        # Reading the map beyond the end of the file is a SIGBUS, not an exception.
        used = (self._env.info()["last_pgno"] + 1) * self._page_bytes
        size = self._data.stat().st_size  # later than `used`, as another process may write
        if size < used:
            raise self._truncated(size, used)
        return size

    def count(self, txn: lmdb.Transaction[Any], database: str) -> int:
        """Return the number of records in one of the databases."""
        return txn.stat(self._databases[database])["entries"]

    def append(self, txn: lmdb.Transaction[bytes], database: str, key: bytes, data: bytes) -> None:
        """Add a record behind all others of the database.

        Raises:
            HistoryCorruptedError: If there is one behind it already.
        """
        # LMDB does not raise when the key is out of order: it returns False and drops the value.
        if not txn.put(key, data, db=self._databases[database], append=True):
            raise HistoryCorruptedError(
                f"History `{self.directory}` has records behind its last round. HINT: restore it "
                "from a copy."
            )

    def delete(
        self, txn: lmdb.Transaction[bytes], database: str, start: bytes, end: bytes | None = None
    ) -> None:
        """Delete all records from one key on, to the one before another."""
        cursor = self.cursor(txn, database)
        if cursor.set_range(start) and (end is None or cursor.key() < end):
            # A transaction that deletes may leave its last pages unwritten. That is fine with
            # LMDB but looks like a truncated file, so there must be more file than pages.
            size = (self._env.info()["last_pgno"] + 1) * self._page_bytes + _SLACK
            if self._data.stat().st_size < size:
                os.truncate(self._data, size)
            while cursor.delete() and (end is None or cursor.key() < end):
                pass

    def _lock(self, kind: int, state: str) -> None:
        try:
            fcntl.flock(self._use, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise in_use(self.directory, state) from error

    def _close(self) -> None:
        self._env.close()
        os.close(self._use)

    def _truncated(self, size: int, needed: int) -> HistoryCorruptedError:
        return HistoryCorruptedError(
            f"History `{self.directory}` is truncated: `{DATA}` has {size} bytes, but at least "
            f"{needed} were written. HINT: restore it from a copy."
        )

    def _damaged(self, error: lmdb.Error) -> HistoryCorruptedError:
        return HistoryCorruptedError(
            f"History `{self.directory}` is damaged: {error}. HINT: restore it from a copy."
        )


@contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """Make a directory for a new file of a history; it is removed afterwards.

    Whoever calls this has the `WriterLock`, which removes what a killed process left there.
    """
    new = directory / "new"
    new.mkdir()
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, directory: Path) -> None:
    """Move a complete file to the directory of a history, in place of the one that is there.

    After a crash, the old or the new file is there, whole.
    """
    sync(new / DATA)
    (new / DATA).replace(directory / DATA)
    for folder in (directory, directory.parent):  # names are durable only now
        sync(folder)


def _pages(stat: Mapping[str, Any]) -> int:
    return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])


def _make_lock_file(directory: Path) -> None:
    """Give LMDB's lock file its blocks: without room for them, writing to its map would kill us."""
    file = os.open(directory / "lock.mdb", os.O_RDWR | os.O_CREAT, _MODE)
    try:
        if os.fstat(file).st_blocks * 512 < _LOCK_BYTES:
            os.posix_fallocate(file, 0, _LOCK_BYTES)
    except OSError as error:
        raise full_disk(directory, _LOCK_BYTES, f"for `lock.mdb`: {error.strerror}") from error
    finally:
        os.close(file)


def _open_lmdb(directory: Path, map_size: int | None, sync: bool = True) -> lmdb.Environment:
    # A map takes address space, not memory: reserve plenty once, so that it need never grow.
    size = MAP_SIZE if map_size is None else map_size
    # Newer bindings have two engines, and an environment variable must not choose the format.
    engine: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
    writable = os.access(directory, os.W_OK)
    if writable and (directory / DATA).exists() and hasattr(os, "posix_fallocate"):
        _make_lock_file(directory)
    while True:
        try:
            return lmdb.open(
                str(directory),
                map_size=size,
                max_dbs=8,
                max_readers=_MAX_READERS,
                max_spare_txns=0,
                sync=sync,  # a commit that is not synced can cost the whole file
                readahead=True,  # rounds are read front to back
                mode=_MODE,
                create=False,
                readonly=not writable,
                lock=writable,
                **engine,
            )
        except lmdb.MemoryError as error:
            if map_size is not None or size <= _SMALLEST_MAP_SIZE:
                raise HistoryError(
                    f"History `{directory}` cannot reserve {size} bytes of address space. "
                    "HINT: lower `map_size`, or raise the limit (`ulimit -v`)."
                ) from error
            size //= 2
        except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise foreign(directory) from error
        except lmdb.Error as error:
            raise HistoryError(f"History `{directory}` cannot be opened: {error}.") from error
