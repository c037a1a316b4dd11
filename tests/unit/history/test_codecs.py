from __future__ import annotations

import struct

import numpy as np
import pytest

from fedrec.history.codecs import CODECS, Float32Codec


def test_ids_and_names_are_unique() -> None:
    assert {name: codec.id for name, codec in CODECS.items()} == {"float32": 1}


def test_float32_is_little_endian() -> None:
    vector = np.array([1.0, -2.5, 3e-45], dtype=np.float32)
    assert bytes(Float32Codec().encode(vector)) == struct.pack("<3f", 1.0, -2.5, 3e-45)


def test_float32_encodes_strided_vectors() -> None:
    vector = np.arange(6, dtype=np.float32)[::2]
    assert bytes(Float32Codec().encode(vector)) == struct.pack("<3f", 0, 2, 4)


def test_float32_decodes_into_the_given_row() -> None:
    out = np.zeros((2, 3), dtype=np.float32)
    Float32Codec().decode(memoryview(struct.pack("<3f", 1, 2, 3)), out[1])
    assert out.tolist() == [[0, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize("num_bytes", [0, 4, 11, 16])
def test_float32_refuses_another_length(num_bytes: int) -> None:
    # 4 bytes would otherwise be broadcast to all three numbers.
    with pytest.raises(ValueError, match=f"{num_bytes} bytes cannot be 3 float32 numbers"):
        Float32Codec().decode(memoryview(b"\0" * num_bytes), np.empty(3, np.float32))
