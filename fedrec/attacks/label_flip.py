"""The label-flip attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedrec._checks import check_int
from fedrec.attacks._datasets import Relabelled, pairs_of
from fedrec.attacks.base import Attack
from fedrec.exceptions import ConfigurationError, expected

__all__ = ["LabelFlip"]


class LabelFlip(Attack):
    r"""Malicious clients train on wrong labels, and send honestly what comes out.

    Either every label $y$ of $L$ classes becomes $L - 1 - y$, or those of some classes become
    those of others.

    Args:
        num_classes: $L$, to mirror all labels.
        pairs: Instead, `(from, to)` for each class whose label is changed; others keep theirs.

    Raises:
        ConfigurationError: If not exactly one of both is given, a class is changed twice, or a
            label of the data is not below `num_classes`.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020 (all labels).
        - Tolpegin et al., Data Poisoning Attacks Against Federated Learning Systems, ESORICS 2020
          (one class to another).

    Examples:
        >>> import torch
        >>> data = TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 9]))
        >>> LabelFlip(num_classes=10).poison_dataset(data, "client-0")[:][1]
        tensor([9, 8, 0])
        >>> LabelFlip(pairs=[(1, 7)]).poison_dataset(data, "client-0")[:][1]
        tensor([0, 7, 9])
    """

    def __init__(
        self, *, num_classes: int | None = None, pairs: Sequence[tuple[int, int]] | None = None
    ) -> None:
        if (num_classes is None) == (pairs is None):
            raise ConfigurationError(
                expected(
                    "num_classes",
                    "given if `pairs` is not, and only then",
                    num_classes,
                    hint="`num_classes=10` mirrors all labels; `pairs=[(5, 3)]` makes 5 a 3.",
                )
            )
        if num_classes is not None:
            num_classes = check_int("num_classes", num_classes, minimum=2)
        if pairs is not None:
            pairs = tuple(_checked_pair(pair) for pair in pairs)
            sources = [source for source, _ in pairs]
            if not pairs or len(set(sources)) < len(sources):
                raise ConfigurationError(
                    expected("pairs", "one or more, each from another class", pairs)
                )
        self.num_classes = num_classes
        self.pairs = pairs

    def relabel(self, labels: Tensor) -> Tensor:
        """Return the wrong labels.

        Args:
            labels: Class indices, shape $(N,)$.

        Returns:
            Same shape and type.
        """
        if self.num_classes is not None:
            if labels.numel() and int(labels.max()) >= self.num_classes:
                raise ConfigurationError(
                    expected(
                        "num_classes",
                        f"more than the label {int(labels.max())} of the data",
                        self.num_classes,
                    )
                )
            return self.num_classes - 1 - labels
        flipped = labels.clone()
        for source, target in self.pairs or ():
            flipped[labels == source] = target
        return flipped

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Change the labels.

        Args:
            dataset: Map-style data set of (input, class index).
            client_id: Its owner.

        Returns:
            A data set of the same length; a `TensorDataset` if `dataset` is one.
        """
        if type(dataset) is not TensorDataset:
            return Relabelled(dataset, self.relabel)
        x, y = pairs_of(dataset)
        return TensorDataset(x, self.relabel(y))


def _checked_pair(pair: object) -> tuple[int, int]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise ConfigurationError(expected("pairs", "a list of (from, to)", pair))
    return (check_int("pairs", pair[0], minimum=0), check_int("pairs", pair[1], minimum=0))
