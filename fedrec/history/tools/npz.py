"""Reading `.npz` files that may come from anywhere: every size, type and name is checked."""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from fedrec.exceptions import HistoryCorruptedError
from fedrec.history.codecs import CODECS
from fedrec.history.manifest import Manifest

__all__ = ["UNREADABLE", "open_plain", "read_arrays", "refuse"]

#: What reading a damaged archive may end in. `zipfile` raises RuntimeError where flags make it
#: believe that an entry is encrypted, and NotImplementedError, a RuntimeError, for odd methods.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

# What NumPy writes before an array of version 1.0; a pickled one has another `descr`.
_HEADER = re.compile(
    rb"\{'descr': '(<f4|<f8|<i8|<U\d{1,4})', 'fortran_order': False, "
    rb"'shape': \((\d{1,18}),(?: (\d{1,18}))?\), \} *\n"
)
_MAGIC = b"\x93NUMPY\x01\x00"
_LARGEST_HEADER = 4096
_NAMES = frozenset(
    {
        *("global_weights", "aggregate", "updates", "client_ids", "present", "num_samples"),
        *("cohort", "refused", "reasons", "bounds"),
    }
)


def refuse(path: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    """Raise the error for a file that is not what an export can have."""
    raise HistoryCorruptedError(
        f"`{path}` cannot be imported: {why}. HINT: export the history again."
    ) from cause


def open_plain(path: Path, most: int | None = None) -> BufferedReader:
    """Open a plain file, of at most so many bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        refuse(path, str(error), error)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (most is not None and status.st_size > most):
        os.close(descriptor)
        refuse(path, f"it is no plain file, or larger than {most} bytes")
    return open(descriptor, "rb")  # noqa: PTH123 - of a descriptor; the caller closes it


def read_arrays(
    path: Path, archive: zipfile.ZipFile, num_bytes: int, manifest: Manifest
) -> dict[str, Any]:
    """Read the members of an archive, none of which may be compressed, large or of odd type."""
    names = {f"{name}.npy" for name in _NAMES}
    names |= set() if CODECS[manifest.codec].lossless else {"max_error.npy"}
    names |= {"buffers.npy"} if manifest.num_buffers else set()
    members = archive.infolist()
    stored = {m.filename for m in members}
    # An export by an inexact codec may become a history by an exact one.
    optional = {"max_error.npy", "departure.npy"}
    if stored - optional != names - optional or len(stored) != len(members):
        refuse(path, f"its arrays are not {', '.join(sorted(names))}")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            refuse(path, f"`{member.filename}` is compressed")
    if sum(m.file_size for m in members) > num_bytes:
        refuse(path, "its arrays are larger than it is")
    arrays = {}
    for member in members:
        with archive.open(member) as stream:
            name = member.filename.removesuffix(".npy")
            arrays[name] = _read_array(path, name, stream, member.file_size, manifest)
    return arrays


def _read_array(path: Path, name: str, stream: IO[bytes], size: int, manifest: Manifest) -> Any:
    """Read an array whose type, shape and size are what they must be."""
    start = stream.read(len(_MAGIC) + 2)
    length = int.from_bytes(start[-2:], "little")
    if start[:-2] != _MAGIC or length > _LARGEST_HEADER:
        refuse(path, f"`{name}` is not a plain array")
    header = _HEADER.fullmatch(stream.read(length))
    if header is None:
        refuse(path, f"`{name}` is not a plain array of ours")
    descr = header[1].decode()
    shape = tuple(int(n) for n in header.groups()[1:] if n is not None)
    n, d = len(manifest.clients), manifest.num_parameters
    wide = "<f8" if manifest.buffer_dtype == "float64" else "<f4"
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {
        "global_weights": ("<f4", (d,)),
        "aggregate": ("<f4", (d,)),
        "buffers": (wide, (manifest.num_buffers,)),
        "updates": ("<f4", (n, d)),
        "num_samples": ("<i8", (n,)),
        "bounds": ("<f8", (n,)),
        "max_error": ("<f8", (n,)),
    }
    dtype, most = kinds.get(name, ("<U", (n,)))
    text = dtype == "<U"
    exact = name in ("global_weights", "aggregate", "buffers")
    if (
        (descr[:2] if text else descr) != dtype
        or len(shape) != len(most)
        or shape[1:] != most[1:]
        or (shape[0] != most[0] if exact else shape[0] > most[0])
    ):
        refuse(path, f"`{name}` has type {descr} and shape {shape}, which cannot be")
    item = 4 * int(descr[2:]) if text else int(descr[2:])
    num_bytes = item * int(np.prod([int(k) for k in shape], dtype=object))
    if size != len(start) + length + num_bytes:
        refuse(path, f"`{name}` does not have the size of its shape")
    data = stream.read(num_bytes + 1)  # to the end, where the zip's own checksum is compared
    if len(data) != num_bytes:
        refuse(path, f"`{name}` is cut short")
    if not text:
        return np.frombuffer(data, dtype).reshape(shape)
    rows = (data[k * item : (k + 1) * item] for k in range(shape[0]))
    return [row.decode("utf-32-le").rstrip("\0") for row in rows]
