"""An attack in some rounds only."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_int
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.wrapper import AttackWrapper
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["Scheduled"]


class Scheduled(AttackWrapper):
    """Any attack, in some rounds only; in the others malicious clients are honest.

    The rounds are `start`, `start + every`, `start + 2 * every` and so on, before `stop`. In the
    other rounds malicious clients train on honest data and send what they computed. In a recovery,
    the schedule holds for the malicious clients that were not detected.

    Args:
        attack: What they do in these rounds.
        start: First round, 0-based.
        stop: The round before which it ends; `None` for no end.
        every: Rounds from one attack to the next, at least 1.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> from fedrec.attacks import SignFlip
        >>> attack = Scheduled(SignFlip(), start=2, every=3)
        >>> [t for t in range(10) if attack.is_active(t)]
        [2, 5, 8]
    """

    by_columns = True

    def __init__(
        self, attack: Attack, *, start: int = 0, stop: int | None = None, every: int = 1
    ) -> None:
        super().__init__(attack)
        self.start: int = check_int("start", start, minimum=0)
        if stop is not None:
            stop = check_int("stop", stop)
        if stop is not None and stop <= start:
            raise ConfigurationError(expected("stop", f"a round after `start`={start}", stop))
        self.stop = stop
        self.every: int = check_int("every", every, minimum=1)

    def is_active(self, round: int) -> bool:
        """Whether the schedule has this round, and the wrapped attack is active in it."""
        within = self.start <= round and (self.stop is None or round < self.stop)
        return within and (round - self.start) % self.every == 0 and self.attack.is_active(round)

    @property
    def crafts_updates(self) -> bool:
        """Whether the wrapped attack crafts updates."""
        return self.attack.crafts_updates

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Craft as the wrapped attack does, in the rounds of the schedule."""
        return self.attack.craft(updates, malicious, ctx) if self.is_active(ctx.round) else updates
