"""Drawing the samples of a small data set, such as the server's clean data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["draw_counts", "draw_samples"]


def draw_samples(
    labels: NDArray[np.integer[Any]],
    num_samples: int,
    beta: float | None,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    r"""Draw samples without replacement: uniformly, or with a label distribution that is drawn.

    With `beta`, the probabilities of the $L$ labels are drawn from
    $\mathrm{Dir}(\beta, \dots, \beta)$, and the label of every sample from these probabilities. A
    large `beta` gives about equal numbers of each label, a small `beta` mostly a single label. Once
    the samples of a label are used up, the other probabilities are scaled to sum to one.

    Args:
        labels: Shape $(N,)$, the label of every sample.
        num_samples: Number of samples to draw, at most $N$.
        beta: Concentration of the Dirichlet distribution, above 0; `None` draws uniformly from all
            samples.
        generator: The only source of random numbers.

    Returns:
        Indices of the samples, in random order, shape (num_samples,).

    Raises:
        ConfigurationError: If there are not enough samples.

    Examples:
        >>> labels = np.repeat([0, 1], 50)
        >>> chosen = draw_samples(labels, 40, 0.01, np.random.default_rng(1))
        >>> np.bincount(labels[chosen], minlength=2)
        array([ 0, 40])
    """
    if num_samples > len(labels):
        raise ConfigurationError(
            expected("num_samples", f"at most the {len(labels)} samples there are", num_samples)
        )
    if beta is None:
        return generator.permutation(len(labels))[:num_samples]
    classes, sizes = np.unique(labels, return_counts=True)
    probabilities = generator.dirichlet(np.full(len(classes), beta))
    counts = draw_counts(num_samples, probabilities, sizes, generator)
    order = generator.permutation(len(labels))
    chosen = [order[labels[order] == c][:k] for c, k in zip(classes, counts, strict=True)]
    return generator.permutation(np.concatenate(chosen))


def draw_counts(
    num_samples: int,
    probabilities: NDArray[np.float64],
    sizes: NDArray[np.int64],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Return how many samples of each label are drawn, without replacement.

    Once the samples of a label are used up, the other probabilities are scaled to sum to one.

    Args:
        num_samples: Number of samples to draw, at most the sum of `sizes`.
        probabilities: Probability of each label, shape $(L,)$.
        sizes: Number of samples of each label that can be drawn, shape $(L,)$.
        generator: The only source of random numbers.
    """
    counts = np.zeros(len(sizes), dtype=np.int64)
    # Every turn draws all missing samples, or uses up a label.
    while (missing := num_samples - int(counts.sum())) > 0:
        left = sizes - counts
        q = np.where(left > 0, probabilities, 0.0)
        q = q / q.sum() if q.sum() > 0 else left / left.sum()
        counts += np.minimum(generator.multinomial(missing, q), left)
    return counts
