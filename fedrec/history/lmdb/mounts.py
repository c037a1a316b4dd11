"""Which type of file system a directory is on, by the list of mounts that Linux keeps."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

__all__ = ["MEMORY", "REMOTE", "file_system", "warn_about"]

_log = logging.getLogger(__name__)

MOUNTS = Path("/proc/self/mountinfo")

#: Locks and memory maps of these do not hold between machines, or not at all.
REMOTE = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "sshfs", "s3fs", "rclone"),
        *("gcsfuse", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "ocfs2", "gfs2", "pvfs2"),
        "orangefs",
    }
)
#: What is written to these is gone when the machine stops.
MEMORY = frozenset({"tmpfs", "ramfs"})
_ESCAPED = re.compile(r"\\([0-7]{3})")
_warned: set[str] = set()  # mount points


def file_system(directory: Path, mounts: Path | None = None) -> str | None:
    """Return the type of the file system of a directory, such as `ext4`.

    Args:
        directory: The directory; it need not exist.
        mounts: A file like `/proc/self/mountinfo`, which is the default.

    Returns:
        The type, without the `fuse.` of file systems in user space; `None` if it is not known.
    """
    return _mount(directory, mounts)[1]


def _mount(directory: Path, mounts: Path | None) -> tuple[str, str | None]:
    """Return mount point and type."""
    try:
        lines = (MOUNTS if mounts is None else mounts).read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return "", None
    path = os.path.realpath(directory)
    longest: tuple[str, str | None] = ("", None)
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(
            longest[0]
        ):  # of two at one point, the later hides the other
            longest = point, kind[0].removeprefix("fuse.")
    return longest


def warn_about(directory: Path) -> None:
    """Warn, once in a process and mount, if a directory is no place to write a history."""
    point, kind = _mount(directory, None)
    if point in _warned:
        return
    _warned.add(point)
    if kind in REMOTE:
        _log.warning(
            "History `%s` is on a remote file system (%s), where LMDB's locks and memory map may "
            "not hold: it can be damaged without notice. HINT: record to a local disk, and copy "
            "the closed history, or an export of it.",
            directory,
            kind,
        )
    elif kind in MEMORY:
        _log.warning(
            "History `%s` is in memory (%s): it takes that from training, and is gone when the "
            "machine stops. HINT: record to a local disk.",
            directory,
            kind,
        )
