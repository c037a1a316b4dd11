"""The partition by degree of non-iid of Fang et al."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_float
from fedrec.data.partitioners.base import Partitioner
from fedrec.exceptions import ConfigurationError

__all__ = ["DegreeOfNonIID"]


class DegreeOfNonIID(Partitioner):
    r"""Each group of clients prefers one label, to the degree $q$.

    The $n$ clients form $L$ groups, one for each of the $L$ labels that occur. A sample with label
    $y$ goes to group $y$ with probability $q$ and to each other group with probability
    $(1 - q) / (L - 1)$; within the group, every client is equally likely. Which client belongs to
    which group is random. $q = 1 / L$ is iid; at $q = 1$ every client holds a single label.

    If $L$ does not divide $n$, groups are as equal as possible: those of the $n \bmod L$ smallest
    labels have one client more. With a single label there is one group and $q$ has no effect.

    Args:
        q: Degree of non-iid, in [0, 1]; the papers use 0.5.

    Raises:
        ConfigurationError: If `q` is not in [0, 1], or there are fewer clients than labels.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> labels = np.repeat([0, 1], 50)
        >>> parts = DegreeOfNonIID(q=1.0)(labels, 2, np.random.default_rng(0))
        >>> sorted(np.unique(labels[part]).tolist() for part in parts)
        [[0], [1]]
    """

    def __init__(self, *, q: float = 0.5) -> None:
        self.q = check_float("q", q, minimum=0.0, maximum=1.0)

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Draw a group, then a client of that group, for every sample."""
        classes, own_group = np.unique(labels, return_inverse=True)
        num_groups = len(classes)
        if num_clients < num_groups:
            raise ConfigurationError(
                f"Cannot form {num_groups} groups, one per label, of {num_clients} clients. "
                f"HINT: use at least {num_groups} clients, or `IIDPartitioner()`."
            )
        group = own_group
        if num_groups > 1:
            # A random shift of 1..L-1 gives each other group the same probability.
            shift = generator.integers(1, num_groups, size=len(labels))
            elsewhere = generator.random(len(labels)) >= self.q
            group = np.where(elsewhere, (own_group + shift) % num_groups, own_group)

        members = np.array_split(generator.permutation(num_clients), num_groups)
        sizes = np.array([len(member) for member in members])
        first = np.cumsum(sizes) - sizes
        client = np.concatenate(members)[first[group] + generator.integers(sizes[group])]

        order = np.argsort(client, kind="stable")
        ends = np.cumsum(np.bincount(client, minlength=num_clients))
        return np.split(order, ends[:-1])
