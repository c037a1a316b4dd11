"""Refusing exact updates that contradict their estimates."""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.component import Component
from fedrec.exceptions import ConfigurationError, expected
from fedrec.functional.consistency import row_cosines
from fedrec.functional.recovery.relative_errors import relative_errors
from fedrec.types import CohortUpdates

__all__ = ["UpdateFilter"]


class UpdateFilter(Component):
    r"""Refuses exact updates that contradict their estimates from the history.

    An update $g$ with estimate $\hat g$ passes if
    $\lVert g - \hat g \rVert \le \rho \lVert \hat g \rVert$ and
    $\cos(g, \hat g) \ge \gamma$. Mini-batches make benign updates differ from their estimates, by
    about their own length if the noise is as large as the signal. The bounds must leave room for
    this difference.

    Args:
        max_distance: $\rho > 0$; `None` for any distance.
        min_cosine: $\gamma$ in [-1, 1]; `None` for any direction.

    Raises:
        ConfigurationError: If an argument is out of range, or both are `None`.

    References:
        - Wang et al., Poisoning Attacks and Defenses to Federated Unlearning, WWW Companion 2025,
          whose UnlearnGuard checks updates by distance and by direction.

    Examples:
        >>> estimates = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
        >>> received = torch.tensor([[1.0, 0.0], [9.0, 9.0], [-0.1, -0.1]])
        >>> UpdateFilter(max_distance=2.0, min_cosine=0.0).accepts(received, estimates)
        tensor([ True, False, False])
    """

    def __init__(self, *, max_distance: float | None = 2.0, min_cosine: float | None = 0.0) -> None:
        if max_distance is not None:
            max_distance = check_float("max_distance", max_distance, minimum=0, open_minimum=True)
        if min_cosine is not None:
            min_cosine = check_float("min_cosine", min_cosine, minimum=-1, maximum=1)
        if max_distance is None and min_cosine is None:
            hint = "with neither bound nothing is filtered."
            raise ConfigurationError(expected("min_cosine", "a number", None, hint=hint))
        self.max_distance = max_distance
        self.min_cosine = min_cosine

    def accepts(self, received: Tensor, estimates: Tensor) -> Tensor:
        """Return whether each update passes.

        Args:
            received: Exact updates $g$, shape $(m, d)$.
            estimates: Their estimates, shape $(m, d)$.

        Returns:
            Shape $(m,)$, bool, on the CPU.
        """
        accepted = torch.ones(len(received), dtype=torch.bool)
        if self.max_distance is not None:
            accepted &= relative_errors(received, estimates).cpu() <= self.max_distance
        if self.min_cosine is not None:
            accepted &= row_cosines(received, estimates).cpu() >= self.min_cosine
        return accepted

    def apply(
        self, sent: CohortUpdates, references: CohortUpdates
    ) -> tuple[CohortUpdates, CohortUpdates]:
        """Replace updates that do not pass by their references.

        Args:
            sent: What clients sent.
            references: The estimates, or historical updates, of some of these clients; of all
                others the update passes.

        Returns:
            All clients with the updates to use; and only the clients whose own update is used.
        """
        compared = sent.select(references.client_ids)
        passes = compared.measured(lambda a, b: self.accepts(a.updates, b.updates), references)
        refused = set(compress(references.client_ids, (~passes).tolist()))
        if not refused:
            return sent, sent
        trusted = sent.select([c for c in sent.client_ids if c not in refused])
        replaced = references.select([c for c in references.client_ids if c in refused])
        return trusted.joined(replaced, client_ids=sent.client_ids), trusted
