"""FedRecover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec.random import torch_generator
from fedrec.recoverers._fedrecover_checks import check_arguments, check_kept, check_rounds
from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.recoverers.lbfgs import PairedBuffer
from fedrec.recoverers.paper_buffer import PaperBuffer
from fedrec.recoverers.threshold import history_threshold, largest_magnitudes
from fedrec.recoverers.update_filter import UpdateFilter
from fedrec.types import CohortUpdates, RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["FedRecover"]


class FedRecover(ReplayRecoverer):
    r"""Estimates the clients' updates from history and asks for exact ones in a few rounds.

    In most rounds, $\hat g_t^i = \bar g_t^i + \tilde H_t^i (\hat w_t - \bar w_t)$, where bars are
    what the server stored, hats what is recovered, and $\tilde H_t^i$ an L-BFGS approximation of
    client $i$'s Hessian. That takes updates for gradients: a warning is logged where clients make
    several local steps, or one that is not SGD's. Clients are asked

    - `warmup`: in the first $T_w$ rounds, to fill the L-BFGS buffers,
    - `correction`: in every $T_c$-th round after that, to keep the buffers current,
    - `abnormality`: one client, if an entry of its estimate exceeds $\tau$ in magnitude,
    - `final`: in the last $T_f$ rounds, to end on exact updates,
    - `fallback`: one client, if it has no usable pair, its estimate is not finite, or the history
      did not keep its update of the round.

    A pair is $(\hat w_t - \bar w_t, g_t^i - \bar g_t^i)$, both halves from the start of the same
    round. One without positive curvature is not used by default, but for `abnormality`, `fallback`:
    the client's others were of no use, and the new one takes their place. A round whose historical
    update the history did not keep (`keep`) gives no pair; $\tau$ is found in those it kept.

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
        negative_curvature: Whether `buffer="paired"` uses all pairs of negative curvature, which
            can help or harm (see docs/reproduction.md).
        start_round: Round to start in, where it is known that the attack began no earlier: from its
            recorded weights, with $T_w$ counted from there. Rounds before it cost nothing and count
            in the ACP; $\tau$ is found in the rounds from there on.
        update_filter: What exact updates have to agree with their estimates in, against undetected
            attackers that only attack when they are asked. An update that does not pass is replaced
            by its estimate and gives no pair. Where there is no usable estimate, the historical
            update takes its place; where that was not kept, all pass. `None` takes all.
        diagnose: In simulation: compare the estimates that are used with the clients' exact updates
            (`RunResult.estimate_errors`, diagnostics.csv). `True` for all clients, or how many to
            draw in each round. Result and costs stay the same; it takes as long as asking them.

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
        negative_curvature: bool = False,
        start_round: int = 0,
        update_filter: UpdateFilter | None = None,
        diagnose: bool | int = False,
    ) -> None:
        self.warmup_rounds = warmup_rounds
        self.correction_period = correction_period
        self.abnormality_threshold = abnormality_threshold
        self.tolerance_rate = tolerance_rate
        self.final_rounds = final_rounds
        self.buffer_size = buffer_size
        self.estimate = estimate
        self.buffer = buffer
        self.negative_curvature = negative_curvature
        self.start_round = start_round
        self.update_filter = update_filter
        self.diagnose = diagnose
        check_arguments(self)
        self.assumes_gradients = estimate == "lbfgs"
        self._remaining: tuple[str, ...] = ()
        self._threshold = float("inf")
        self._pairs: PairedBuffer | PaperBuffer | None = None
        self._estimated = self._filtered = 0

    def exact_reason(self, t: int, max_rounds: int) -> str | None:
        """Return why all clients are asked in round `t`, or `None` if updates are estimated.

        Args:
            t: Round, 0-based.
            max_rounds: $T$.
        """
        since = t - self.start_round
        if since < self.warmup_rounds:
            return "warmup"
        if t >= max_rounds - self.final_rounds:
            return "final"
        if (
            self.correction_period is not None
            and (since - self.warmup_rounds + 1) % self.correction_period == 0
        ):
            return "correction"
        return None

    def check_plan(self, max_rounds: int, server_samples: int | None) -> str | None:
        """Check that there are rounds to recover in; warn if updates are estimated in none."""
        return check_rounds(self, max_rounds)

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return the rounds from `start_round` on."""
        return range(self.start_round, max_rounds)

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the recorded weights of `start_round`."""
        return history.read(self.start_round, ()).global_weights

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Find the abnormality threshold in the remaining clients' history."""
        self.check_plan(max_rounds, None)
        rounds = self.rounds(history, max_rounds)
        self._remaining = history.remaining
        self._pairs = None
        self._estimated = self._filtered = 0
        self._threshold = float("inf")
        if self.estimate is None:
            return
        if history.manifest.keep:
            estimated = [t for t in rounds if self.exact_reason(t, max_rounds) is None]
            check_kept(history, rounds, estimated, self.buffer)
        if self.abnormality_threshold is not None:
            self._threshold = self.abnormality_threshold
        elif self.tolerance_rate is not None:
            self._threshold = history_threshold(history, rounds, self.tolerance_rate)

    def round_updates(
        self, t: int, global_weights: Tensor, ctx: RecoveryContext
    ) -> Tensor | CohortUpdates | None:
        """Ask everyone, or estimate and ask those whose estimate cannot be used."""
        reason = self.exact_reason(t, ctx.max_rounds)
        if reason is not None:
            sent = trusted = ctx.exact(ctx.client_ids, reason)
            if self.update_filter is not None:
                sent, trusted = self._filter(sent, ctx.history(t), global_weights)
            if self.estimate == "lbfgs" and reason != "final" and trusted.client_ids:
                self._push(trusted, global_weights, ctx.history(t), alone=False)
            return sent
        if self.estimate is None:
            return None
        record = ctx.history(t)
        if not record.client_ids:
            return ctx.exact(ctx.client_ids, "fallback")
        estimates, largest, usable = self._estimates(record, global_weights)
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

    def _filter(
        self, sent: CohortUpdates, record: RoundRecord, global_weights: Tensor | None
    ) -> tuple[CohortUpdates, CohortUpdates]:
        """Return what to aggregate and what to make pairs of; without weights, judge by history."""
        known = set(record.client_ids)
        at = [i for i, c in enumerate(sent.client_ids) if c in known]
        if self.update_filter is None or not at:
            return sent, sent
        record = record.select([sent.client_ids[i] for i in at])
        references = record.updates
        if global_weights is not None:
            estimates, largest, _ = self._estimates(record, global_weights)
            normal = torch.isfinite(largest) & (largest <= self._threshold)
            references = torch.where(normal.to(estimates.device)[:, None], estimates, references)
        filtered, trusted = self.update_filter.apply(sent, at, references)
        self._filtered += len(sent.client_ids) - len(trusted.client_ids)
        return filtered, trusted

    def _estimates(
        self, record: RoundRecord, global_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return estimates (m, d), the largest magnitude in each (m,), and who has one (m,)."""
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
        return estimates, largest, usable & torch.isfinite(largest)

    def _compare(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> None:
        """Have the estimates that this round will use compared with exact updates."""
        record = ctx.history(t)
        if not record.client_ids:
            return
        estimates, largest, usable = self._estimates(record, global_weights)
        used = (usable & ~(largest > self._threshold)).nonzero().flatten()
        if self.diagnose is not True:
            generator = torch_generator(ctx.seed, "diagnose", t)
            used = used[torch.randperm(len(used), generator=generator)[: self.diagnose]]
        if len(used):
            ids = [record.client_ids[i] for i in used.tolist()]
            ctx.compare(ids, estimates[used.to(estimates.device)])

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Do one round; with a rule that is a weighted sum, without making the estimates."""
        if self.diagnose and self.exact_reason(t, ctx.max_rounds) is None:
            self._compare(t, global_weights, ctx)
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
                # Their estimates cannot be used, for filtering neither.
                sent, trusted = self._filter(ctx.exact(ids, reason), record, None)
                if self.estimate == "lbfgs" and trusted.client_ids:
                    self._push(trusted, global_weights, record, alone=True)
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
            c, d, device = len(self._remaining), global_weights.numel(), global_weights.device
            if self.buffer == "paired":
                negative = self.negative_curvature
                self._pairs = PairedBuffer(c, self.buffer_size, d, device, negative=negative)
            else:
                self._pairs = PaperBuffer(c, self.buffer_size, d, device)
        return self._pairs

    def _push(
        self, sent: CohortUpdates, global_weights: Tensor, record: RoundRecord, *, alone: bool
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
            alone,
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
            "filtered": self._filtered,
            "pairs": None if self._pairs is None else self._pairs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._remaining = tuple(state["remaining"])
        self._threshold = state["threshold"]
        self._estimated = state["estimated"]
        self._filtered = state["filtered"]
        self._pairs = None
        if state["pairs"] is not None:
            self._buffer(state["pairs"]["delta_g"][0, 0]).load_state_dict(state["pairs"])

    def diagnostics(self) -> dict[str, float]:
        """Return the threshold, the number of estimates used, and pairs that were skipped."""
        return {
            "abnormality_threshold": self._threshold,
            "estimated_updates": float(self._estimated),
            "filtered_updates": float(self._filtered),
            "skipped_pairs": 0.0 if self._pairs is None else float(self._pairs.skipped),
        }
