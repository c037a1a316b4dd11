"""What attacks that change another attack share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from fedrec.attacks.base import Attack, AttackContext
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["AttackWrapper"]


class AttackWrapper(Attack, ABC):
    """An attack around another attack, with the data, trigger and knowledge of that attack.

    Subclass it and write `craft`, which most often begins with `self.attack.craft(...)`. Say
    `by_columns = True` if what it does besides treats every column alike and alone.

    Args:
        attack: The wrapped attack.

    Raises:
        ConfigurationError: If `attack` is no attack.

    Examples:
        >>> class Halved(AttackWrapper):
        ...     "Malicious clients send half of what they would."
        ...     def craft(self, updates, malicious, ctx):
        ...         crafted = self.attack.craft(updates, malicious, ctx)
        ...         return torch.where(malicious[:, None], crafted / 2, crafted)
        >>> import torch
        >>> from fedrec.attacks import SignFlip
        >>> Halved(SignFlip()).craft(torch.ones(2, 1), torch.tensor([True, False]), None)
        tensor([[-0.5000],
                [ 1.0000]])
    """

    def __init__(self, attack: Attack) -> None:
        if not isinstance(attack, Attack):
            raise ConfigurationError(expected("attack", "an attack", attack))
        self.attack = attack
        self.full_knowledge = attack.full_knowledge
        self.colludes = attack.colludes
        self.target_label = attack.target_label

    @property
    def poisons_data(self) -> bool:
        """Whether the wrapped attack poisons data."""
        return self.attack.poisons_data

    @property
    def crafts_by_columns(self) -> bool:
        """Whether some columns are enough for this attack and for the wrapped one."""
        return super().crafts_by_columns and self.attack.crafts_by_columns

    def reset(self, malicious: Sequence[str]) -> None:
        """Reset the wrapped attack."""
        self.attack.reset(malicious)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped attack remembers."""
        return self.attack.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the wrapped attack's memory."""
        self.attack.load_state_dict(state)

    def is_active(self, round: int) -> bool:
        """Whether the wrapped attack is active in this round."""
        return self.attack.is_active(round)

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Return the data as the wrapped attack poisons them."""
        return self.attack.poison_dataset(dataset, client_id)

    def trigger(self, x: Tensor) -> Tensor:
        """Embed the trigger of the wrapped attack."""
        return self.attack.trigger(x)

    @abstractmethod
    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Return what is sent."""
