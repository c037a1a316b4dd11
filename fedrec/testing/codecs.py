"""The contract of codecs, as tests."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytest
from numpy.typing import NDArray

from fedrec.history import Codec

__all__ = ["CodecContract"]


class CodecContract(ABC):
    """Tests for a codec: subclass it as `Test...` in a test file and write `make`.

    Examples:
        >>> from fedrec.history.codecs import Float16Codec
        >>> class TestFloat16Codec(CodecContract):
        ...     def make(self):
        ...         return Float16Codec()
    """

    #: Whether a decoded vector keeps its bits when it is encoded and decoded again.
    stable: bool = True
    #: Largest relative error (Euclidean) of a vector of normal numbers.
    relative_error: float = 0.0

    @abstractmethod
    def make(self) -> Codec:
        """Return the codec."""

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """Return vectors like gradients, and vectors with awkward lengths or extreme numbers."""
        generator = np.random.default_rng(0)
        vectors: dict[str, NDArray[np.float32]] = {}
        for d in (1, 2, 63, 64, 65, 1000, 4096, 2**18 + 777):
            vector = generator.standard_normal(d).astype(np.float32)
            vector[generator.random(d) < 0.3] = 0
            vectors[f"gradient of {d}"] = vector
        sizes = np.repeat(10.0 ** np.arange(-30, 4), 64)
        wide = sizes * generator.standard_normal(sizes.size)
        vectors["1e-30 to 1e3"] = wide.astype(np.float32)
        for power in (-30, -8, 3, 30):
            vectors[f"all near 1e{power}"] = vectors["gradient of 1000"] * np.float32(10.0**power)
        info = np.finfo(np.float32)
        largest, smallest = float(info.max), float(info.smallest_subnormal)
        vectors["zeros"] = np.zeros(100, np.float32)
        vectors["largest"] = np.array([largest, -largest, 0, 1, largest / 3], np.float32)
        vectors["smallest"] = np.array([smallest, -smallest, 0, 3 * smallest], np.float32)
        vectors["extremes"] = np.array([largest, smallest, -0.0, 1e-38, 1.0], np.float32)
        # Just below, at, and above a power of two, where rounding changes the exponent.
        vectors["powers of two"] = np.array([1 - 2**-12, 1 - 2**-13, 1, 1 + 2**-11], np.float32)
        return vectors

    def decoded(self, payload: bytes | memoryview, size: int) -> NDArray[np.float32]:
        """Decode into a row of NaN, between two rows that must not change."""
        rows = np.full((3, size), np.nan, np.float32)
        self.make().decode(memoryview(payload), rows[1])
        assert np.isnan(rows[[0, 2]]).all()
        vector: NDArray[np.float32] = rows[1]
        return vector

    def test_error_is_within_the_bound(self) -> None:
        """A lossless codec keeps all bits; with any other, errors stay within the stated bound."""
        codec = self.make()
        for name, vector in self.vectors().items():
            before = vector.copy()
            payload, max_error = codec.encode(vector)
            decoded = self.decoded(payload, vector.size)
            assert vector.tobytes() == before.tobytes(), name
            assert np.isfinite(decoded).all(), name
            if codec.lossless:
                assert max_error == 0, name
                assert decoded.tobytes() == vector.tobytes(), name
            error = np.abs(decoded.astype(np.float64) - vector).max()
            assert error <= max_error < np.inf, name

    def test_relative_error(self) -> None:
        """The error of a whole vector is small, whatever the unit of its entries."""
        codec = self.make()
        for name, vector in self.vectors().items():
            if name.startswith(("gradient of", "all near")):
                exact = vector.astype(np.float64)
                error = self.decoded(codec.encode(vector).payload, vector.size) - exact
                allowed = self.relative_error * np.linalg.norm(exact)
                assert np.linalg.norm(error) <= allowed, name

    def test_a_known_magnitude_changes_nothing(self) -> None:
        """Encoding is the same where the largest magnitude has been found before."""
        codec = self.make()
        for name, vector in self.vectors().items():
            payload, max_error = codec.encode_known(vector, float(np.abs(vector).max()))
            expected = codec.encode(vector)
            assert bytes(payload) == bytes(expected.payload), name
            assert max_error == expected.max_error, name

    def test_encoding_again_changes_nothing(self) -> None:
        """Encoding and decoding a decoded vector changes no bit."""
        if not self.stable:
            pytest.skip("`stable` is False")
        for name, vector in self.vectors().items():
            first = self.decoded(self.make().encode(vector).payload, vector.size)
            second = self.decoded(self.make().encode(first).payload, vector.size)
            assert first.tobytes() == second.tobytes(), name

    def test_same_vector_same_bytes(self) -> None:
        """Bytes are a function of the vector."""
        for name, vector in self.vectors().items():
            payloads = {bytes(self.make().encode(vector).payload) for _ in range(2)}
            assert len(payloads) == 1, name

    def test_other_lengths_are_refused(self) -> None:
        """Bytes that are cut off, or too many, or of another vector, are no vector."""
        codec = self.make()
        vector = self.vectors()["gradient of 1000"]
        payload = bytes(codec.encode(vector).payload)
        for wrong in (b"", payload[:1], payload[:-1], payload + b"\0", payload + payload):
            with pytest.raises(ValueError):  # noqa: PT011
                self.decoded(wrong, 1000)
        for size in (1, 500, 992, 1009, 4000):
            with pytest.raises(ValueError):  # noqa: PT011
                self.decoded(payload, size)

    def test_any_bytes_are_a_finite_vector_or_refused(self) -> None:
        """Arbitrary bytes are refused, or decode to a finite vector."""
        codec, generator = self.make(), np.random.default_rng(0)
        for size in (1, 65, 1000):
            good = np.frombuffer(codec.encode(np.ones(size, np.float32)).payload, np.uint8)
            for _ in range(300):
                bad = good.copy()
                places = generator.integers(bad.size, size=generator.integers(1, 9))
                bad[places] = generator.integers(256, size=places.size)
                if generator.random() < 0.3:
                    bad = generator.integers(256, size=bad.size).astype(np.uint8)
                try:
                    self.decoded(bad.tobytes(), size)
                except ValueError:
                    continue
