"""What codecs write, byte by byte, and what they refuse. The contract has what they share."""

from __future__ import annotations

import struct
from collections.abc import Callable

import lz4.block
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from fedrec.exceptions import ConfigurationError
from fedrec.history import Codec, Encoded, register_codec
from fedrec.history.codecs import CODECS, float16, int8, rows

LOSSY = ["float16", "int8", "int8+zstd", "sign"]


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def encode(name: str, vector: NDArray[np.float32]) -> bytes:
    return bytes(CODECS[name].encode(vector).payload)


def decode(name: str, payload: bytes, size: int) -> list[float]:
    out = np.full(size, np.nan, np.float32)
    CODECS[name].decode(memoryview(payload), out)
    return out.tolist()


def any_numbers(generator: np.random.Generator) -> NDArray[np.float32]:
    """Return a vector of random bits that are finite numbers, some of them made small."""
    size = int(generator.integers(1, 300))
    vector = generator.integers(2**32, size=size, dtype=np.uint32).view(np.float32)
    vector[~np.isfinite(vector)] = 0
    vector[generator.random(size) < generator.random()] *= np.float32(1e-20)
    return vector


def test_ids_and_names() -> None:
    """They are on disk: an id is never given to another codec."""
    names = ("float32", "lz4", "zstd", "float16", "int8", "int8+zstd", "sign")
    ours = {codec.id: name for name, codec in CODECS.items() if codec.id < 128}
    assert ours == dict(enumerate(names, start=1))
    assert [name for name in names if not CODECS[name].lossless] == LOSSY


def test_float32() -> None:
    assert encode("float32", floats(1.0, -2.5, 3e-45)) == struct.pack("<3f", 1.0, -2.5, 3e-45)
    vector = floats(1, 2)
    assert np.shares_memory(np.frombuffer(CODECS["float32"].encode(vector).payload, "B"), vector)


@pytest.mark.parametrize("num_bytes", [0, 4, 11, 16])
def test_float32_refuses_another_length(num_bytes: int) -> None:
    # 4 bytes would otherwise be broadcast to all three numbers.
    with pytest.raises(ValueError, match=f"{num_bytes} bytes cannot be 3 float32 numbers"):
        decode("float32", b"\0" * num_bytes, 3)


def test_lossless_codecs_put_bytes_of_the_same_significance_side_by_side() -> None:
    vector = floats(1.0, -2.0, 0.0)  # 3f800000, c0000000, 0
    planes = bytes([0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0x3F, 0xC0, 0])
    assert zstandard.decompress(encode("zstd", vector)) == planes
    assert lz4.block.decompress(encode("lz4", vector), uncompressed_size=12) == planes


def test_float16_bytes() -> None:
    # The largest entry is taken to 2^14: sign, exponent 14 + 15, no fraction.
    found = encode("float16", floats(1.0, -0.5, 0.0))
    assert found == struct.pack("<f3H", 2**-14, 0x7400, 0xF000, 0)


@pytest.mark.parametrize("unit", [1e-30, 1e-7, 1.0, 1e30])
def test_float16_rounds_to_eleven_bits(unit: float) -> None:
    generator = np.random.default_rng(0)
    vector = (unit * generator.standard_normal(5000)).astype(np.float32)
    mantissa, exponent = np.frexp(vector.astype(np.float64))
    away = np.sign(mantissa) * np.floor(np.abs(mantissa) * 2048 + 0.5)
    assert (
        decode("float16", encode("float16", vector), 5000) == np.ldexp(away, exponent - 11).tolist()
    )


def test_float16_small_entries() -> None:
    # 2^15 is as far as the largest entry gets; the last bit of a float16 is 2^-24.
    step = 2.0 ** (-24 - 14)
    found = decode("float16", encode("float16", floats(1.0, 5 * step, 0.6 * step, 0.4 * step)), 4)
    assert found == [1.0, 5 * step, step, 0.0]


def test_int8_bytes() -> None:
    vector = np.zeros(66, np.float32)
    vector[[0, 1, 2, 64, 65]] = [127, -1.4, 0.6, 0.5, -0.25]
    # Steps: 1, and 0.5 / 127 to the nearest of 8 significant bits, 129 * 2^-15.
    step = 129 * 2.0**-15
    payload = encode("int8", vector)
    assert payload[:4] == bytes([0x80, 0x3F]) + struct.pack("<f", step)[2:]
    codes = np.frombuffer(payload, np.int8, offset=4)
    assert codes[[0, 1, 2, 64, 65]].tolist() == [127, -1, 1, 127, -64]
    assert codes.size == 66
    assert CODECS["int8"].encode(vector).max_error == pytest.approx(0.5, rel=1e-3)
    assert decode("int8", payload, 66)[64] == 127 * step


def test_int8_zstd_gives_quiet_blocks_coarser_steps() -> None:
    """64 blocks, largest entries 127 (40 blocks), 12.7 (20) and 1,270 (4): the median step is 1."""
    top = np.repeat([127.0, 12.7, 1270.0], [40, 20, 4])
    vector = np.zeros((64, 64), np.float32)
    vector[:, 5] = top
    payload = encode("int8+zstd", vector.reshape(-1))
    plain = encode("int8", vector.reshape(-1))
    halves = np.frombuffer(payload, "<u2", 64).astype(np.uint32) << 16
    assert halves.view(np.float32).tolist() == [2.0] * 60 + [10.0] * 4
    codes = np.frombuffer(zstandard.decompress(payload[128:]), np.int8)
    assert codes.reshape(64, 64)[:, 5].tolist() == [64] * 40 + [6] * 20 + [127] * 4
    assert np.frombuffer(plain, np.int8, offset=128).reshape(64, 64)[:, 5].tolist() == [127] * 64


def test_sign_bytes() -> None:
    vector = floats(1, -2, 3, -4, 5, -6, 7, -8, 0)
    assert encode("sign", vector) == struct.pack("<f", 4.0) + bytes([0b01010101, 0])
    assert decode("sign", encode("sign", vector), 9) == [4, -4, 4, -4, 4, -4, 4, -4, 4]
    assert CODECS["sign"].encode(vector).max_error == 4.0


@pytest.mark.parametrize("name", CODECS)
def test_any_finite_numbers(name: str) -> None:
    """Vectors of random bits: every exponent there is, in one vector."""
    codec, generator = CODECS[name], np.random.default_rng(0)
    for _ in range(200):
        vector = any_numbers(generator)
        payload, max_error = codec.encode(vector)
        found = np.array(decode(name, bytes(payload), vector.size))
        assert np.abs(found - vector.astype(np.float64)).max() <= max_error


def test_a_zstd_frame_that_holds_more_takes_no_memory() -> None:
    bomb = zstandard.compress(bytes(2**28))
    assert len(bomb) < 2**15
    with pytest.raises(ValueError, match="a zstd frame of 268435456 bytes cannot hold 12"):
        decode("zstd", bomb, 3)
    with pytest.raises(ValueError, match="268435456"):
        decode("int8+zstd", bytes(2) + bomb, 3)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(12))
    with pytest.raises(ValueError, match="cannot hold 12"):
        decode("zstd", unsaid, 3)


def test_an_lz4_block_that_holds_more_is_refused() -> None:
    for size, error in ((2**24, "insufficient space"), (8, "8 bytes came out instead of 12")):
        with pytest.raises(ValueError, match=error):
            decode("lz4", lz4.block.compress(bytes(size), store_size=False), 3)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_scales_that_make_no_sense_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="a scale of"):
        decode("float16", struct.pack("<fH", scale, 0), 1)
    with pytest.raises(ValueError, match="a scale of"):
        decode("sign", struct.pack("<fB", scale, 0), 1)
    with pytest.raises(ValueError, match="a step that is"):
        decode("int8", struct.pack("<f", scale)[2:] + b"\1", 1)


@pytest.mark.parametrize("processors", [1, 2, 3, 8])
def test_bytes_do_not_depend_on_threads(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda pid: range(processors))
    vectors = list(np.random.default_rng(0).standard_normal((11, 5000), dtype=np.float32))
    for codec in CODECS.values():
        expected = [encode(codec.name, v) for v in vectors]
        for found in (
            rows.map_rows(codec.encode, vectors, 2**30),
            rows.stream_rows(codec.encode, vectors, 2**30),
        ):
            assert [bytes(e.payload) for e in found] == expected


def test_a_stream_is_a_few_rows_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads, three results wait for the first one to be taken, and no more."""
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda pid: range(2))
    begun: list[int] = []
    stream = rows.stream_rows(lambda k: begun.append(k) or -k, range(100), 2**30)
    assert begun == []
    assert [next(stream), next(stream)] == [0, -1]
    assert max(begun) <= 4
    stream.close()
    assert len(begun) <= 5
    with pytest.raises(ZeroDivisionError):
        list(rows.stream_rows(lambda k: 1 // (4 - k), range(10), 2**30))


@pytest.mark.parametrize("name", CODECS)
def test_a_largest_magnitude_that_is_known_changes_no_bit(name: str) -> None:
    generator = np.random.default_rng(0)
    for vector in [any_numbers(generator) for _ in range(50)]:
        largest = float(np.abs(vector.astype(np.float64)).max())
        codec = CODECS[name]
        found, expected = codec.encode_known(vector, largest), codec.encode(vector)
        assert bytes(found.payload) == bytes(expected.payload)
        assert found.max_error == expected.max_error


@pytest.mark.parametrize("name", ["float16", "int8", "int8+zstd"])
def test_compiled_loops_give_the_bits_of_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = pytest.importorskip("fedrec.history.codecs._numba_codecs")
    generator = np.random.default_rng(0)
    vectors = [any_numbers(generator) for _ in range(100)]
    unit = 10.0 ** generator.integers(-40, 35, size=50)
    vectors += [(u * generator.standard_normal(64 * 3 + 5)).astype(np.float32) for u in unit]
    vectors += [np.zeros(65, np.float32), np.full(64, -0.0, np.float32)]
    found = []
    for kernels in (None, loops):
        for module in (float16, int8):
            monkeypatch.setattr(module, "compiled", lambda kernels=kernels: kernels)
        encoded = [CODECS[name].encode(vector) for vector in vectors]
        decoded = [np.empty_like(vector) for vector in vectors]
        for one, out in zip(encoded, decoded, strict=True):
            CODECS[name].decode(memoryview(one.payload), out)
            shifted = memoryview(b"x" + bytes(one.payload))[1:]  # at an odd address
            again = np.empty_like(out)
            CODECS[name].decode(shifted, again)
            assert again.tobytes() == out.tobytes()
        both = zip(encoded, decoded, strict=True)
        found.append([(bytes(e.payload), e.max_error, out.tobytes()) for e, out in both])
    assert found[0] == found[1]


def test_compiled_loops_are_not_loaded_for_a_history(run_script: Callable[..., str]) -> None:
    run_script(
        "import sys, numpy; from fedrec.history.codecs import CODECS\n"
        "[codec.encode(numpy.ones(9, 'f4')) for codec in CODECS.values()]\n"
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )


def test_the_first_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.os, "sched_getaffinity", lambda pid: range(3))
    with pytest.raises(ZeroDivisionError):
        rows.map_rows(lambda k: 1 // (4 - k), range(10), 2**30)


def test_nothing_is_loaded_for_float32(run_script: Callable[..., str]) -> None:
    run_script(
        "import sys, fedrec.history.lmdb.history\n"
        "assert not {'zstandard', 'lz4'} & set(sys.modules)"
    )


class Halved(Codec):
    """A codec of one's own: every other entry."""

    id = 200
    name = "halved"

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        return Encoded(vector[::2].tobytes(), 2 * float(np.abs(vector).max()))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        out[:] = np.repeat(np.frombuffer(payload, "<f4"), 2)[: out.size]


def test_register() -> None:
    register_codec(Halved())
    assert CODECS["halved"].id == 200
    with pytest.raises(ConfigurationError, match=r"`halved` .*id 200.* cannot be registered"):
        register_codec(Halved())


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"id": 127}, "between 128 and 255"),
        ({"id": 256}, "between 128 and 255"),
        ({"id": "200"}, "between 128 and 255"),
        ({"name": ""}, "`codec.name` to be a name"),
        ({"name": "int8"}, r"`int8` \(Odd, id 200\).*`int8` \(Int8Codec\) has id 5"),
        ({"name": "other"}, r"`other` \(Odd, id 200\).*`halved` \(Halved\) has id 200"),
    ],
)
def test_register_refuses(attributes: dict[str, object], error: str) -> None:
    register_codec(Halved())
    with pytest.raises(ConfigurationError, match=error):
        register_codec(type("Odd", (Halved,), attributes)())
    with pytest.raises(ConfigurationError, match="an instance of a Codec"):
        register_codec(Halved)  # type: ignore[arg-type]
