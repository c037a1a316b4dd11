"""Updates as a history stores them, which are decoded when somebody asks for numbers."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrec.history.codecs.int8 import MOST, expand
from fedrec.history.codecs.rows import map_rows
from fedrec.types import CohortUpdates, LazyUpdates

__all__ = ["UndecodedUpdates", "stored_rows"]


class UndecodedUpdates(LazyUpdates):
    """Updates that are whole numbers times a step for each block, see `Int8Codec`.

    Args:
        codes: Whole numbers, shape $(m, d)$.
        steps: Of each block, shape $(m, b)$.
        like: Has everything but the updates.
    """

    def __init__(
        self, codes: NDArray[np.int8], steps: NDArray[np.float32], like: CohortUpdates
    ) -> None:
        super().__init__(like)
        self.__dict__.update(codes=codes, steps=steps)

    codes: NDArray[np.int8]
    steps: NDArray[np.float32]

    @cached_property
    def updates(self) -> Tensor:
        """The updates, shape $(m, d)$."""
        out = np.empty(self.codes.shape, np.float32)
        rows = list(zip(self.codes, self.steps, out, strict=True))
        map_rows(lambda row: expand(*row), rows, out.nbytes)
        return torch.from_numpy(out)

    @cached_property
    def is_plain(self) -> bool:
        """Whether an update is nothing but numbers times steps: no product is too large."""
        return bool(self.steps.max(initial=0) < MOST)

    @property
    def num_bytes(self) -> int:
        """Bytes of the updates in this process."""
        return self.codes.nbytes + self.steps.nbytes

    def to(self, device: torch.device) -> CohortUpdates:
        """Return the updates on a device; the object itself if that is the CPU."""
        return self if device.type == "cpu" else super().to(device)


def stored_rows(
    sent: CohortUpdates,
) -> NDArray[np.float32] | tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return updates, or what they are decoded from if nobody has done that yet.

    Args:
        sent: Updates of $m$ clients, on the CPU.

    Returns:
        C-contiguous rows, shape $(m, d)$; or codes and steps, see `UndecodedUpdates`.
    """
    if isinstance(sent, UndecodedUpdates) and sent.is_plain:
        return sent.codes, sent.steps
    rows: NDArray[np.float32] = sent.updates.contiguous().numpy()
    return rows
