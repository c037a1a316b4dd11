"""The abstract partitioner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_int
from fedrec.component import Component
from fedrec.exceptions import ConfigurationError, ShapeError

__all__ = ["Partitioner"]

T = TypeVar("T")


class Partitioner(Component, ABC):
    r"""Splits a data set over clients.

    A subclass writes `split`. Calling the partitioner checks its input, calls `split`, and checks
    that every sample went to exactly one client and that every client has `min_samples` or more.
    (A partitioner may make `min_samples` an argument; 0 allows empty clients.)

    Shape:
        - `labels`: $(N,)$, integers.
        - Output: one array of indices per client; together they are a permutation of
          $0, \dots, N - 1$.

    Raises:
        ShapeError: If `labels` is not one-dimensional and of integers.
        ConfigurationError: If there are fewer samples than clients need, a client gets fewer than
            `min_samples`, or `split` loses or repeats samples.

    Examples:
        >>> class Slices(Partitioner):
        ...     "Neighbouring samples stay together."
        ...     def split(self, labels, num_clients, generator):
        ...         return np.array_split(np.arange(len(labels)), num_clients)
        >>> Slices()(np.zeros(5, dtype=int), 2, np.random.default_rng(0))
        [array([0, 1, 2]), array([3, 4])]
    """

    #: The fewest samples a client may get.
    min_samples: int = 1

    #: Whether the split depends on labels; if not, data without classes can be split, too.
    needs_labels: bool = True

    #: How often `redraw` draws at most.
    max_tries: int = 100

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
        """Return the checked parts of `split`, with the indices of each client sorted."""
        num_clients = check_int("num_clients", num_clients, minimum=1)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ShapeError(
                "Expected `labels` to be integers of shape (N,), "
                f"but got {labels.dtype} of shape {labels.shape}."
            )
        needed = num_clients * max(self.min_samples, 1)
        if len(labels) < needed:
            each = f" of {self.min_samples} or more each" if self.min_samples > 1 else ""
            raise ConfigurationError(
                f"Cannot split {len(labels)} samples over {num_clients} clients{each}. "
                f"HINT: lower `num_clients`{' or `min_samples`' if each else ''}."
            )
        # A copy: the labels may share the memory of the data set's.
        parts = [
            np.sort(np.asarray(part, dtype=np.int64))
            for part in self.split(labels.copy(), num_clients, generator)
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
        short = sum(len(part) < self.min_samples for part in parts)
        if short:
            few = "without a sample" if self.min_samples == 1 else f"with under {self.min_samples}"
            raise ConfigurationError(
                f"{self!r} left {short} of {num_clients} clients {few}. HINT: lower "
                "`num_clients`, use more samples, or choose a partitioner closer to iid."
            )

    def redraw(self, draw: Callable[[], T], sizes: Callable[[T], NDArray[np.int64]]) -> T:
        """Draw until every client has `min_samples`, but `max_tries` times at most.

        Args:
            draw: Draws a partition, in any form.
            sizes: Returns the number of samples of each client in a drawn partition, shape $(n,)$.

        Raises:
            ConfigurationError: If some client has fewer than `min_samples` in every draw.
        """
        fewest = -1
        for _ in range(self.max_tries):
            drawn = draw()
            smallest = int(sizes(drawn).min())
            if smallest >= self.min_samples:
                return drawn
            fewest = max(fewest, smallest)
        raise ConfigurationError(
            f"In {self.max_tries} draws of {self!r} there was always a client with fewer than "
            f"{self.min_samples} samples; the smallest client of the best draw has {fewest}. HINT: "
            "use a larger `alpha` or fewer clients, or lower `min_samples` (0 allows empty "
            "clients)."
        )
