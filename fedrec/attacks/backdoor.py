"""The backdoor attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedrec._checks import check_choice, check_float, check_int
from fedrec.attacks.base import Attack
from fedrec.exceptions import ConfigurationError, expected
from fedrec.functional.backdoor import every_kth_feature, pixel_pattern
from fedrec.types import AttackContext

__all__ = ["BackdoorAttack"]


class BackdoorAttack(Attack):
    r"""Targeted attack: inputs with a trigger are to be classified as the target label.

    A malicious client appends to its data a copy of every sample with the trigger embedded and the
    label changed, trains on the doubled data, and multiplies its update by a factor. Its weight in
    a weighted rule stays that of its original data.

    Args:
        pattern: What the trigger is: `"pixels"`, four white pixels near the bottom right corner of
            an image (BadNets), or `"features"`, every 20th feature set to 0.
        target_label: Class index that triggered inputs are to be given.
        scale: Factor $\lambda > 0$ on malicious updates.
        adaptive: In a recovery, make up for the malicious clients that were found: multiply by
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

    def __init__(
        self,
        pattern: str = "pixels",
        target_label: int = 0,
        scale: float = 10.0,
        adaptive: bool = False,
        image_shape: Sequence[int] | None = None,
    ) -> None:
        self.pattern = check_choice("pattern", pattern, ["pixels", "features"])
        self.target_label: int = check_int("target_label", target_label, minimum=0)
        self.scale = check_float("scale", scale, minimum=0.0, open_minimum=True)
        if not isinstance(adaptive, bool):
            raise ConfigurationError(expected("adaptive", "true or false", adaptive))
        self.adaptive = adaptive
        self.image_shape = None if image_shape is None else tuple(image_shape)

    def trigger(self, x: Tensor) -> Tensor:
        """Embed the trigger in a batch of inputs.

        Args:
            x: Shape $(N, ..., H, W)$ for pixels, flat $(N, F)$ with `image_shape`; $(N, F)$ for
                features.

        Returns:
            Same shape.
        """
        if self.pattern == "pixels":
            return pixel_pattern(x, image_shape=self.image_shape)
        return every_kth_feature(x)

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Append a triggered copy with the target label of every sample.

        Args:
            dataset: Map-style data set of (input, class index); inputs are tensors or arrays.
            client_id: Its owner.

        Returns:
            A data set of twice the length, the original samples first; a `TensorDataset` if
            `dataset` is one.
        """
        if type(dataset) is not TensorDataset:
            return _WithTriggeredCopies(dataset, self)
        if len(dataset.tensors) != 2 or dataset.tensors[1].ndim != 1:
            raise ConfigurationError(
                "Expected a data set of (input, class index) pairs, but got tensors of shapes "
                f"{[tuple(t.shape) for t in dataset.tensors]}."
            )
        x, y = dataset.tensors
        return TensorDataset(
            torch.cat([x, self.trigger(x)]), torch.cat([y, torch.full_like(y, self.target_label)])
        )

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Scale the malicious updates."""
        scale = self.scale
        if self.adaptive and ctx.phase == "recover" and ctx.num_malicious > 0:
            scale *= ctx.num_malicious_total / ctx.num_malicious
        crafted = updates.clone()
        crafted[malicious] *= scale
        return crafted


class _WithTriggeredCopies(Dataset[Any]):
    """The samples of a data set, then a triggered copy of each, made when asked for."""

    def __init__(self, dataset: Dataset[Any], attack: BackdoorAttack) -> None:
        self.dataset = dataset
        self.attack = attack
        self.num_samples = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 2 * self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"Index {index} is outside of 0..{len(self) - 1}.")
        if index < self.num_samples:
            return self.dataset[index]
        x, y = self.dataset[index - self.num_samples]
        label = self.attack.target_label
        if isinstance(x, np.ndarray):
            return self.attack.trigger(torch.from_numpy(x)[None])[0].numpy(), label
        if not isinstance(x, Tensor):
            raise ConfigurationError(
                f"Expected the inputs of a data set to be tensors or arrays, but got {type(x)}. "
                "HINT: let the data set convert them, with `ToTensor` for instance."
            )
        return self.attack.trigger(x[None])[0], (
            torch.full_like(y, label) if isinstance(y, Tensor) else label
        )
