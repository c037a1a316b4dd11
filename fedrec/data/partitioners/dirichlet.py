"""Partitions with label proportions that are drawn from a Dirichlet distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_bool, check_float, check_int
from fedrec.data.draw import draw_counts
from fedrec.data.partitioners.base import Partitioner

__all__ = ["Dirichlet"]


class Dirichlet(Partitioner):
    r"""Clients hold the labels in random proportions; the smaller `alpha`, the fewer labels each.

    Two procedures go by this name:

    - `balanced=False`: the samples of every label are distributed over the $n$ clients in
      proportions drawn from $\mathrm{Dir}_n(\alpha, \dots, \alpha)$, so clients differ in size, too
      (Yurochkin et al.). The proportions are drawn again until every client has `min_samples`, but
      `max_tries` times at most.
    - `balanced=True`: clients are of equal size (to one sample), and client $i$ draws its samples
      without replacement with label probabilities $q_i \sim \mathrm{Dir}(\alpha p)$, where $p$ are
      the frequencies of the labels (Hsu et al.). Once the samples of a label are used up, the other
      probabilities are scaled to sum to one; the last clients get the samples that are left. As $p$
      sums to one, the same `alpha` is more extreme here, by a factor of the number of labels.

    Args:
        alpha: Concentration, above 0. Large is close to iid.
        balanced: Whether clients are of equal size.
        min_samples: The fewest samples a client may get; 0 if empty clients are welcome.
        max_tries: Draws before giving up.

    Raises:
        ConfigurationError: If an argument is out of range, or, when splitting, there are not
            enough samples for every client, or no draw gave every client `min_samples`.

    References:
        - Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
          Classification, arXiv 1909.06335, 2019.
        - Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019.

    Examples:
        >>> labels = np.repeat([0, 1], 50)
        >>> parts = Dirichlet(alpha=0.01, balanced=True)(labels, 4, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [25, 25, 25, 25]
        >>> Dirichlet(alpha=0.01, min_samples=20)(labels, 4, np.random.default_rng(0))
        Traceback (most recent call last):
        ...
        fedrec.exceptions.ConfigurationError: In 100 draws of Dirichlet(alpha=0.01, ...
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        balanced: bool = False,
        min_samples: int = 1,
        max_tries: int = 100,
    ) -> None:
        self.alpha = check_float("alpha", alpha, minimum=0.0, open_minimum=True)
        self.balanced = check_bool("balanced", balanced)
        self.min_samples = check_int("min_samples", min_samples, minimum=0)
        self.max_tries = check_int("max_tries", max_tries, minimum=1)

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Draw each client's number of samples of each label, then the samples."""
        sizes = np.unique(labels, return_counts=True)[1]
        if self.balanced:
            counts = self._of_equal_size(sizes, num_clients, generator)
        else:
            counts = self.redraw(
                lambda: self._by_label(sizes, num_clients, generator), lambda c: c.sum(axis=1)
            )
        # Samples sorted by label, in random order within a label. Column l of `counts` says how
        # many samples of label l each client gets.
        order = generator.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        client = np.concatenate(
            [np.repeat(np.arange(num_clients), counts[:, label]) for label in range(len(sizes))]
        )
        ends = np.cumsum(counts.sum(axis=1))
        return np.split(order[np.argsort(client, kind="stable")], ends[:-1])

    def _by_label(
        self, sizes: NDArray[np.int64], num_clients: int, generator: np.random.Generator
    ) -> NDArray[np.int64]:
        shares = generator.dirichlet(np.full(num_clients, self.alpha), size=len(sizes))
        cuts = np.floor(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        cuts = np.minimum(cuts, sizes[:, None])  # shares may sum to a little more than one
        return np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).T

    def _of_equal_size(
        self, sizes: NDArray[np.int64], num_clients: int, generator: np.random.Generator
    ) -> NDArray[np.int64]:
        total = int(sizes.sum())
        left = sizes.copy()
        counts = np.zeros((num_clients, len(sizes)), dtype=np.int64)
        probabilities = generator.dirichlet(self.alpha * sizes / total, size=num_clients)
        for i in range(num_clients):
            num_samples = total // num_clients + (i < total % num_clients)
            counts[i] = draw_counts(num_samples, probabilities[i], left, generator)
            left -= counts[i]
        return counts
