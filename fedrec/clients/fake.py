"""A client without data."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.clients.base import Client
from fedrec.types import ClientUpdate, RoundContext

__all__ = ["FakeClient"]


class FakeClient(Client):
    """A client that an attacker injects: it has no data and computes nothing.

    The attack crafts what it sends. Under an attack that only poisons data, it sends zeros.

    Args:
        client_id: Unique name.
        num_samples: How many samples it claims to have: its weight in weighted rules.

    Raises:
        ConfigurationError: If `num_samples` is below 1.

    References:
        - Cao and Gong, MPAF: Model Poisoning Attacks to Federated Learning based on Fake Clients,
          CVPR Workshops 2022.

    Examples:
        >>> FakeClient("fake-0", num_samples=600).local_update(torch.ones(3), ctx=None).update
        tensor([0., 0., 0.])
    """

    def local_update(self, global_weights: Tensor, ctx: RoundContext | None) -> ClientUpdate:
        """Return zeros."""
        return ClientUpdate(
            update=torch.zeros_like(global_weights),
            num_samples=self.num_samples,
            buffers=None if ctx is None else ctx.buffers,
        )

    def num_local_steps(self, ctx: RoundContext) -> int:
        """Return 0: a fake client does not train."""
        return 0
