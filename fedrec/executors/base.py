"""The abstract executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedrec.clients.base import Client
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["Executor"]


class Executor(ABC):
    """Computes the updates of a round's clients.

    Attributes:
        departure: Why it left its plan: `round`, from which on it computes otherwise, `reason`, and
            where updates differed the `client` and by how much (`difference`). `None` while it
            keeps to the plan. A run that goes on takes it over.
        live: Whether clients are elsewhere, so that asking them takes their time. A recovery then
            stores a checkpoint after each round in which it has asked, and Ctrl-C does not wait
            for a round to end.
    """

    departure: Mapping[str, Any] | None = None
    live: ClassVar[bool] = False

    @abstractmethod
    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Compute what each client would send, honestly, from the same global weights.

        Args:
            clients: The $m$ clients to ask, in row order.
            global_weights: Shape $(d,)$; not changed.
            ctx: The round.

        Returns:
            One row per client, in the order of `clients`. What is mis-shaped or non-finite is
            found by the caller.
        """

    def plan(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> dict[str, Any]:
        """Choose the path for these clients by a static rule, and describe it.

        The loop stores the description with the recording and refuses to resume under another one,
        since only the same path gives the same bits.

        Args:
            clients: All clients of the federation.
            global_weights: Shape $(d,)$.
            ctx: A round to try things on.
        """
        return {"executor": type(self).__name__}
