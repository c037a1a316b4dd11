"""Partitions into clients of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_choice, check_float, check_int
from fedrec.data.partitioners.base import Partitioner

__all__ = ["QuantitySkew"]


class QuantitySkew(Partitioner):
    r"""Clients differ in their number of samples, not in their labels.

    With `law="dirichlet"`, the shares of the $n$ clients are drawn from
    $\mathrm{Dir}_n(\alpha, \dots, \alpha)$: with a small `alpha`, few clients hold most samples.
    With `law="power"`, they are proportional to $r^{-\alpha}$ for random ranks $r = 1, \dots, n$ of
    the clients: with a large `alpha`, few clients hold most samples. Sizes are the shares of all
    samples, rounded so that they add up; the samples are shuffled.

    Args:
        law: `"dirichlet"` or `"power"`.
        alpha: Concentration of the Dirichlet distribution, or exponent of the power law; above 0.
        min_samples: The fewest samples a client may get; 0 if empty clients are welcome.
        max_tries: Draws of Dirichlet shares before giving up.

    Raises:
        ConfigurationError: If an argument is out of range, or, when splitting, a client would
            get fewer than `min_samples` samples.

    References:
        - Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022
          (Dirichlet shares).
        - Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (power law).

    Examples:
        >>> labels = np.zeros(110, dtype=int)
        >>> parts = QuantitySkew(law="power", alpha=1.0)(labels, 3, np.random.default_rng(0))
        >>> sorted(len(part) for part in parts)
        [20, 30, 60]
    """

    needs_labels = False

    def __init__(
        self,
        *,
        law: str = "dirichlet",
        alpha: float = 0.5,
        min_samples: int = 1,
        max_tries: int = 100,
    ) -> None:
        self.law = check_choice("law", law, ("dirichlet", "power"))
        self.alpha = check_float("alpha", alpha, minimum=0.0, open_minimum=True)
        self.min_samples = check_int("min_samples", min_samples, minimum=0)
        self.max_tries = check_int("max_tries", max_tries, minimum=1)

    def split(
        self, labels: NDArray[np.integer[Any]], num_clients: int, generator: np.random.Generator
    ) -> Sequence[NDArray[np.integer[Any]]]:
        """Draw the sizes, then shuffle and cut."""
        if self.law == "power":
            ranks = np.arange(1, num_clients + 1, dtype=np.float64)
            weights = np.exp(-self.alpha * np.log(ranks))
            sizes = generator.permutation(_rounded(weights / weights.sum(), len(labels)))
        else:
            alpha = np.full(num_clients, self.alpha)
            sizes = self.redraw(
                lambda: _rounded(generator.dirichlet(alpha), len(labels)), lambda drawn: drawn
            )
        return np.split(generator.permutation(len(labels)), np.cumsum(sizes)[:-1])


def _rounded(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Round shares of a total to integers that add up to it, by largest remainder."""
    sizes = np.floor(shares * total).astype(np.int64)
    remainders = sizes - shares * total
    # The shares have rounding errors, so the sum may still be off by one: the largest takes it.
    for i in np.argsort(remainders, kind="stable")[: max(total - int(sizes.sum()), 0)]:
        sizes[i] += 1
    sizes[np.argmax(sizes)] += total - int(sizes.sum())
    return sizes
