"""Poisoned data sets of (input, class index) pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedrec.exceptions import ConfigurationError

__all__ = ["Relabelled", "WithTriggeredCopies", "pairs_of"]


def pairs_of(dataset: TensorDataset) -> tuple[Tensor, Tensor]:
    """Return inputs and class indices, shape $(N, ...)$ and $(N,)$.

    Raises:
        ConfigurationError: If the data set holds anything else.
    """
    if len(dataset.tensors) != 2 or dataset.tensors[1].ndim != 1:
        raise ConfigurationError(
            "Expected a data set of (input, class index) pairs, but got tensors of shapes "
            f"{[tuple(t.shape) for t in dataset.tensors]}."
        )
    return dataset.tensors[0], dataset.tensors[1]


class _Wrapped(Dataset[Any]):
    """A data set that makes its samples out of another's, when asked for."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self.num_samples = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.num_samples

    def _require(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"Index {index} is outside of 0..{len(self) - 1}.")


class Relabelled(_Wrapped):
    """The samples of a data set with other labels.

    Args:
        dataset: Pairs of input and class index.
        relabel: Gives new labels for old ones, shape $(N,)$.
    """

    def __init__(self, dataset: Dataset[Any], relabel: Callable[[Tensor], Tensor]) -> None:
        super().__init__(dataset)
        self.relabel = relabel

    def __getitem__(self, index: int) -> Any:
        self._require(index)
        x, y = self.dataset[index]
        label = self.relabel(torch.as_tensor(y).reshape(1))[0]
        return x, (label if isinstance(y, Tensor) else int(label))


class WithTriggeredCopies(_Wrapped):
    """The samples of a data set, then a triggered copy of each.

    Args:
        dataset: Pairs of input and class index.
        trigger: Embeds the trigger in a batch of inputs.
        label: What the copies are labelled as.
    """

    def __init__(
        self, dataset: Dataset[Any], trigger: Callable[[Tensor], Tensor], label: int
    ) -> None:
        super().__init__(dataset)
        self.trigger = trigger
        self.label = label

    def __len__(self) -> int:
        return 2 * self.num_samples

    def __getitem__(self, index: int) -> Any:
        self._require(index)
        if index < self.num_samples:
            return self.dataset[index]
        x, y = self.dataset[index - self.num_samples]
        if isinstance(x, np.ndarray):
            return self.trigger(torch.from_numpy(x)[None])[0].numpy(), self.label
        if not isinstance(x, Tensor):
            raise ConfigurationError(
                f"Expected the inputs of a data set to be tensors or arrays, but got {type(x)}. "
                "HINT: let the data set convert them, with `ToTensor` for instance."
            )
        return self.trigger(x[None])[0], (
            torch.full_like(y, self.label) if isinstance(y, Tensor) else self.label
        )
