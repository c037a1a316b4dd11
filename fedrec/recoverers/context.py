"""What a recoverer works with in one round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedrec.types import CohortUpdates, RoundContext, RoundRecord

__all__ = ["RecoveryContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecoveryContext(RoundContext):
    """What a recoverer works with: history, the metered door to clients, and the server step.

    Args:
        history: `history(t, client_ids=None)` reads a round of the recording; by default the
            clients that take part in this round of the recovery and whose updates the history
            kept. The tensors must not be changed: another call may return the same ones.
        exact: `exact(client_ids, reason, work=None)` asks clients for their exact updates and
            meters every call. Reasons: see `fedrec.metrics.REASONS`.
        train_at_server: `train_at_server(global_weights, work=None, dataset=None)` lets the server
            train on its clean data, or this part of it, as a client would, and returns its update,
            shape $(d,)$. It costs clients nothing.
        server_loss: `server_loss(global_weights)` returns the mean loss of these weights on the
            server's clean data.
        compare: `compare(client_ids, estimates)` notes how far these clients' estimated updates,
            shape $(m', d)$, are from the exact ones, which are computed for this alone: in
            simulation, at no cost, unseen by the recoverer. See `RunResult.estimate_errors`.
        local_steps: `local_steps(client_ids)` returns how many steps each of these clients takes in
            its own local training, a list of numbers.
        server_step: `server_step(updates, client_ids=None, global_weights=None)` aggregates one
            row per client of this round and returns the next global weights, shape $(d,)$.
        coefficients: `coefficients(client_ids)` returns what the aggregation rule multiplies these
            clients' rows with, shape $(m',)$, or `None` for a rule that is no such sum.
        apply: `apply(aggregate)` does the server step with an aggregate that is already there.
        max_rounds: Number of rounds $T$ of this recovery.
        excluded: Clients that are left out.
        server_lr: Learning rate of the server step.
    """

    history: Callable[..., RoundRecord]
    exact: Callable[..., CohortUpdates]
    train_at_server: Callable[..., Tensor]
    server_loss: Callable[[Tensor], float]
    compare: Callable[[Sequence[str], Tensor], None]
    local_steps: Callable[[Sequence[str]], list[int]]
    server_step: Callable[..., Tensor]
    coefficients: Callable[[Sequence[str]], Tensor | None]
    apply: Callable[[Tensor], Tensor]
    max_rounds: int
    excluded: tuple[str, ...] = ()
    server_lr: float = 1.0
