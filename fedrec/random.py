"""Random numbers as a function of (seed, purpose, round, client), never of a shared stream.

Because no draw depends on an earlier one, batches are the same whatever the order of the clients,
the executor, the device, an interruption, or who is left out.
"""

from __future__ import annotations

import hashlib
import struct
import threading

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

__all__ = ["key", "numpy_generator", "reused_generator", "torch_generator"]

_of_thread = threading.local()


def _digest(seed: int, purpose: str, round: int, client_id: str) -> bytes:
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client_id}".encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def key(seed: int, purpose: str, round: int = 0, client_id: str = "") -> int:
    """Return the 128-bit key of (seed, purpose, round, client)."""
    return int.from_bytes(_digest(seed, purpose, round, client_id), "little")


class _Key(ISeedSequence):
    """A Philox key as a seed.

    `Philox(key=...)` gives the same generator, but first reads entropy from the operating system
    to make a seed that it then ignores, which takes longer than drawing a mini-batch.
    """

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:
        return self.words


def numpy_generator(
    seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> np.random.Generator:
    """Return a counter-based (Philox) NumPy generator for (seed, purpose, round, client).

    Examples:
        >>> a = numpy_generator(0, "batch", round=3, client_id="7").integers(100, size=3)
        >>> b = numpy_generator(0, "batch", round=3, client_id="7").integers(100, size=3)
        >>> bool((a == b).all())
        True
    """
    words = np.frombuffer(_digest(seed, purpose, round, client_id), dtype="<u8")
    return np.random.Generator(np.random.Philox(_Key(words)))  # type: ignore[arg-type]


def reused_generator(
    seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> np.random.Generator:
    """Return the generator of `numpy_generator`, in an object that the thread's next call reuses.

    Draw at once, and keep only the numbers, not the generator. Making a new generator would take
    longer than drawing a mini-batch.

    Examples:
        >>> reused_generator(0, "batch", round=3, client_id="7").integers(100, size=3)
        array([37,  4, 79])
    """
    if not hasattr(_of_thread, "generator"):
        _of_thread.generator = np.random.Generator(np.random.Philox(0))
    generator: np.random.Generator = _of_thread.generator
    words = struct.unpack("<2Q", _digest(seed, purpose, round, client_id))
    generator.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": (0, 0, 0, 0), "key": words},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,  # the buffer is used up
        "has_uint32": 0,
        "uinteger": 0,
    }
    return generator


def torch_generator(
    seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> torch.Generator:
    """Return a CPU `torch.Generator` for (seed, purpose, round, client).

    Examples:
        >>> torch.rand(1, generator=torch_generator(0, "attack", round=3)).shape
        torch.Size([1])
    """
    generator = torch.Generator()
    generator.manual_seed(key(seed, purpose, round, client_id) & (2**63 - 1))
    return generator
