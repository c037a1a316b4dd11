"""Poisoned data sets of (input, class index) pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedrec.exceptions import ConfigurationError

__all__ = ["Relabelled", "WithExtraSamples", "WithTriggeredCopies", "pairs_of"]


def pairs_of(dataset: TensorDataset) -> tuple[Tensor, Tensor]:
    """Return inputs and class indices, shape $(N, ...)$ and $(N,)$ or $(N, 1)$.

    Raises:
        ConfigurationError: If the data set holds anything else.
    """
    if len(dataset.tensors) != 2 or dataset.tensors[1].numel() != len(dataset):
        raise ConfigurationError(
            "Expected a data set of (input, class index) pairs, but got tensors of shapes "
            f"{[tuple(t.shape) for t in dataset.tensors]}."
        )
    _require_labels(dataset.tensors[1])
    return dataset.tensors[0], dataset.tensors[1]


def _require_labels(values: Tensor) -> None:
    """Raise unless these are class labels, though they may be floating-point."""
    if not values.is_floating_point():
        return
    odd = values[values != values.round()]
    if odd.numel():
        raise ConfigurationError(
            "Expected a data set of (input, class index) pairs to poison, but its targets are "
            f"numbers, such as {odd.flatten()[0].item():g}. HINT: choose an attack that does not "
            "change labels."
        )


def _pair(sample: Any) -> tuple[Any, Any]:
    """Return input and label of a sample."""
    if not isinstance(sample, list | tuple) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, list | tuple | dict) else ""
        raise ConfigurationError(
            "Expected a data set of (input, class index) pairs to poison, but a sample is a "
            f"{type(sample).__name__}{size}. HINT: wrap it in a data set that gives pairs."
        )
    label = torch.as_tensor(sample[1])
    if label.numel() != 1:
        raise ConfigurationError(
            "Expected a data set of (input, class index) pairs to poison, but a label has shape "
            f"{tuple(label.shape)}. HINT: choose an attack that does not change labels."
        )
    _require_labels(label)
    return sample[0], sample[1]


def _like(sample: Any, x: Any, label: int) -> Any:
    """Return a sample of the same kind, its label included, with this input and label."""
    y = sample[1]
    if isinstance(y, Tensor):
        y = torch.full_like(y, label)
    elif isinstance(y, np.ndarray):
        y = np.full_like(y, label)
    else:
        y = type(y)(label)
    kind: Any = type(sample)
    return kind(x, y) if hasattr(sample, "_fields") else kind((x, y))


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
        sample = self.dataset[index]
        x, y = _pair(sample)
        label = self.relabel(torch.as_tensor(y).reshape(1))
        return _like(sample, x, int(label))


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
        sample = self.dataset[index - self.num_samples]
        x, _ = _pair(sample)
        if isinstance(x, np.ndarray):
            found = self.trigger(torch.from_numpy(x)[None])[0].numpy()
            return _like(sample, found, self.label)
        if not isinstance(x, Tensor):
            raise ConfigurationError(
                f"Expected the inputs of a data set to be tensors or arrays, but got {type(x)}. "
                "HINT: let the data set convert them, with `ToTensor` for instance."
            )
        return _like(sample, self.trigger(x[None])[0], self.label)


class WithExtraSamples(_Wrapped):
    """The samples of a data set, then others with one label.

    Args:
        dataset: Pairs of input and class index.
        extra: Further inputs, shape $(N, ...)$, of the kind that the data set has.
        label: What they are labelled as.
    """

    def __init__(self, dataset: Dataset[Any], extra: Tensor, label: int) -> None:
        super().__init__(dataset)
        self.extra = extra
        self.label = label

    def __len__(self) -> int:
        return self.num_samples + len(self.extra)

    def __getitem__(self, index: int) -> Any:
        self._require(index)
        if index < self.num_samples:
            return self.dataset[index]
        sample = self.dataset[0]
        x, _ = _pair(sample)
        found = self.extra[index - self.num_samples]
        return _like(sample, found.numpy() if isinstance(x, np.ndarray) else found, self.label)
