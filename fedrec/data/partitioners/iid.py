"""The iid partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.data.partitioners.base import Partitioner

__all__ = ["IIDPartitioner"]


class IIDPartitioner(Partitioner):
    """Shuffles the samples and deals them out in equal parts.

    Sizes differ by at most one sample.

    Examples:
        >>> parts = IIDPartitioner()(np.zeros(10, dtype=int), 4, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [3, 3, 2, 2]
    """

    needs_labels = False

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Shuffle, then cut into `num_clients` parts."""
        return np.array_split(generator.permutation(len(labels)), num_clients)
