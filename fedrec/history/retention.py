"""Which client updates a history keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedrec._checks import check_float, check_int, is_fraction
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["Retention"]

_NAMES = ("every", "last", "clients")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which client updates a history keeps. Global weights and aggregates are kept of every round.

    An update is kept if all conditions hold; without any, every update is.

    Args:
        every: Keep the updates of the rounds that this number divides: 0, `every`, 2 `every`, ...
        last: Keep the updates of the last so many rounds; older ones are deleted as rounds are
            written.
        clients: Keep the updates of so many clients, or of this fraction of them (0 to 1, at
            least one client). Who they are is drawn once, from the seed of the recording.

    Raises:
        ConfigurationError: If a number is out of its range.

    Examples:
        >>> keep = Retention(every=10, last=25)
        >>> [t for t in range(40) if keep.stores(t) and not keep.expired(t, num_rounds=40)]
        [20, 30]
        >>> keep.spec()
        {'every': 10, 'last': 25}
    """

    every: int = 1
    last: int | None = None
    clients: int | float | None = None

    def __post_init__(self) -> None:
        last, clients = self.last, self.clients
        if last is not None:
            last = check_int("keep.last", last, minimum=1)
        if is_fraction(clients):
            clients = check_float("keep.clients", clients, minimum=0, maximum=1, open_minimum=True)
        elif clients is not None:
            clients = check_int("keep.clients", clients, minimum=1)
        object.__setattr__(self, "every", check_int("keep.every", self.every, minimum=1))
        object.__setattr__(self, "last", last)
        object.__setattr__(self, "clients", clients)

    @classmethod
    def of(cls, keep: Mapping[str, Any] | None) -> Retention:
        """Return the policy that a mapping of these arguments stands for.

        Raises:
            ConfigurationError: If it is not such a mapping.
        """
        if keep is None:
            return cls()
        if not isinstance(keep, Mapping):
            hint = "`keep={'last': 100}` keeps the updates of the last 100 rounds."
            raise ConfigurationError(expected("keep", "a mapping", keep, known=_NAMES, hint=hint))
        for name in keep:
            if name not in _NAMES:
                raise ConfigurationError(expected("keep", "a policy", name, known=_NAMES))
        return cls(**keep)

    def spec(self) -> dict[str, int | float]:
        """Return the conditions as a mapping, as the manifest has it; empty if all is kept."""
        conditions = {"every": self.every, "last": self.last, "clients": self.clients}
        return {k: v for k, v in conditions.items() if v is not None and (k, v) != ("every", 1)}

    def stores(self, t: int) -> bool:
        """Return whether updates of round `t` are stored when it is written."""
        return t % self.every == 0

    def expired(self, t: int, num_rounds: int) -> bool:
        """Return whether updates of round `t` are deleted by the time there are so many rounds."""
        return self.last is not None and t < num_rounds - self.last

    def sample(self, client_ids: Sequence[str], seed: int) -> frozenset[str]:
        """Return the clients whose updates are kept.

        Args:
            client_ids: All clients.
            seed: Seed of the recording.

        Raises:
            ConfigurationError: If there are fewer than are to be kept.
        """
        if self.clients is None:
            return frozenset(client_ids)
        count = self.count(len(client_ids))
        if count > len(client_ids):
            raise ConfigurationError(
                expected("keep.clients", f"at most the {len(client_ids)} clients", self.clients)
            )

        def rank(client_id: str) -> bytes:
            # As `fedrec.random.key` has it, which needs torch.
            return hashlib.blake2b(f"{seed}\x1fretention\x1f0\x1f{client_id}".encode()).digest()

        return frozenset(sorted(client_ids, key=rank)[:count])

    def count(self, num_clients: int) -> int:
        """Return the number of clients whose updates are kept."""
        if self.clients is None:
            return num_clients
        if isinstance(self.clients, float):
            return max(1, int(self.clients * num_clients + 0.5))
        return self.clients

    def most_rounds(self, max_rounds: int) -> int:
        """Return the most rounds whose updates take room at the same time."""
        # Pages of deleted updates are free for the round after the next.
        rounds = max_rounds if self.last is None else min(max_rounds, self.last + 2)
        return -(-rounds // self.every)

    def __str__(self) -> str:
        parts = []
        if self.every > 1:
            parts.append(f"one round in {self.every}")
        if self.last is not None:
            parts.append("the last round" if self.last == 1 else f"the last {self.last} rounds")
        if self.clients is not None:
            fraction = isinstance(self.clients, float)
            parts.append(f"{f'{self.clients:.3g} of' if fraction else self.clients} the clients")
        return ", ".join(parts) or "all"
