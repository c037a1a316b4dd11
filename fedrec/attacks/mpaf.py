"""Model poisoning by fake clients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks.base import Attack, AttackContext
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

__all__ = ["MPAF"]


class MPAF(Attack):
    r"""Untargeted attack: drag the global model towards a useless base model.

    In every round all malicious clients send the scaled difference between the global weights $w_t$
    and the base model $w'$, so that the server steps towards $w'$:

    $$\tilde g = \lambda\, (w_t - w')$$

    It takes neither data nor knowledge of other clients, so it is for fake clients that the
    attacker injects (`Federation.from_data(..., fake_clients=...)`), though any malicious client
    can do it.

    The base model is initialised at random, and the same in every round: weights uniform in
    $\pm 1 / \sqrt{\text{fan-in}}$, parameters of one dimension zero. Override `base_weights` for
    another.

    Args:
        scale: $\lambda > 0$.

    Raises:
        ConfigurationError: If `scale` is not positive.

    References:
        - Cao and Gong, MPAF: Model Poisoning Attacks to Federated Learning based on Fake Clients,
          CVPR Workshops 2022.

    Examples:
        >>> MPAF(scale=10.0)
        MPAF(scale=10.0)
    """

    def __init__(self, *, scale: float = 1e6) -> None:
        self.scale = check_float("scale", scale, minimum=0.0, open_minimum=True)

    def base_weights(self, layout: ParameterVector, seed: int) -> Tensor:
        """Return the base model.

        Args:
            layout: Names and shapes of the parameters.
            seed: Seed of the recording.

        Returns:
            Shape $(d,)$, on the CPU.
        """
        generator = torch_generator(seed, "base model")
        parts = []
        for shape in layout.shapes:
            bound = 1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.0
            parts.append(torch.empty(math.prod(shape)).uniform_(-bound, bound, generator=generator))
        return torch.cat(parts)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the scaled difference to the base model."""
        base = self.base_weights(ctx.layout, ctx.seed).to(updates)
        return torch.where(malicious[:, None], self.scale * (ctx.global_weights - base), updates)
