"""Random numbers as a function of (seed, purpose, round, client), never of a shared stream.

Because no draw depends on an earlier one, batches are the same whatever the order of the clients,
the executor, the device, an interruption, or who is left out.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

__all__ = ["key", "numpy_generator", "torch_generator"]


def key(seed: int, purpose: str, round: int = 0, client_id: str = "") -> int:
    """Return the 128-bit key that stands for these four things."""
    text = f"{seed}\x1f{purpose}\x1f{round}\x1f{client_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


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
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, client_id)))


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
