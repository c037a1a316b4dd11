"""How far estimates follow the errors that clients have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_dtype
from fedrec.recoverers.estimators._rows import picking

__all__ = ["CommonGain", "Errors"]

# Pairs of successive errors that decide together about the gain.
WINDOW = 3


class Errors(NamedTuple):
    """How far the estimates of some clients were from what they sent.

    Attributes:
        mean: The mean of exact update minus estimate, shape $(d,)$.
        weight: How many clients these are, where one that sent a long update counts for less.
        length: The median length of their exact updates.
        gain: The smallest of their own gains.
    """

    mean: Tensor
    weight: float
    length: float
    gain: float


class CommonGain:
    r"""The gain $K_c$, and how rows of clients move by it.

    Args:
        given: The gain, or `"adaptive"`.

    Attributes:
        value: The gain now.
        moved: Rows of clients that were asked last, and their own gains.
    """

    def __init__(self, given: float | str) -> None:
        self._is_given = not isinstance(given, str)
        # 0 until clients were asked again: then it is the smallest own gain.
        self.value = given if not isinstance(given, str) else 0.0
        # Longer updates count for less.
        self._length = float("inf")
        # The mean error of the last correction, and products of earlier ones with those before.
        self._error: Tensor | None = None
        self._successive = torch.zeros(WINDOW, 2, dtype=torch.float64)
        self._forget_moved()

    def _forget_moved(self) -> None:
        """Forget whose rows are going to move by the mean error, too, and their own gains."""
        self.moved = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)

    def counts(
        self, exact: Tensor, known: Tensor, errors: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Return how much each client counts in the mean error, and the median length.

        Args:
            exact: What the clients sent, shape $(k, d)$.
            known: Whose estimate there was, shape $(k,)$; the others do not count.
            errors: The lengths of the errors, shape $(k,)$, where they may be the longer ones.
        """
        lengths = torch.linalg.vector_norm(exact, dim=1).cpu().double()
        longest = lengths if errors is None else torch.maximum(lengths, errors)
        counts = torch.where(longest > self._length, self._length / longest, 1.0)
        counts[~known] = 0
        return counts, float(lengths[known].median())

    def follow(self, statistics: Sequence[Errors], matrix: Tensor) -> None:
        """Learn from the errors of all clients, in shards; move rows by what they have in common.

        Args:
            statistics: Of each shard that has some.
            matrix: Its rows `moved` have moved by their own gains already.
        """
        if statistics:
            error = self._learn(statistics)
            rows, gains = self.moved
            for gain in gains.unique().tolist():
                if gain < self.value:
                    at = picking(rows[gains == gain], error.device)
                    matrix[at] += error * (self.value - gain)
        self._forget_moved()

    def _learn(self, statistics: Sequence[Errors]) -> Tensor:
        """Set the gain by the errors of all clients; return their mean."""
        total = sum(one.weight for one in statistics)
        parts = [one.mean * (one.weight / total) for one in statistics]
        error, least = torch.stack(parts).sum(dim=0), min(one.gain for one in statistics)
        lengths = torch.tensor([one.length for one in statistics], dtype=torch.float64)
        # Where half of them sent nothing, it says nothing.
        self._length = float(lengths.median()) or float("inf")
        if self._is_given:
            return error
        if least == 1:
            self._error = None
            return error
        if self._error is not None:
            pair = _product(error, self._error), _product(self._error, self._error)
            newest = torch.tensor([pair], dtype=torch.float64)
            self._successive = torch.cat([self._successive[1:], newest])
            along, size = self._successive.sum(dim=0).tolist()
            if size > 0:
                self.value *= 1 + along / size / 2
        self.value = min(max(self.value, least), 1.0)
        self._error = error
        return error

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {
            "value": self.value,
            "length": self._length,
            "error": self._error,
            "successive": self._successive,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.value, self._length = state["value"], state["length"]
        self._error, self._successive = state["error"], state["successive"].cpu()


def _product(one: Tensor, other: Tensor) -> float:
    """Return the product of two vectors; on a CPU by NumPy, whatever the threads."""
    wide = wide_dtype(one.device)
    products = one.to(wide) * other.to(wide)
    return float(products.numpy().sum() if one.device.type == "cpu" else products.sum())
