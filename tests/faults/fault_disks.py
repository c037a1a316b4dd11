"""R5, R6: disks that fill up, fail or lose power.

What needs file systems of its own is for root: mounts are made in a namespace of their own, which
ends with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from fault_stores import (
    D,
    Facts,
    arrays,
    fork,
    manifest,
    record,
    require_whole,
)

from fedrec.exceptions import HistoryError, HistoryFullError
from fedrec.history import LMDBHistory

_NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2
ROUND_BYTES = 8 * 4 * D


def can_mount() -> bool:
    """Tell whether this process may mount file systems, and ext4 images in particular."""
    return fork(lambda send: _own_mounts()).wait().code == 0 and bool(shutil.which("mkfs.ext4"))


def _own_mounts() -> None:
    """Leave the mounts of all others alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACE):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    """Mount something on a folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        if subprocess.run(["umount", str(folder)], check=False, capture_output=True).returncode:
            subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def _fill(path: Path, leave: int) -> None:
    """Write a file until only so many bytes are free."""
    free = shutil.disk_usage(path.parent).free - leave
    with path.open("wb") as file:
        for _ in range(max(0, free) // 4096):
            try:
                file.write(bytes(4096))
                file.flush()
            except OSError:
                break


def _full(path: Path, is_told: bool, leave: int, send: Callable[[object], None]) -> dict[str, int]:
    """Record until the disk is full, and go on when there is room again."""
    filler = path.parent / "filler"
    store = record(path, 2, max_rounds=3)
    _fill(filler, leave)
    disk_usage = shutil.disk_usage
    if not is_told:  # the disk fills up between the look at it and the write
        shutil.disk_usage = lambda path: SimpleNamespace(total=2**40, used=0, free=2**40)
    t = 2
    try:
        while True:
            store.append(arrays(t))
            t += 1
    except HistoryFullError as error:
        text = str(error)
    shutil.disk_usage = disk_usage
    assert str(path) in text, text
    assert "no room for" in text, text
    assert "bytes are free" in text, text
    assert "all earlier rounds are intact" in text, text
    assert store.verify() == range(t)
    store.close()
    assert store.verify() == range(t)
    filler.unlink()
    for more in range(t, t + 2):
        store.append(arrays(more))
    store.close()
    assert require_whole(path) == t + 2
    return {"rounds before": t, "rounds after": 2}


def full_disk(kind: str, rng: random.Random, folder: Path) -> Facts:
    """R6: the disk is full at some round; all that was stored is there, and it goes on."""
    leave = rng.randrange(0, 8 * ROUND_BYTES)
    is_told = rng.random() < 0.3

    def run(send: Callable[[object], None]) -> dict[str, int]:
        _own_mounts()
        place = folder / "disk"
        if kind == "tmpfs":
            options = ["-t", "tmpfs", "-o", "size=4m", "none"]
        else:
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(8 * 2**20)
            words = ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)]
            subprocess.run(words, check=True, capture_output=True)
            options = ["-o", "loop", str(image)]
        with mounted(place, *options):
            return _full(place / "history", is_told, leave, send)

    found: Facts = fork(run).result()
    return {**found, "seen before writing" if is_told else "seen while writing": 1}


def limited_file(rng: random.Random, folder: Path) -> Facts:
    """R6 without root: a limit on the size of files, at any byte of a round."""
    limit = 80_000 + rng.randrange(12 * ROUND_BYTES)

    def run(send: Callable[[object], None]) -> int:
        store = LMDBHistory(folder / "history")
        store.transaction_bytes = rng.choice((10_000, 2**28))
        store.begin(manifest())
        # Raising it again later is not for everyone: hence only the soft limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        t = 0
        try:
            while True:
                store.append(arrays(t))
                t += 1
        except HistoryFullError as error:
            text = str(error)
        assert "all earlier rounds are intact" in text, text
        assert store.verify() == range(t)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for more in range(t, t + 2):
            store.append(arrays(more))
        store.close()
        return t

    rounds = fork(run).result()
    assert require_whole(folder / "history") == rounds + 2
    return {"rounds before": rounds}


def failing_disk(rng: random.Random, folder: Path) -> Facts:
    """R6: the device below ext4 fails to write (EIO), since the disk of its image is full."""

    def run(send: Callable[[object], None]) -> dict[str, int]:
        _own_mounts()
        below, place = folder / "below", folder / "disk"
        with mounted(below, "-t", "tmpfs", "-o", "size=24m", "none"):
            image = below / "image"
            with image.open("wb") as file:
                file.truncate(64 * 2**20)
            words = ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image)]
            subprocess.run(words, check=True, capture_output=True)
            acknowledged = 0
            with mounted(place, "-o", "loop,errors=remount-ro", str(image)):
                store = record(place / "history", 2)
                acknowledged = 2
                os.sync()
                _fill(below / "filler", rng.randrange(10 * ROUND_BYTES))
                try:
                    while acknowledged < 500:
                        store.append(arrays(acknowledged))
                        acknowledged += 1
                except HistoryError as error:
                    text = str(error)
                assert acknowledged < 500, "the device did not fail"
                assert "all earlier rounds are intact" in text, text
                store.close()
                (below / "filler").unlink()
            with mounted(place, "-o", "loop", str(image)):
                rounds = require_whole(place / "history")
                assert rounds in (acknowledged, acknowledged + 1), (rounds, acknowledged)
                for t in range(rounds, rounds + 2):
                    store.append(arrays(t))
                store.close()
                assert require_whole(place / "history") == rounds + 2
        return {"rounds before": rounds}

    found: Facts = fork(run).result()
    return found


def power_cut(rng: random.Random, folder: Path) -> Facts:
    """R5: ext4 stops at a random instant without writing anything more; mount it again and look."""

    def run(send: Callable[[object], None]) -> dict[str, int]:
        _own_mounts()
        image, place = folder / "image", folder / "disk"
        with image.open("wb") as file:
            file.truncate(64 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        path = place / "history"
        with mounted(place, "-o", "loop", str(image)):
            record(path, 1)
            writer = fork(partial(_write_on, path))
            _cut(place, path / "data.mdb", image, rng)
            writer.kill()
            # Behind the last round it says what it died of, if it saw the file system stop.
            acknowledged = 1 + sum(line.isdigit() for line in writer.wait().lines)
        with mounted(place, "-o", "loop", str(image)):
            rounds = require_whole(path)
            # The last one may be acknowledged by a file system that stopped a moment before.
            assert rounds in (acknowledged, acknowledged + 1), (rounds, acknowledged)
            store = LMDBHistory(path)
            store.append(arrays(rounds))
            store.close()
            assert require_whole(path) == rounds + 1
        return {"rounds acked": acknowledged, "head ahead": rounds - acknowledged}

    found: Facts = fork(run).result()
    return found


def _write_on(path: Path, send: Callable[[object], None]) -> None:
    store = LMDBHistory(path)
    for t in range(1, 10**6):
        store.append(arrays(t))
        send(t)


def _cut(place: Path, data: Path, image: Path, rng: random.Random) -> None:
    """Write back parts of the file at random, as a kernel does, and cut the power."""
    sync_file_range = ctypes.CDLL(None).sync_file_range
    end = time.monotonic() + rng.uniform(0.02, 0.4)
    with data.open("rb") as file:
        while time.monotonic() < end:
            size = os.fstat(file.fileno()).st_size
            start = rng.randrange(0, size, 4096)
            sync_file_range(file.fileno(), ctypes.c_int64(start), ctypes.c_int64(16384), 2)
            time.sleep(rng.uniform(0, 0.01))
        root = os.open(place, os.O_RDONLY)
        # Only a loop device, and the one of this image, is ever cut off.
        device = Path(
            f"/sys/dev/block/{os.major(os.fstat(root).st_dev)}:"
            f"{os.minor(os.fstat(root).st_dev)}/loop/backing_file"
        )
        if device.read_text().strip() != str(image.resolve()):
            raise OSError(errno.EINVAL, f"{place} is not {image}")
        fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os.close(root)
