"""The distributed backdoor attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from fedrec._checks import check_int
from fedrec.attacks.backdoor import BackdoorAttack
from fedrec.attacks.triggers import Trigger
from fedrec.functional.attack.backdoor import part_of_trigger

__all__ = ["DBA"]


class DBA(BackdoorAttack):
    r"""Distributed backdoor attack: every malicious client embeds one part of the trigger.

    The places that the trigger changes are cut into parts (see
    `fedrec.functional.part_of_trigger`), which the malicious clients of the federation get
    in turn. Attack success is measured with the whole trigger. Everything else is as in
    `BackdoorAttack`.

    Args:
        num_parts: Number of parts, at least 1.
        pattern: The whole trigger, as in `BackdoorAttack`.
        target_label: As in `BackdoorAttack`.
        scale: As in `BackdoorAttack`.
        adaptive: As in `BackdoorAttack`.
        image_shape: As in `BackdoorAttack`.

    Raises:
        ConfigurationError: If an argument is out of range.
        ShapeError: If the trigger does not fit the inputs, or changes fewer places than there are
            parts.

    References:
        - Xie et al., DBA: Distributed Backdoor Attacks against Federated Learning, ICLR 2020.

    Examples:
        >>> import torch
        >>> from fedrec.attacks import FeatureTrigger
        >>> attack = DBA(num_parts=2, pattern=FeatureTrigger(k=1), scale=1.0)
        >>> attack.reset(malicious=["a", "b"])
        >>> attack.local_trigger("a")(torch.ones(1, 4)), attack.local_trigger("b")(torch.ones(1, 4))
        (tensor([[0., 0., 1., 1.]]), tensor([[1., 1., 0., 0.]]))
    """

    def __init__(
        self,
        *,
        num_parts: int = 4,
        pattern: str | Trigger = "pixels",
        target_label: int = 0,
        scale: float = 10.0,
        adaptive: bool = False,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            pattern=pattern,
            target_label=target_label,
            scale=scale,
            adaptive=adaptive,
            image_shape=image_shape,
        )
        self.num_parts = check_int("num_parts", num_parts, minimum=1)
        self._turns: dict[str, int] = {}

    def reset(self, malicious: Sequence[str]) -> None:
        """Give the parts out in turn."""
        self._turns = {client_id: turn for turn, client_id in enumerate(malicious)}

    def local_trigger(self, client_id: str) -> Callable[[Tensor], Tensor]:
        """Return what embeds the client's part of the trigger."""
        turn = self._turns.setdefault(client_id, len(self._turns))
        part = turn % self.num_parts
        return partial(part_of_trigger, self.trigger, part=part, num_parts=self.num_parts)
