"""The abstract estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fedrec.aggregators.base import ColumnRule
from fedrec.component import Component
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["AggregatedEstimates", "Estimates", "Estimator"]


class Estimates(NamedTuple):
    """Estimated updates of some clients.

    Attributes:
        updates: Shape $(m, d)$, one row per client.
        largest: The largest magnitude in each row, shape $(m,)$; NaN where a row has one.
        usable: Who has an estimate at all, shape $(m,)$, bool, on the CPU. The others are asked,
            and their rows are not used.
    """

    updates: Tensor
    largest: Tensor
    usable: Tensor


class AggregatedEstimates(NamedTuple):
    """What an aggregation rule makes of the estimated updates of some clients.

    Attributes:
        aggregate: Shape $(d,)$; of no use where an estimate is not.
        largest: As in `Estimates`, like the next.
        usable: Who has an estimate at all.
    """

    aggregate: Tensor
    largest: Tensor
    usable: Tensor


class Estimator(Component, ABC):
    r"""Estimates what clients would send now from what they sent in the recording.

    `FedRecover` calls `start` once; `observe` whenever it has asked clients, until the final
    rounds, after which nothing is left to estimate; and `estimate` in the rounds in between. A
    subclass writes `estimate`, and `observe` if it learns from exact updates.

    Where clients are in shards, as on several devices, each shard has an estimator of its own,
    which sees the clients of this shard alone. What it has to know of all goes through `pool`.

    Examples:
        >>> class Half(Estimator):
        ...     "Half of what was recorded."
        ...     def estimate(self, record, global_weights):
        ...         updates = record.updates / 2
        ...         largest = updates.abs().amax(dim=1)
        ...         return Estimates(updates, largest, torch.ones(len(updates), dtype=torch.bool))
        >>> Half()
        Half()
    """

    #: Whether it takes updates for gradients; a warning says where they are not.
    assumes_gradients: bool = False

    #: Whether it needs recorded weights or updates; where it does not, they are not read, and those
    #: of a `record` have no entries, shapes $(0,)$ and $(k, 0)$.
    reads_history: bool = True

    #: Whether the threshold that `FedRecover` has from the history rises where updates outgrow the
    #: recorded ones. In the paper it does not: its estimates start from what was recorded.
    raises_threshold: bool = True

    #: Names of `diagnostics` that count something: those of several shards are added up. Of other
    #: numbers, the mean over the shards is reported.
    counted: frozenset[str] = frozenset()

    @property
    def fewest_warmup_rounds(self) -> int:
        """Rounds of warm-up that it needs before the first estimate, at least 1."""
        return 1

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget earlier recoveries, and check that the history has what is needed.

        Args:
            history: The recording, and the clients that take part.
            rounds: Rounds of the recovery.

        Raises:
            ConfigurationError: If the history lacks something.
        """

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> Any:
        r"""Learn from the exact updates of some clients; by default nothing.

        Args:
            record: The recorded round: $\bar w_t$ (`global_weights`) and $\bar g_t^i$ (`updates`)
                of these clients. Its tensors must not be changed.
            exact: What the clients of `record` sent now, $g_t^i$, shape $(k, d)$, $k \ge 1$.
            global_weights: What they computed it at, $\hat w_t$, shape $(d,)$.
            reason: Why they were asked: `"warmup"`, `"correction"`; or, where clients were asked
                on their own account, since their estimates could not be used, `"abnormality"`,
                `"fallback"`.

        Returns:
            What is to be known of these clients where the others are, for `pool`; or `None`.
        """
        return None

    def pool(self, statistics: Sequence[Any]) -> None:
        """Learn from what `observe` returned of all clients that were asked; by default nothing.

        It is called after `observe`, also if none of them is in this estimator's shard.

        Args:
            statistics: What it returned of each shard with such clients, in the order of the
                shards; never empty.
        """

    @abstractmethod
    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        r"""Estimate the updates of the clients of `record`.

        Args:
            record: The recorded round, as in `observe`.
            global_weights: Recovered global weights $\hat w_t$, shape $(d,)$.

        Returns:
            One row per client of `record`. The rows may be those of `record`, or memory that the
            next call writes to again: nobody else writes to them.
        """

    def aggregate(
        self,
        record: RoundRecord,
        global_weights: Tensor,
        rule: ColumnRule,
    ) -> AggregatedEstimates | None:
        """Estimate as `estimate` does, and aggregate the estimates without keeping them.

        Args:
            record: The recorded round, as in `observe`.
            global_weights: Recovered global weights, shape $(d,)$.
            rule: How the estimates of the clients of `record` are aggregated.

        Returns:
            What the rule would make of the rows that `estimate` returns, bit by bit; or `None`, the
            default: `estimate` is called instead, as it is if a subclass changes `estimate` alone.
        """
        return None

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return about how many bytes it keeps from round to round.

        Args:
            num_clients: Clients that remain.
            num_parameters: $d$.
        """
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed recovery needs: tensors, numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; `start` is not called before."""

    def diagnostics(self) -> dict[str, float]:
        """Return numbers worth reporting about the recovery, by name."""
        return {}
