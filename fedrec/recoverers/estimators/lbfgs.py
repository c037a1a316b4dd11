"""Estimates by L-BFGS, the paper's method: from the pairs that it keeps, and a literal reading."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_bool, check_int
from fedrec.aggregators.base import ColumnRule
from fedrec.exceptions import ConfigurationError
from fedrec.recoverers.estimators._rows import rows_of
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates, Estimator
from fedrec.recoverers.estimators.pairs import ClientPairs, Sources
from fedrec.recoverers.estimators.paper_pairs import PaperPairs
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["PairedLBFGS", "PaperLBFGS"]


class _LBFGS(Estimator):
    r"""$\hat g_t^i = \bar g_t^i + \tilde H_t^i (\hat w_t - \bar w_t)$, with pairs of some kind."""

    assumes_gradients = True
    raises_threshold = False
    counted = frozenset({"skipped_pairs"})

    def __init__(self, buffer_size: int) -> None:
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=1)
        self._rows: dict[str, int] = {}
        self._pairs: ClientPairs | PaperPairs | None = None

    @abstractmethod
    def _new_pairs(
        self, num_clients: int, num_parameters: int, device: torch.device
    ) -> ClientPairs | PaperPairs:
        """Return pairs of which there are none yet."""

    @property
    def fewest_warmup_rounds(self) -> int:
        """One more than pairs: the first round gives none, since both models are still equal."""
        return self.buffer_size + 1

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all pairs."""
        self._rows = {c: i for i, c in enumerate(history.remaining)}
        self._pairs = None

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> None:
        """Add a pair to each of these clients."""
        self._pairs_of(global_weights).push(
            rows_of(record, self._rows),
            global_weights - record.global_weights,
            exact,
            record.updates,
            record.round,
            alone=reason in ("abnormality", "fallback"),
        )

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Estimate with the pairs of each client; who has none gets the historical update."""
        v = global_weights - record.global_weights
        return self._pairs_of(global_weights).estimate(
            record.updates, v, rows_of(record, self._rows)
        )

    def aggregate(
        self, record: RoundRecord, global_weights: Tensor, rule: ColumnRule
    ) -> AggregatedEstimates | None:
        """Estimate and aggregate in one pass, where that is compiled."""
        pairs, rows = self._pairs_of(global_weights), rows_of(record, self._rows)
        if not isinstance(pairs, ClientPairs) or not pairs.compiles(len(rows)):
            return None
        none = torch.zeros(1, len(global_weights))
        sources = Sources(global_weights, record.global_weights, none, none, 1.0, 1.0)
        return pairs.aggregated(record, sources, torch.zeros_like(rows), rows, rule)

    def _pairs_of(self, weights: Tensor) -> ClientPairs | PaperPairs:
        """Return the pairs, on the device of the weights."""
        if self._pairs is None:
            self._pairs = self._new_pairs(len(self._rows), weights.numel(), weights.device)
        return self._pairs

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of pairs and estimates."""
        rows = num_clients * (self.buffer_size + 1) + self.buffer_size + 1
        return rows * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return clients and pairs."""
        pairs = None if self._pairs is None else self._pairs.state_dict()
        return {"remaining": list(self._rows), "pairs": pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rows = {c: i for i, c in enumerate(state["remaining"])}
        self._pairs = None
        if state["pairs"] is not None:
            self._pairs_of(state["pairs"]["delta_g"][0, 0]).load_state_dict(state["pairs"])

    def diagnostics(self) -> dict[str, float]:
        """Return the number of pairs that were skipped."""
        return {"skipped_pairs": 0.0 if self._pairs is None else float(self._pairs.skipped)}


class PairedLBFGS(_LBFGS):
    r"""L-BFGS with pairs whose halves come from the same round.

    $\hat g_t^i = \bar g_t^i + \tilde H_t^i (\hat w_t - \bar w_t)$, where bars are what the server
    stored, hats what is recovered, and $\tilde H_t^i$ an approximation of client $i$'s Hessian from
    its last $s$ pairs $(\hat w_t - \bar w_t, g_t^i - \bar g_t^i)$. A pair without positive
    curvature is not used by default, but for clients asked on their own account: their other pairs
    were of no use, and the new one takes their place.

    Args:
        buffer_size: $s$, pairs per client, at least 1.
        negative_curvature: Whether all pairs of negative curvature are used, which can help or
            harm (see docs/reproduction.md).

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section IV-B and Algorithm 2.

    Examples:
        >>> PairedLBFGS(buffer_size=3)
        PairedLBFGS(buffer_size=3, negative_curvature=False)
    """

    def __init__(self, *, buffer_size: int = 2, negative_curvature: bool = False) -> None:
        super().__init__(buffer_size)
        check_bool("negative_curvature", negative_curvature)
        self.negative_curvature = negative_curvature

    def _new_pairs(
        self, num_clients: int, num_parameters: int, device: torch.device
    ) -> ClientPairs:
        shape = num_clients, self.buffer_size, num_parameters
        return ClientPairs(*shape, device, negative=self.negative_curvature)


class PaperLBFGS(_LBFGS):
    r"""L-BFGS with the pairs that the paper's words describe, for comparison with `PairedLBFGS`.

    One buffer $\Delta W$ of model differences for all clients is filled in rounds in which all are
    asked, one buffer $\Delta G^i$ of update differences per client whenever it is asked, and no
    pair is skipped. After an abnormality fix the two no longer describe the same rounds. On several
    devices, all clients are those of a shard.

    Args:
        buffer_size: $s$, differences in a buffer, at least 1.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history lacks an update of a client that remains.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section IV-C ("Updating the buffers of the L-BFGS
          algorithm").

    Examples:
        >>> PaperLBFGS()
        PaperLBFGS(buffer_size=2)
    """

    def __init__(self, *, buffer_size: int = 2) -> None:
        super().__init__(buffer_size)

    def _new_pairs(self, num_clients: int, num_parameters: int, device: torch.device) -> PaperPairs:
        return PaperPairs(num_clients, self.buffer_size, num_parameters, device)

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all pairs; require every update."""
        super().start(history, rounds)
        kept, sent = history.count(rounds) if history.manifest.keep else (0, 0)
        if kept < sent:
            raise ConfigurationError(
                f"PaperLBFGS needs all {sent} updates of the remaining clients, but the history "
                f"keeps {kept} (keep={dict(history.manifest.keep)}). HINT: PairedLBFGS does "
                "without some."
            )
