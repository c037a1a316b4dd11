"""The abstract partitioner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_int
from fedrec.component import Component
from fedrec.exceptions import ConfigurationError, ShapeError

__all__ = ["Partitioner"]


class Partitioner(Component, ABC):
    r"""Splits a data set over clients.

    Calling the partitioner checks its input, calls `split`, the one method to write, and checks
    that every sample went to exactly one client and that no client is left without a sample.

    Shape:
        - `labels`: $(N,)$, integers.
        - Output: one array of indices per client; together they are a permutation of
          $0, \dots, N - 1$.

    Raises:
        ShapeError: If `labels` is not one-dimensional and of integers.
        ConfigurationError: If there are fewer samples than clients, a client gets no sample, or
            `split` loses or repeats samples.

    Examples:
        >>> class Slices(Partitioner):
        ...     "Neighbouring samples stay together."
        ...     def split(self, labels, num_clients, generator):
        ...         return np.array_split(np.arange(len(labels)), num_clients)
        >>> Slices()(np.zeros(5, dtype=int), 2, np.random.default_rng(0))
        [array([0, 1, 2]), array([3, 4])]
    """

    @abstractmethod
    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Split checked input.

        Args:
            labels: Shape $(N,)$, the label of every sample; $N$ is at least `num_clients`.
            num_clients: Number of clients.
            generator: The only source of random numbers to use.

        Returns:
            One array of indices into `labels` per client.
        """

    def __call__(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Check the input, split, check the output; the indices of a client come sorted."""
        check_int("num_clients", num_clients, minimum=1)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ShapeError(
                "Expected `labels` to be integers of shape (N,), "
                f"but got {labels.dtype} of shape {labels.shape}."
            )
        if len(labels) < num_clients:
            raise ConfigurationError(
                f"Cannot split {len(labels)} samples over {num_clients} clients. "
                "HINT: lower `num_clients`."
            )
        parts = [
            np.sort(np.asarray(part, dtype=np.int64))
            for part in self.split(labels, num_clients, generator)
        ]
        self._check_parts(parts, len(labels), num_clients)
        return parts

    def _check_parts(
        self, parts: list[NDArray[np.int64]], num_samples: int, num_clients: int
    ) -> None:
        if len(parts) != num_clients:
            raise ConfigurationError(
                f"Expected {self!r} to return {num_clients} parts, but got {len(parts)}."
            )
        if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_samples)):
            raise ConfigurationError(
                f"Expected {self!r} to give each of {num_samples} samples to exactly one client, "
                "but it lost or repeated some."
            )
        empty = sum(len(part) == 0 for part in parts)
        if empty:
            raise ConfigurationError(
                f"{self!r} left {empty} of {num_clients} clients without a sample. HINT: lower "
                "`num_clients`, use more samples, or choose a partitioner closer to iid."
            )
