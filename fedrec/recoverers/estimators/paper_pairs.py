"""The paper's literal reading of the L-BFGS pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedrec.functional.recovery.lbfgs import lbfgs_hvp
from fedrec.recoverers.estimators.base import Estimates
from fedrec.recoverers.threshold import largest_magnitudes

__all__ = ["PaperPairs"]


class PaperPairs:
    r"""One list of model differences $\Delta W$, one $\Delta G^i$ of update differences per client.

    Arguments and methods are those of `ClientPairs`.

    Args:
        num_clients: $c$.
        buffer_size: $s$.
        num_parameters: $d$.
        device: Where all is kept.
    """

    def __init__(
        self, num_clients: int, buffer_size: int, num_parameters: int, device: torch.device
    ) -> None:
        c, s, d = num_clients, buffer_size, num_parameters
        self.delta_w = torch.zeros(s, d, device=device)
        self.delta_g = torch.zeros(c, s, d, device=device)
        self.count_w = 0
        self.count_g = torch.zeros(c, dtype=torch.int64)
        self.skipped = 0

    def push(
        self,
        rows: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        round: int,
        alone: bool,
    ) -> None:
        """Add the newest differences; see `ClientPairs.push`."""
        # A round in which all were asked one by one is one in which all were asked.
        if not alone or len(rows) == len(self.delta_g):
            self.delta_w = torch.cat([self.delta_w[1:], delta_w[None]])
            self.count_w += 1
        at = rows.to(exact.device)
        newest = (exact - historical)[:, None]
        self.delta_g[at] = torch.cat([self.delta_g[at, 1:], newest], dim=1)
        self.count_g[rows] += 1

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> Estimates:
        """Estimate as `ClientPairs.estimate` does; a singular system gives NaN."""
        s = len(self.delta_w)
        filled = torch.minimum(self.count_g[rows], torch.tensor(self.count_w))
        valid = torch.arange(s)[None] >= s - filled[:, None]
        at = rows.to(updates.device)
        estimates = updates + lbfgs_hvp(self.delta_w, self.delta_g[at], v, valid)
        return Estimates(estimates, largest_magnitudes(estimates), filled > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device) if isinstance(value, Tensor) else value)
