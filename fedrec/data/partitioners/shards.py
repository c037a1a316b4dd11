"""The partition into shards of samples that are sorted by label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_int
from fedrec.data.partitioners.base import Partitioner
from fedrec.exceptions import ConfigurationError

__all__ = ["Shards"]


class Shards(Partitioner):
    r"""Every client holds a few shards of the samples sorted by label, so only a few labels.

    The samples are sorted by label and cut into $n$ times `shards_per_client` shards of equal size
    (to one sample). Every client gets `shards_per_client` shards at random.

    Args:
        shards_per_client: Shards a client gets, at least 1.

    Raises:
        ConfigurationError: If `shards_per_client` is not positive, or, when splitting, there are
            fewer samples than shards.

    References:
        - McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
          AISTATS 2017.

    Examples:
        >>> labels = np.repeat(np.arange(10), 12)
        >>> parts = Shards(shards_per_client=2)(labels, 5, np.random.default_rng(0))
        >>> [np.unique(labels[part]).size for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(self, *, shards_per_client: int = 2) -> None:
        self.shards_per_client = check_int("shards_per_client", shards_per_client, minimum=1)

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Sort, cut, and deal out the shards."""
        num_shards = num_clients * self.shards_per_client
        if len(labels) < num_shards:
            raise ConfigurationError(
                f"Cannot cut {len(labels)} samples into {num_clients} * {self.shards_per_client} = "
                f"{num_shards} shards. HINT: lower `num_clients` or `shards_per_client`."
            )
        shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
        dealt = generator.permutation(num_shards).reshape(num_clients, self.shards_per_client)
        return [np.concatenate([shards[i] for i in hand]) for hand in dealt]
