from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedrec.data.idx import read_idx
from fedrec.exceptions import ConfigurationError

# Two 2x3 images, written by hand: magic 00 00 08 03, then 2, 2, 3, then the bytes.
IDX = bytes.fromhex("00000803 00000002 00000002 00000003") + bytes(range(12))


def write(folder: Path, content: bytes, name: str = "images") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_plain(tmp_path: Path) -> None:
    array = read_idx(write(tmp_path, IDX))
    assert array.shape == (2, 2, 3)
    assert array.dtype == np.uint8
    assert array[1].tolist() == [[6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("name", ["images.gz", "images"])
def test_gzip_is_recognised_by_content(tmp_path: Path, name: str) -> None:
    assert np.array_equal(
        read_idx(write(tmp_path, gzip.compress(IDX, mtime=0), name)), np.arange(12).reshape(2, 2, 3)
    )


def test_a_plain_file_that_is_called_gz(tmp_path: Path) -> None:
    assert read_idx(write(tmp_path, IDX, "images.gz")).shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("code", "pack", "values"),
    [
        (0x09, ">b", [-1, 2]),
        (0x0B, ">h", [-300, 5]),
        (0x0C, ">i", [-70000, 5]),
        (0x0D, ">f", [0.5, -2.0]),
        (0x0E, ">d", [0.1, -2.0]),
    ],
)
def test_other_types(tmp_path: Path, code: int, pack: str, values: list[float]) -> None:
    content = bytes([0, 0, code, 1, 0, 0, 0, 2]) + b"".join(struct.pack(pack, v) for v in values)
    assert read_idx(write(tmp_path, content)).tolist() == values


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"starts with bytes \(none\)"),
        (b"PK\x03\x04 something", "starts with bytes 50 4b 03 04"),
        (bytes.fromhex("0000070100000000"), "starts with bytes 00 00 07 01"),
        (IDX[:10], "ends within its header"),
        (IDX[:-1], r"states shape \(2, 2, 3\), which takes 12 bytes, but has 11"),
        (IDX + b"\0", "takes 12 bytes, but has 13"),
        # A header that promises 2^96 bytes must not make anything be allocated.
        (bytes.fromhex("00000803 ffffffff ffffffff ffffffff"), "but has 0"),
        (gzip.compress(IDX, mtime=0)[:-10], "cannot be decompressed"),
        (gzip.compress(IDX, mtime=0)[:-6] + b"\0\0\0\0\0\0", "cannot be decompressed"),
    ],
)
def test_damaged_files_are_named_with_the_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigurationError, match=rf"{path}.*{reason}.*HINT: fetch the file again"):
        read_idx(path)
