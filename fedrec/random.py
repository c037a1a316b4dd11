"""Random numbers as a function of (seed, purpose, round, client), never of a shared stream.

Because no draw depends on an earlier one, batches are the same whatever the order of the clients,
the executor, the device, an interruption, or who is left out.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

__all__ = ["key", "numpy_generator", "torch_generator"]


def _digest(seed: int, purpose: str, round: int, client_id: str) -> bytes:
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client_id}".encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def key(seed: int, purpose: str, round: int = 0, client_id: str = "") -> int:
    """Return the 128-bit key that stands for these four things."""
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
    """Return a counter-based (Philox) NumPy generator for these four things.

    Examples:
        >>> a = numpy_generator(0, "batch", round=3, client_id="7").integers(100, size=3)
        >>> b = numpy_generator(0, "batch", round=3, client_id="7").integers(100, size=3)
        >>> bool((a == b).all())
        True
    """
    words = np.frombuffer(_digest(seed, purpose, round, client_id), dtype="<u8")
    return np.random.Generator(np.random.Philox(_Key(words)))  # type: ignore[arg-type]


def torch_generator(
    seed: int, purpose: str, round: int = 0, client_id: str = ""
) -> torch.Generator:
    """Return a CPU `torch.Generator` for these four things.

    Examples:
        >>> torch.rand(1, generator=torch_generator(0, "attack", round=3)).shape
        torch.Size([1])
    """
    generator = torch.Generator()
    generator.manual_seed(key(seed, purpose, round, client_id) & (2**63 - 1))
    return generator
