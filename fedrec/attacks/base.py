"""The abstract attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedrec.aggregators.base import Aggregator
from fedrec.component import Component, goes_with
from fedrec.types import RoundContext

__all__ = ["Attack", "AttackContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackContext(RoundContext):
    """What a full-knowledge attacker knows on top of a `RoundContext`.

    Args:
        aggregator: The aggregation rule of the server.
        server_lr: Learning rate of the server step.
        last_aggregate: Aggregate of the round before, shape $(d,)$, or `None` in the first round.
        num_malicious: Malicious clients that take part in this phase.
        num_malicious_total: Malicious clients of the recording, the detected ones included.
        cohort_size: Clients asked in this round, those whose updates are not shown included.
        cohort_malicious: Malicious clients among them.
        columns: Which columns of the updates an attack `by_columns` is shown, if not all;
            vectors of shape $(d,)$ have all of them.
        streams: Generators of what clients draw for every column, by client, and how many numbers
            each has given. Contexts of the blocks of columns of a round share them.
    """

    aggregator: Aggregator | None = None
    server_lr: float = 1.0
    last_aggregate: Tensor | None = None
    num_malicious: int = 0
    num_malicious_total: int = 0
    cohort_size: int = 0
    cohort_malicious: int = 0
    columns: slice | None = None
    streams: dict[str, tuple[torch.Generator, int]] = field(default_factory=dict)


class Attack(Component):
    """What malicious clients do. Both hooks do nothing by default; override one or both.

    Args of `craft` come from the executor: what every client would have sent honestly.

    A targeted attack (backdoor) also has `trigger(x)` and `target_label`, which
    `AttackSuccessRate` uses.

    Examples:
        >>> import torch
        >>> class Opposite(Attack):
        ...     "Send the opposite."
        ...     def craft(self, updates, malicious, ctx):
        ...         return torch.where(malicious[:, None], -updates, updates)
        >>> Opposite().craft(torch.ones(2, 1), torch.tensor([True, False]), None)
        tensor([[-1.],
                [ 1.]])
    """

    #: Whether `craft` looks at the benign updates. If so the simulation computes them even where
    #: only a malicious client is asked (and never charges the benign clients for it).
    full_knowledge: bool = False

    #: Whether `craft` looks at what the other malicious clients of the cohort computed. If so that
    #: is computed even where only one of them is asked.
    colludes: bool = False

    #: Whether `craft` treats every column of the updates alike and alone, and remembers nothing.
    #: Several processes then craft some columns each (`AttackContext.columns`), and none is sent
    #: all updates. A subclass that changes `craft` and not this attribute is shown whole updates.
    by_columns: bool = False

    #: Label a backdoor aims at; `None` for an untargeted attack.
    target_label: int | None = None

    @property
    def poisons_data(self) -> bool:
        """Whether malicious clients train on other data."""
        return type(self).poison_dataset is not Attack.poison_dataset

    @property
    def crafts_updates(self) -> bool:
        """Whether malicious clients send something else than what they computed."""
        return type(self).craft is not Attack.craft

    @property
    def crafts_by_columns(self) -> bool:
        """Whether some columns of the updates are enough for `craft`."""
        return self.by_columns and goes_with(self, "by_columns", "craft") and not self.has_memory

    def reset(self, malicious: Sequence[str]) -> None:
        """Begin a recording or a recovery: forget everything. Does nothing by default.

        Args:
            malicious: All malicious clients of the federation, the detected ones included.
        """

    @property
    def has_memory(self) -> bool:
        """Whether what is sent depends on earlier rounds, by more than the last aggregate."""
        return bool(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers; empty for an attack without a memory."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` returned. Does nothing by default."""

    def is_active(self, round: int) -> bool:
        """Whether malicious clients attack in this round; they are honest otherwise.

        Args:
            round: Round $t$.
        """
        return True

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Return the data a malicious client trains on.

        Args:
            dataset: Its honest data; must not be changed.
            client_id: Its name.

        Returns:
            The same or another data set.
        """
        return dataset

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Return what is sent in place of the computed updates.

        Args:
            updates: Shape $(m, d)$, what every client computed; must not be changed.
            malicious: Shape $(m,)$, bool.
            ctx: The round, the aggregation rule and what else a full-knowledge attacker knows.

        Returns:
            Shape $(m, d)$; rows of benign clients unchanged.
        """
        return updates

    def trigger(self, x: Tensor) -> Tensor:
        """Embed the backdoor trigger in a batch of inputs (targeted attacks only).

        Args:
            x: Shape $(N, ...)$; must not be changed.

        Returns:
            Same shape.
        """
        return x
