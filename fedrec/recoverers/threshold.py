"""Computing FedRecover's abnormality threshold from recorded and exact updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec.functional.distances import squared_norms
from fedrec.history.background import read_ahead
from fedrec.types import CohortUpdates

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = [
    "AbnormalityThreshold",
    "abnormality_threshold",
    "history_threshold",
    "largest_magnitudes",
    "raised_threshold",
]

# Entries that a CPU scans at a time: they stay in a core's cache while they are compared.
_BLOCK = 1 << 18


class AbnormalityThreshold:
    r"""What an estimate's largest magnitude may be in a recovery.

    The threshold is that of the recording, `abnormality_threshold`. A recording that learned
    nothing does not tell how large updates are. This shows when more than half of the clients are
    asked in a round and all is well with their estimates: what they send exceeds the threshold,
    too, and is nearer to the estimate than to zero. Updates have then outgrown the recording, and
    from this round on the threshold is also that of the exact updates of every correction.

    Args:
        tolerance_rate: $\alpha$; `None` for no threshold.
        fixed: A threshold in place of that of the recording, which does not rise.
        rises: Whether that of the recording does.
    """

    def __init__(
        self, tolerance_rate: float | None, fixed: float | None = None, *, rises: bool = True
    ) -> None:
        self._tolerance_rate = tolerance_rate if fixed is None else None
        self._fixed = float("inf") if fixed is None else fixed
        self._rises = rises
        self._outgrown = False
        self.value = self._fixed

    def start(self, history: HistoryView, rounds: Iterable[int]) -> None:
        """Take the threshold of a recording; see `history_threshold`."""
        self._outgrown = False
        self.value = self._fixed
        if self._tolerance_rate is not None:
            self.value = history_threshold(history, rounds, self._tolerance_rate)

    def observe(
        self,
        exact: CohortUpdates,
        reason: str,
        replaced: CohortUpdates | None,
        num_clients: int,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """Learn from exact updates.

        Args:
            exact: What clients sent.
            reason: Why they were asked.
            replaced: In a round of estimates, those that exceed the threshold.
            num_clients: Number of clients that take part.
            gather: Returns a value of each process, in all of them.
        """
        if self._tolerance_rate is None or not self._rises:
            return
        rises = self._outgrown and reason == "correction"
        asked_for_them = reason == "abnormality" and 2 * len(exact.client_ids) > num_clients
        if replaced is not None and asked_for_them and not self._outgrown:
            false_alarms = exact.measured(self._were_false, replaced.select(exact.client_ids))
            rises = self._outgrown = 2 * int(false_alarms.sum()) > num_clients
        if rises:
            self.value = raised_threshold(self.value, exact, self._tolerance_rate, gather)

    def _were_false(self, exact: CohortUpdates, estimates: CohortUpdates) -> Tensor:
        """Return of which clients the estimate was right to exceed the threshold, shape (k,)."""
        near = squared_norms(estimates.updates - exact.updates) < squared_norms(exact.updates)
        return near & (largest_magnitudes(exact.updates) > self.value)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed recovery needs."""
        return {"value": self.value, "outgrown": self._outgrown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.value, self._outgrown = state["value"], state["outgrown"]


def largest_magnitudes(updates: Tensor) -> Tensor:
    """Return the largest magnitude of each row; NaN if the row has NaN.

    Args:
        updates: Shape $(m, d)$.

    Returns:
        Shape $(m,)$.
    """
    # Two reductions are cheaper than a tensor of magnitudes, which is as large as the input.
    return torch.maximum(updates.amax(dim=1), updates.amin(dim=1).neg())


def abnormality_threshold(rounds: Iterable[Tensor], tolerance_rate: float) -> float:
    r"""Return the smallest threshold that, in every round, few historical entries exceed.

    In round $t$, the remaining clients' historical updates have $N_t$ entries. $\tau_t$ is the
    smallest number that at most $\lfloor \alpha N_t \rfloor$ of them exceed in magnitude, that is
    the $(\lfloor \alpha N_t \rfloor + 1)$-th largest magnitude; $\tau = \max_t \tau_t$.

    Args:
        rounds: One tensor of historical updates per round, shape $(m_t, d)$.
        tolerance_rate: $\alpha$ in [0, 1).

    Returns:
        $\tau$; 0 if there is no entry at all.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section IV-C.

    Examples:
        >>> abnormality_threshold([torch.tensor([[1.0, -4.0], [2.0, 3.0]])], tolerance_rate=0.25)
        3.0
    """
    threshold = 0.0
    for updates in rounds:
        allowed = _allowed(updates.numel(), tolerance_rate)
        threshold = _raised(threshold, [_exceeding(updates, allowed, threshold)], allowed)
    return threshold


def _allowed(num_entries: int, tolerance_rate: float) -> int:
    """Return how many entries of a round may exceed the threshold."""
    # From the decimal text: 0.29 * 100 is 28.999... in binary.
    return int(Fraction(str(tolerance_rate)) * num_entries)


def _exceeding(updates: Tensor, allowed: int, threshold: float) -> Tensor:
    """Return the magnitudes that exceed a threshold, or the `allowed + 1` largest of them."""
    size = _BLOCK if updates.device.type == "cpu" else max(updates.numel(), 1)
    largest = [updates.new_empty(0)]  # the magnitudes that exceed `bound`: others do not matter
    bound, count = threshold, 0
    for entries in updates.flatten().split(size) if updates.numel() else ():
        low, high = torch.aminmax(entries)
        if max(-float(low), float(high)) <= bound:
            continue
        magnitudes = entries.abs()
        largest.append(magnitudes[magnitudes > bound])
        count += largest[-1].numel()
        if count > 2 * allowed + 2:
            largest = [_top(largest, allowed + 1)]
            bound, count = float(largest[0][-1]), allowed + 1
    return torch.cat(largest) if count <= allowed else _top(largest, allowed + 1)


def _raised(threshold: float, exceeding: Sequence[Tensor], allowed: int) -> float:
    """Return the threshold after a round, given what exceeds it in each part of the round."""
    # Only a round with more exceeding entries than allowed can raise the maximum.
    if sum(part.numel() for part in exceeding) <= allowed:
        return threshold
    return float(_top(exceeding, allowed + 1)[-1])


def history_threshold(history: HistoryView, rounds: Iterable[int], tolerance_rate: float) -> float:
    """Return the threshold of a recording, without reading rounds that cannot raise it.

    Args:
        history: The recording, and the clients whose updates count.
        rounds: Rounds that count.
        tolerance_rate: As in `abnormality_threshold`.
    """
    bounds = {t: max(history.bounds(t).values(), default=0.0) for t in rounds}
    threshold = 0.0
    highest_first = sorted(bounds, key=bounds.__getitem__, reverse=True)
    for record in read_ahead(history, highest_first, torch.device("cpu")):
        if bounds[record.round] <= threshold:
            break
        threshold = raised_threshold(threshold, record.sent, tolerance_rate, history.gather)
    return threshold


def raised_threshold(
    threshold: float,
    sent: CohortUpdates,
    tolerance_rate: float,
    gather: Callable[[Any], list[Any]],
) -> float:
    """Return the threshold after one more round.

    Args:
        threshold: That of the rounds before.
        sent: The updates of the round.
        tolerance_rate: As in `abnormality_threshold`.
        gather: Returns a value of each process, in all of them.
    """
    own = sent.in_process().updates
    allowed = _allowed(len(sent.client_ids) * own.shape[1], tolerance_rate)
    exceeding = gather(_exceeding(own, allowed, threshold).cpu())
    return _raised(threshold, exceeding, allowed)


def _top(values: Sequence[Tensor], k: int) -> Tensor:
    """Return the k largest of all values, in decreasing order."""
    return torch.topk(torch.cat(list(values)), k).values
