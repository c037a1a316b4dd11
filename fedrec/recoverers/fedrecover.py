"""FedRecover."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_choice, check_float, check_int
from fedrec.exceptions import ConfigurationError, expected
from fedrec.history.background import read_ahead
from fedrec.recoverers.base import ReplayRecoverer, count_updates
from fedrec.recoverers.lbfgs import PairedBuffer
from fedrec.recoverers.paper_buffer import PaperBuffer
from fedrec.recoverers.threshold import abnormality_threshold, largest_magnitudes
from fedrec.types import CohortUpdates, RecoveryContext, RoundRecord

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore

__all__ = ["FedRecover"]

_log = logging.getLogger(__name__)


class FedRecover(ReplayRecoverer):
    r"""Estimates the clients' updates from history and asks for exact ones in a few rounds.

    In most rounds, $\hat g_t^i = \bar g_t^i + \tilde H_t^i (\hat w_t - \bar w_t)$, where bars are
    what the server stored, hats what is recovered, and $\tilde H_t^i$ an L-BFGS approximation of
    client $i$'s Hessian. Clients are asked

    - `warmup`: in the first $T_w$ rounds, to fill the L-BFGS buffers,
    - `correction`: in every $T_c$-th round after that, to keep the buffers current,
    - `abnormality`: one client, if an entry of its estimate exceeds $\tau$ in magnitude,
    - `final`: in the last $T_f$ rounds, to end on exact updates,
    - `fallback`: one client, if it has no usable pair, its estimate is not finite, or the history
      did not keep its update of the round.

    A pair is $(\hat w_t - \bar w_t, g_t^i - \bar g_t^i)$, both halves from the start of the same
    round. Pairs without positive curvature are not used. A round whose historical update the
    history did not keep (`keep`) gives no pair, and $\tau$ is found in those that it kept.

    Args:
        warmup_rounds: $T_w$, at least 1 and, with `estimate="lbfgs"`, more than `buffer_size`.
        correction_period: $T_c$, at least 1; `None` for no periodic correction.
        abnormality_threshold: A fixed $\tau > 0$ in place of the one from `tolerance_rate`.
        tolerance_rate: $\alpha$ in [0, 1), which sets $\tau$ from history: in every round at most
            this fraction of the historical entries exceeds it. `None`, with no
            `abnormality_threshold`, for no abnormality fixing.
        final_rounds: $T_f$, 0 for no final tuning.
        buffer_size: $s$, pairs per client, at least 1.
        estimate: What to use in the other rounds: `"lbfgs"`, the paper's method; `"history"`, the
            historical update unchanged (a control); `None`, no step at all (the paper's variant
            without approximation).
        buffer: `"paired"`, as above, or `"paper"`, the paper's literal reading: one buffer of model
            differences for all clients, filled in all-client rounds only, and no pair is skipped.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history kept none of the updates to estimate from, or `buffer="paper"` lacks one.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023, Algorithm 1.

    Examples:
        >>> FedRecover(warmup_rounds=20, correction_period=10).exact_reason(29, max_rounds=2000)
        'correction'
    """

    def __init__(
        self,
        *,
        warmup_rounds: int = 20,
        correction_period: int | None = 10,
        abnormality_threshold: float | None = None,
        tolerance_rate: float | None = 1e-6,
        final_rounds: int = 5,
        buffer_size: int = 2,
        estimate: str | None = "lbfgs",
        buffer: str = "paired",
    ) -> None:
        check_int("warmup_rounds", warmup_rounds, minimum=1)
        if correction_period is not None:
            check_int("correction_period", correction_period, minimum=1)
        if abnormality_threshold is not None:
            check_float(
                "abnormality_threshold", abnormality_threshold, minimum=0, open_minimum=True
            )
        if tolerance_rate is not None:
            check_float("tolerance_rate", tolerance_rate, minimum=0, maximum=1, open_maximum=True)
        check_int("final_rounds", final_rounds, minimum=0)
        check_int("buffer_size", buffer_size, minimum=1)
        if estimate is not None:
            check_choice("estimate", estimate, ("lbfgs", "history"))
        check_choice("buffer", buffer, ("paired", "paper"))
        if estimate == "lbfgs" and warmup_rounds <= buffer_size:
            raise ConfigurationError(
                expected(
                    "warmup_rounds",
                    f"more than buffer_size={buffer_size}",
                    warmup_rounds,
                    hint="the first round gives no pair, since both models are still equal.",
                )
            )
        self.warmup_rounds = warmup_rounds
        self.correction_period = correction_period
        self.abnormality_threshold = abnormality_threshold
        self.tolerance_rate = tolerance_rate
        self.final_rounds = final_rounds
        self.buffer_size = buffer_size
        self.estimate = estimate
        self.buffer = buffer
        self._remaining: tuple[str, ...] = ()
        self._threshold = float("inf")
        self._pairs: PairedBuffer | PaperBuffer | None = None
        self._estimated = 0

    def exact_reason(self, t: int, max_rounds: int) -> str | None:
        """Return why all clients are asked in round `t`, or `None` if updates are estimated.

        Args:
            t: Round, 0-based.
            max_rounds: $T$.
        """
        if t < self.warmup_rounds:
            return "warmup"
        if t >= max_rounds - self.final_rounds:
            return "final"
        if (
            self.correction_period is not None
            and (t - self.warmup_rounds + 1) % self.correction_period == 0
        ):
            return "correction"
        return None

    def start(self, history: HistoryStore, remaining: tuple[str, ...], max_rounds: int) -> None:
        """Find the abnormality threshold in the remaining clients' history."""
        self._remaining = remaining
        self._pairs = None
        self._estimated = 0
        self._threshold = float("inf")
        if self.estimate is None:
            return
        if history.manifest.keep:
            self._count_costs(history, max_rounds)
        if self.abnormality_threshold is not None:
            self._threshold = self.abnormality_threshold
        elif self.tolerance_rate is not None:
            self._threshold = _threshold(history, remaining, max_rounds, self.tolerance_rate)

    def _count_costs(self, history: HistoryStore, max_rounds: int) -> None:
        """Say what the updates that the history did not keep will cost."""
        keep, rounds = dict(history.manifest.keep), range(max_rounds)
        if self.buffer == "paper":
            kept, sent = count_updates(history, self._remaining, rounds)
            if kept < sent:
                raise ConfigurationError(
                    f'FedRecover(buffer="paper") needs all {sent} updates of the remaining '
                    f'clients, but the history keeps {kept} ({keep=}). HINT: use buffer="paired".'
                )
        estimated = [t for t in rounds if self.exact_reason(t, max_rounds) is None]
        kept, sent = count_updates(history, self._remaining, estimated)
        if kept == 0 < sent:
            raise ConfigurationError(
                f"FedRecover has nothing to estimate from, as the history keeps no update of the "
                f"remaining clients in the rounds in between ({keep=}): it would ask for all "
                f"{sent} of them. HINT: TrainFromScratch says so in its name."
            )
        if kept < sent:
            _log.warning(
                "The history did not keep %d of the %d updates that FedRecover would start its "
                "estimates from (keep=%s); clients are asked instead (fallback).",
                sent - kept,
                sent,
                keep,
            )

    def round_updates(
        self, t: int, global_weights: Tensor, ctx: RecoveryContext
    ) -> Tensor | CohortUpdates | None:
        """Ask everyone, or estimate and ask those whose estimate cannot be used."""
        reason = self.exact_reason(t, ctx.max_rounds)
        if reason is not None:
            sent = ctx.exact(ctx.client_ids, reason)
            if self.estimate == "lbfgs" and reason != "final" and sent.client_ids:
                self._push(sent, global_weights, ctx.history(t), everyone=True)
            return sent
        if self.estimate is None:
            return None
        record = ctx.history(t)
        if not record.client_ids:
            return ctx.exact(ctx.client_ids, "fallback")
        if self.estimate == "lbfgs":
            estimates, largest, usable = self._buffer(global_weights).estimate(
                record.updates,
                global_weights - record.global_weights,
                self._rows(record.client_ids),
            )
        else:
            estimates, largest = record.updates, largest_magnitudes(record.updates)
            usable = torch.ones(len(record.client_ids), dtype=torch.bool)
        largest = largest.cpu()
        usable &= torch.isfinite(largest)
        if record.client_ids != ctx.client_ids:  # the others count as unusable
            at = torch.tensor([ctx.client_ids.index(c) for c in record.client_ids])
            m = len(ctx.client_ids)
            estimates = estimates.new_zeros(m, estimates.shape[1]).index_copy_(
                0, at.to(estimates.device), estimates
            )
            largest = largest.new_zeros(m).index_copy_(0, at, largest)
            usable = usable.new_zeros(m).index_copy_(0, at, usable)
        abnormal = usable & (largest > self._threshold)
        return self._fix(record, estimates, abnormal, ~usable, global_weights, ctx)

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Do one round; with a rule that is a weighted sum, without making the estimates."""
        aggregate = self._estimated_sum(t, global_weights, ctx)
        if aggregate is None:
            return super().step(t, global_weights, ctx)
        return ctx.apply(aggregate)

    def _estimated_sum(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor | None:
        """Return the aggregate of an estimated round, or `None` where its rows are needed."""
        if self.estimate != "lbfgs" or self.exact_reason(t, ctx.max_rounds) is not None:
            return None
        pairs, weights = self._buffer(global_weights), ctx.coefficients(ctx.client_ids)
        if weights is None or not isinstance(pairs, PairedBuffer):
            return None
        record = ctx.history(t)
        if record.client_ids != ctx.client_ids:
            return None
        v, rows = global_weights - record.global_weights, self._rows(ctx.client_ids)
        found = pairs.weighted_sum(record.updates, v, rows, weights)
        if found is None:
            return None
        total, largest, usable = found
        usable &= torch.isfinite(largest)
        keep = usable & ~(largest > self._threshold)
        self._estimated += int(keep.sum())
        if bool(keep.all()):
            return total
        sent = list(self._ask(record, usable & ~keep, ~usable, global_weights, ctx))
        ids = [c for c, kept in zip(ctx.client_ids, keep.tolist(), strict=True) if kept]
        total = torch.zeros_like(v)
        weights = ctx.coefficients([*ids, *(c for s in sent for c in s.client_ids)])
        if weights is None:  # nobody is left
            return total
        of_kept, *of_sent = weights.split([len(ids), *(len(s.client_ids) for s in sent)])
        if ids:
            weights = weights.new_zeros(len(keep)).masked_scatter_(keep, of_kept)
            found = pairs.weighted_sum(record.updates, v, rows, weights, keep)
            assert found is not None  # as before
            total = found[0]
        return sum((w @ s.updates for w, s in zip(of_sent, sent, strict=True)), start=total)

    def _ask(
        self,
        record: RoundRecord,
        abnormal: Tensor,
        missing: Tensor,
        global_weights: Tensor,
        ctx: RecoveryContext,
    ) -> Iterator[CohortUpdates]:
        """Ask clients instead of estimating, and add their pairs."""
        for reason, mask in (("abnormality", abnormal), ("fallback", missing)):
            ids = [c for c, asked in zip(ctx.client_ids, mask.tolist(), strict=True) if asked]
            if ids:
                sent = ctx.exact(ids, reason)
                if self.estimate == "lbfgs" and sent.client_ids:
                    everyone = len(ids) == len(ctx.client_ids)
                    self._push(sent, global_weights, record, everyone=everyone)
                yield sent

    def _fix(
        self,
        record: RoundRecord,
        estimates: Tensor,
        abnormal: Tensor,
        missing: Tensor,
        global_weights: Tensor,
        ctx: RecoveryContext,
    ) -> CohortUpdates:
        """Replace abnormal and missing estimates by exact updates."""
        keep = ~(missing | abnormal)
        self._estimated += int(keep.sum())
        if self.estimate == "history" and not bool(keep.all()):
            estimates = estimates.clone()  # they are the record's
        place = {c: i for i, c in enumerate(ctx.client_ids)}
        for sent in self._ask(record, abnormal, missing, global_weights, ctx):
            at = [place[c] for c in sent.client_ids]
            estimates[at] = sent.updates
            keep[at] = True
        ids = [c for c, kept in zip(ctx.client_ids, keep.tolist(), strict=True) if kept]
        return CohortUpdates(
            client_ids=tuple(ids),
            updates=estimates if len(ids) == len(ctx.client_ids) else estimates[keep],
            num_samples=torch.zeros(len(ids), dtype=torch.int64),
        )

    def _rows(self, client_ids: tuple[str, ...]) -> Tensor:
        index = {c: i for i, c in enumerate(self._remaining)}
        return torch.tensor([index[c] for c in client_ids], dtype=torch.int64)

    def _buffer(self, global_weights: Tensor) -> PairedBuffer | PaperBuffer:
        if self._pairs is None:
            kind = PairedBuffer if self.buffer == "paired" else PaperBuffer
            self._pairs = kind(
                len(self._remaining),
                self.buffer_size,
                global_weights.numel(),
                global_weights.device,
            )
        return self._pairs

    def _push(
        self, sent: CohortUpdates, global_weights: Tensor, record: RoundRecord, *, everyone: bool
    ) -> None:
        """Add the pairs of those who were asked and whose historical update was kept."""
        kept = set(record.client_ids)
        rows = [k for k, c in enumerate(sent.client_ids) if c in kept]
        if not rows:
            return
        ids = tuple(sent.client_ids[k] for k in rows)
        self._buffer(global_weights).push(
            self._rows(ids),
            global_weights - record.global_weights,
            sent.updates if ids == sent.client_ids else sent.updates[rows],
            record.select(ids).updates,
            record.round,
            everyone,
        )

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of pairs and estimates."""
        if self.estimate != "lbfgs":
            return 0
        rows = num_clients * (self.buffer_size + 1) + self.buffer_size + 1
        return rows * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return threshold, pairs and counters."""
        return {
            "remaining": list(self._remaining),
            "threshold": self._threshold,
            "estimated": self._estimated,
            "pairs": None if self._pairs is None else self._pairs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._remaining = tuple(state["remaining"])
        self._threshold = state["threshold"]
        self._estimated = state["estimated"]
        self._pairs = None
        if state["pairs"] is not None:
            self._buffer(state["pairs"]["delta_g"][0, 0]).load_state_dict(state["pairs"])

    def diagnostics(self) -> dict[str, float]:
        """Return the threshold, the number of estimates used, and pairs that were skipped."""
        return {
            "abnormality_threshold": self._threshold,
            "estimated_updates": float(self._estimated),
            "skipped_pairs": 0.0 if self._pairs is None else float(self._pairs.skipped),
        }


def _threshold(
    history: HistoryStore, remaining: tuple[str, ...], max_rounds: int, tolerance_rate: float
) -> float:
    """Find the abnormality threshold, reading no round that cannot raise it."""
    keep = set(remaining)
    bounds = {
        t: max((b for c, b in history.magnitude_bounds(t).items() if c in keep), default=0.0)
        for t in history.rounds()[:max_rounds]
    }
    threshold = 0.0
    highest_first = sorted(bounds, key=bounds.__getitem__, reverse=True)
    for record in read_ahead(history, remaining, highest_first, torch.device("cpu")):
        if bounds[record.round] <= threshold:
            break
        threshold = abnormality_threshold([record.updates], tolerance_rate, threshold)
    return threshold
