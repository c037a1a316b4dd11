"""The backdoor attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedrec._checks import check_bool, check_choice, check_float, check_int
from fedrec.attacks._datasets import WithTriggeredCopies, pairs_of
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.triggers import FeatureTrigger, PixelTrigger, Trigger, checked_shape

__all__ = ["BackdoorAttack"]


class BackdoorAttack(Attack):
    r"""Targeted attack: inputs with a trigger are to be classified as the target label.

    A malicious client appends to its data a copy of every sample with the trigger embedded and the
    label changed, trains on the doubled data, and multiplies its update by a factor. Its weight in
    a weighted rule stays that of its original data.

    Args:
        pattern: What the trigger is: `"pixels"`, four white pixels near the bottom right corner of
            an image (BadNets), `"features"`, every 20th feature set to 0, or any `Trigger`.
        target_label: Class index that triggered inputs are to be given.
        scale: Factor $\lambda > 0$ on malicious updates.
        adaptive: In a recovery, make up for the malicious clients that were detected: multiply by
            $\lambda\, m / m'$ with $m$ malicious clients in the recording and $m'$ that remain.
        image_shape: Shape of one image, for `"pixels"` in images that come flat.

    Raises:
        ConfigurationError: If an argument is out of range, or the data to poison is not made of
            (input, class index) pairs.
        ShapeError: If the trigger does not fit the inputs.

    References:
        - Gu et al., BadNets, 2017.
        - Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.
        - Cao et al., FedRecover, IEEE S&P 2023 (adaptive scaling).

    Examples:
        >>> data = TensorDataset(torch.zeros(3, 1, 8, 8), torch.tensor([5, 6, 7]))
        >>> poisoned = BackdoorAttack(target_label=0).poison_dataset(data, "client-0")
        >>> poisoned[:][1]
        tensor([5, 6, 7, 0, 0, 0])
    """

    target_label: int

    def __init__(
        self,
        *,
        pattern: str | Trigger = "pixels",
        target_label: int = 0,
        scale: float = 10.0,
        adaptive: bool = False,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(pattern, Trigger):
            check_choice("pattern", pattern, ["pixels", "features"])
        self.pattern = pattern
        self.target_label = check_int("target_label", target_label, minimum=0)
        self.scale = check_float("scale", scale, minimum=0.0, open_minimum=True)
        self.adaptive = check_bool("adaptive", adaptive)
        self.image_shape = checked_shape(image_shape)

    def trigger(self, x: Tensor) -> Tensor:
        """Embed the trigger in a batch of inputs.

        Args:
            x: Shape $(N, ..., H, W)$ for pixels, flat $(N, F)$ with `image_shape`; $(N, F)$ for
                features.

        Returns:
            Same shape.
        """
        if isinstance(self.pattern, Trigger):
            return self.pattern(x)
        if self.pattern == "pixels":
            return PixelTrigger(image_shape=self.image_shape)(x)
        return FeatureTrigger()(x)

    def local_trigger(self, client_id: str) -> Callable[[Tensor], Tensor]:
        """Return what embeds the trigger in one client's data: the whole trigger.

        Args:
            client_id: The client.
        """
        return self.trigger

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Append a triggered copy with the target label of every sample.

        Args:
            dataset: Map-style data set of (input, class index); inputs are tensors or arrays.
            client_id: Its owner.

        Returns:
            A data set of twice the length, the original samples first; a `TensorDataset` if
            `dataset` is one.
        """
        trigger = self.local_trigger(client_id)
        if type(dataset) is not TensorDataset:
            return WithTriggeredCopies(dataset, trigger, self.target_label)
        x, y = pairs_of(dataset)
        return TensorDataset(
            torch.cat([x, trigger(x)]), torch.cat([y, torch.full_like(y, self.target_label)])
        )

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Scale the malicious updates."""
        scale = self.scale
        if self.adaptive and ctx.phase == "recover" and ctx.num_malicious > 0:
            scale *= ctx.num_malicious_total / ctx.num_malicious
        crafted = updates.clone()
        crafted[malicious] *= scale
        return crafted
