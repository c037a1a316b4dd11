"""Reading IDX files, the format MNIST comes in."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import ConfigurationError

__all__ = ["read_idx"]

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | Path) -> NDArray[Any]:
    """Read an array from an IDX file, plain or gzipped.

    An IDX file is two zero bytes, a byte for the type, a byte for the number of dimensions, the
    dimensions as big-endian 32-bit integers, then the values. A gzipped file is recognised by its
    content, not by its name.

    Args:
        path: The file.

    Returns:
        The array, read-only, with the shape and type the file states.

    Raises:
        ConfigurationError: If the file is not IDX, is damaged, or has another size than it says.
    """
    path = Path(path)
    content = path.read_bytes()
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise _broken(path, f"it cannot be decompressed ({error})") from error
    dtype = _DTYPES.get(content[2]) if len(content) >= 4 and content[:2] == b"\0\0" else None
    if dtype is None:
        raise _broken(path, f"it starts with bytes {content[:4].hex(' ') or '(none)'}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise _broken(path, "it ends within its header")
    shape = tuple(np.frombuffer(content, ">u4", count=content[3], offset=4).tolist())
    expected_size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) - start != expected_size:
        raise _broken(
            path,
            f"it states shape {shape}, which takes {expected_size} bytes, "
            f"but has {len(content) - start}",
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _broken(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected `{path}` to be an IDX file, but {reason}. HINT: fetch the file again."
    )
