"""FedRecover: most updates are estimated from the history, few are asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_choice, check_float, check_int, is_integer, of_class
from fedrec.exceptions import ConfigurationError, expected
from fedrec.random import torch_generator
from fedrec.recoverers.aggregated import AggregatedUpdates
from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.recoverers.estimators import (
    AnchoredLBFGS,
    Estimator,
    HistoricalUpdate,
    MovingAverage,
    PairedLBFGS,
    PaperLBFGS,
)
from fedrec.recoverers.estimators.cohort import CohortEstimator
from fedrec.recoverers.threshold import AbnormalityThreshold
from fedrec.recoverers.update_filter import UpdateFilter
from fedrec.types import CohortUpdates, RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["FedRecover"]

_log = logging.getLogger(__name__)

_ESTIMATORS: dict[str, type[Estimator]] = {
    "anchored": AnchoredLBFGS,
    "average": MovingAverage,
    "paired": PairedLBFGS,
    "paper": PaperLBFGS,
    "history": HistoricalUpdate,
}


_STAND_INS = ("drop", "estimate", "historical")


class FedRecover(ReplayRecoverer):
    r"""Estimates the clients' updates from history and asks for exact ones in a few rounds.

    In most rounds, an estimator computes $\hat g_t^i$ from the history. The paper's is
    $\hat g_t^i = \bar g_t^i + \tilde H_t^i (\hat w_t - \bar w_t)$ (`estimator="paired"`), where
    bars mark what is stored, hats what is recovered, and $\tilde H_t^i$ approximates client $i$'s
    Hessian by L-BFGS. By default, an estimate starts from an average of the exact updates that the
    client has sent (`estimator="anchored"`), so it also recovers if the recorded model is far away.
    Both assume that updates are gradients: a warning is logged if clients take several local steps,
    or a step that is not SGD's. Clients are asked

    - `warmup`: in the first $T_w$ rounds, for the estimator to learn from,
    - `correction`: in every $T_c$-th round after that, to keep it current,
    - `abnormality`: one client, if an entry of its estimate exceeds $\tau$ in magnitude,
    - `final`: in the last $T_f$ rounds, to end on exact updates,
    - `fallback`: one client, if it has no estimate (in L-BFGS, no usable pair), its estimate is
      not finite, or the estimator reads the history, which did not keep its update of the round.

    If the history keeps some updates only (`keep`), an estimator that reads it learns from these
    rounds only, and $\tau$ is computed from them.

    Args:
        warmup_rounds: $T_w$, at least 1, and with L-BFGS more than the pairs per client $s$
            (`buffer_size` of the estimator).
        correction_period: $T_c$, at least 1; `None` for no periodic correction.
        abnormality_threshold: A fixed $\tau > 0$ in place of the one from `tolerance_rate`.
        tolerance_rate: $\alpha$ in [0, 1), which sets $\tau$ from history: in every round at most
            this fraction of the historical entries exceeds it. Once more than half of the clients
            are asked in a round and send what exceeds $\tau$, too, and is near to their estimates,
            it rises so that the same holds for the exact updates of every correction; with the
            paper's estimators it does not (`Estimator.raises_threshold`). `None`, with no
            `abnormality_threshold`, for no abnormality fixing.
        final_rounds: $T_f$, 0 for no final tuning.
        estimator: An `Estimator`, or the name of one with its default arguments: `"anchored"` for
            `AnchoredLBFGS`; `"average"` for `MovingAverage`; `"paired"` for `PairedLBFGS`, the
            paper's method; `"paper"` for `PaperLBFGS`, the paper's literal reading; `"history"` for
            `HistoricalUpdate`, a control. With `"none"`, stored as `None`, rounds in which clients
            are not asked make no step (the paper's variant without approximation).
        start_round: Round to start in, if it is known that the attack began no earlier. Recovery
            starts from the recorded weights of this round, and $T_w$ is counted from it. Rounds
            before it cost nothing and count in the ACP. $\tau$ is computed from the rounds from
            `start_round` on.
        update_filter: A filter that compares exact updates with their estimates, against undetected
            attackers that only attack when they are asked. An update that does not pass is replaced
            by its estimate, and the estimator does not learn from it. If there is no usable
            estimate, the historical update takes the estimate's place; if that was not kept, the
            update passes. `None` accepts all updates.
        on_missing: What stands in for a client that is asked and does not answer, or whose answer
            is refused, where the loop goes on without it (`on_bad_update="drop"`): nothing
            (`"drop"`), its estimate (`"estimate"`, or its historical update where there is no
            usable estimate), or its historical update (`"historical"`).
        diagnose: In simulation, compare the estimates that are used with the clients' exact updates
            (`RunResult.estimate_errors`, diagnostics.csv): `True` for all clients, or the number of
            clients to draw in each round. Result and costs stay the same, but computing the exact
            updates takes time.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history kept none of the updates to estimate from, or lacks what the estimator needs.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023, Algorithm 1.

    Examples:
        >>> FedRecover(warmup_rounds=20, correction_period=10).exact_reason(29, max_rounds=2000)
        'correction'
        >>> FedRecover(estimator=PairedLBFGS(buffer_size=3)).estimator
        PairedLBFGS(buffer_size=3, negative_curvature=False)
    """

    def __init__(
        self,
        *,
        warmup_rounds: int = 20,
        correction_period: int | None = 10,
        abnormality_threshold: float | None = None,
        tolerance_rate: float | None = 1e-6,
        final_rounds: int = 5,
        estimator: str | Estimator | None = "anchored",
        start_round: int = 0,
        update_filter: UpdateFilter | None = None,
        on_missing: str = "drop",
        diagnose: bool | int = False,
    ) -> None:
        self.warmup_rounds = check_int("warmup_rounds", warmup_rounds, minimum=1)
        if correction_period is not None:
            correction_period = check_int("correction_period", correction_period, minimum=1)
        self.correction_period = correction_period
        if abnormality_threshold is not None:
            abnormality_threshold = check_float(
                "abnormality_threshold", abnormality_threshold, minimum=0, open_minimum=True
            )
        self.abnormality_threshold = abnormality_threshold
        if tolerance_rate is not None:
            tolerance_rate = check_float(
                "tolerance_rate", tolerance_rate, minimum=0, maximum=1, open_maximum=True
            )
        self.tolerance_rate = tolerance_rate
        self.final_rounds = check_int("final_rounds", final_rounds, minimum=0)
        self.estimator = _estimator(estimator)
        self.start_round = check_int("start_round", start_round, minimum=0)
        if update_filter is not None and not isinstance(update_filter, UpdateFilter):
            raise ConfigurationError(expected("update_filter", "an UpdateFilter", update_filter))
        self.update_filter = update_filter
        self.on_missing = check_choice("on_missing", on_missing, _STAND_INS)
        if not isinstance(diagnose, bool):
            if not is_integer(diagnose) or diagnose < 1:
                requirement = "true, false, or an integer of at least 1"
                raise ConfigurationError(expected("diagnose", requirement, diagnose))
            diagnose = int(diagnose)
        self.diagnose = diagnose
        if self.estimator is None and update_filter is not None:
            hint = "without estimates there is nothing to compare with."
            raise ConfigurationError(expected("update_filter", "none", update_filter, hint=hint))
        if self.estimator is None and self.on_missing != "drop":
            hint = "without estimates the history is not read."
            raise ConfigurationError(expected("on_missing", "'drop'", on_missing, hint=hint))
        if self.estimator is None and diagnose:
            hint = "without estimates there is nothing to compare."
            raise ConfigurationError(expected("diagnose", "false", diagnose, hint=hint))
        fewest = 1 if self.estimator is None else self.estimator.fewest_warmup_rounds
        if self.warmup_rounds < fewest:
            requirement = f"at least {fewest} with estimator={self.estimator!r}"
            raise ConfigurationError(expected("warmup_rounds", requirement, warmup_rounds))
        self.assumes_gradients = self.estimator is not None and self.estimator.assumes_gradients
        self._cohort = None if self.estimator is None else CohortEstimator(self.estimator)
        self._needs_stand_ins = update_filter is not None or self.on_missing != "drop"
        self._reads_history = self._needs_stand_ins or (
            self.estimator is not None and self.estimator.reads_history
        )
        self._threshold = AbnormalityThreshold(
            self.tolerance_rate,
            self.abnormality_threshold,
            rises=self.estimator is not None and self.estimator.raises_threshold,
        )
        self._num_estimated = self._num_filtered = 0
        # Of the last estimates: where one could not be used, the next round's are likely the same.
        self._all_normal = True

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

    def _estimated_rounds(self, max_rounds: int) -> list[int]:
        """Return the rounds in which updates are estimated."""
        rounds = range(self.start_round, max_rounds)
        return [t for t in rounds if self.exact_reason(t, max_rounds) is None]

    def check_plan(self, max_rounds: int, server_samples: int | None) -> str | None:
        """Check that there are rounds to recover in; warn if updates are estimated in none."""
        if self.start_round >= max_rounds:
            requirement = f"less than the {max_rounds} rounds of the recovery"
            raise ConfigurationError(expected("start_round", requirement, self.start_round))
        if self._estimated_rounds(max_rounds):
            return None
        began = f" from round {self.start_round} on" if self.start_round else ""
        return (
            f"FedRecover asks all clients in each of the {max_rounds - self.start_round} rounds"
            f"{began}, so it estimates nothing and spares them nothing "
            f"(warmup_rounds={self.warmup_rounds}, final_rounds={self.final_rounds}, "
            f"correction_period={self.correction_period}). HINT: lower these, or record more "
            "rounds."
        )

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return the rounds from `start_round` on."""
        return range(self.start_round, max_rounds)

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the recorded weights of `start_round`."""
        return history.read(self.start_round, ()).global_weights

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Start the estimator, and compute the abnormality threshold from the history."""
        self.check_plan(max_rounds, None)
        rounds = self.rounds(history, max_rounds)
        self._num_estimated = self._num_filtered = 0
        if self._cohort is None:
            return
        self._cohort.start(history, rounds)
        if self._reads_history:
            self._check_kept(history, max_rounds)
        self._threshold.start(history, rounds)

    def _check_kept(self, history: HistoryView, max_rounds: int) -> None:
        """Warn, or raise an error, about updates that the history did not keep."""
        keep = dict(history.manifest.keep)
        if not keep:
            return
        kept, sent = history.count(self._estimated_rounds(max_rounds))
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
    ) -> CohortUpdates | None:
        """Ask all clients; or estimate, and ask the clients whose estimates cannot be used."""
        reason = self.exact_reason(t, ctx.max_rounds)
        if self.estimator is None:
            return None if reason is None else ctx.exact(ctx.client_ids, reason)
        if reason == "final" and not self._needs_stand_ins:  # the history is not needed any more
            return ctx.exact(ctx.client_ids, reason)
        record = ctx.history(t, vectors=self._reads_history)
        if reason is not None:
            return self._exact(ctx.client_ids, reason, record, global_weights, ctx)
        return self._estimated(record, global_weights, ctx)

    def _exact(
        self,
        client_ids: Sequence[str],
        reason: str,
        record: RoundRecord,
        global_weights: Tensor,
        ctx: RecoveryContext,
        replaced: CohortUpdates | None = None,
    ) -> CohortUpdates:
        """Ask clients, filter their updates, and learn from them.

        `replaced` are the round's abnormal estimates.
        """
        assert self._cohort is not None
        sent = trusted = ctx.exact(client_ids, reason)
        if self.update_filter is not None:
            sent, trusted = self._filter(sent, reason, record, global_weights)
        kept = set(record.client_ids)
        ids = [c for c in trusted.client_ids if c in kept]
        if ids and reason != "final":
            exact = trusted.select(ids)
            self._cohort.observe(record.select(ids), exact, global_weights, reason)
        self._threshold.observe(trusted, reason, replaced, len(ctx.client_ids), self._cohort.gather)
        return self._filled(sent, client_ids, record, global_weights)

    def _filled(
        self,
        sent: CohortUpdates,
        client_ids: Sequence[str],
        record: RoundRecord,
        global_weights: Tensor,
    ) -> CohortUpdates:
        """Return what clients sent, with what stands in for those of which nothing can be used."""
        known, there = set(record.client_ids), set(sent.client_ids)
        missing = [c for c in client_ids if c in known and c not in there]
        if self.on_missing == "drop" or not missing:
            return sent
        part = record.select(missing)
        stand_ins = part.sent
        if self.on_missing == "estimate":
            stand_ins = self._estimates_or_recorded(part, global_weights)
        ids = [c for c in client_ids if c in known or c in there]
        return sent.joined(stand_ins, client_ids=ids)

    def _filter(
        self, sent: CohortUpdates, reason: str, record: RoundRecord, global_weights: Tensor
    ) -> tuple[CohortUpdates, CohortUpdates]:
        """Return the updates to aggregate, and those of the clients whose own update is used."""
        known = set(record.client_ids)
        ids = [c for c in sent.client_ids if c in known]
        if self.update_filter is None or not ids:
            return sent, sent
        record = record.select(ids)
        references = record.sent
        if reason not in ("abnormality", "fallback"):  # these clients have no usable estimate
            references = self._estimates_or_recorded(record, global_weights)
        filtered, trusted = self.update_filter.apply(sent, references)
        self._num_filtered += len(sent.client_ids) - len(trusted.client_ids)
        return filtered, trusted

    def _estimates_or_recorded(self, record: RoundRecord, global_weights: Tensor) -> CohortUpdates:
        """Return the estimates of clients, or what they sent then where these cannot be used."""
        estimates, normal, _ = self._estimates(record, global_weights)
        usable = list(compress(record.client_ids, normal.tolist()))
        others = [c for c in record.client_ids if c not in set(usable)]
        if not others:
            return estimates
        recorded = record.sent.select(others)
        return estimates.select(usable).joined(recorded, client_ids=record.client_ids)

    def _estimates(
        self, record: RoundRecord, global_weights: Tensor
    ) -> tuple[CohortUpdates, Tensor, Tensor]:
        """Return estimates, and for each its verdict, twice of shape $(m,)$.

        The first verdict says whether the estimate can be used, the second whether it exceeds the
        threshold. An estimate that is not finite, or that the estimator cannot make, has neither.
        """
        assert self._cohort is not None
        estimates, largest = self._cohort.estimate(record, global_weights)
        return estimates, *self._verdicts(largest)

    def _verdicts(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        usable, normal = torch.isfinite(largest), largest <= self._threshold.value
        return usable & normal, usable & ~normal

    def _aggregated(
        self, record: RoundRecord, global_weights: Tensor, ctx: RecoveryContext
    ) -> AggregatedUpdates | None:
        """Aggregate estimates while they are computed; `None` where somebody needs the rows."""
        assert self._cohort is not None
        if self.diagnose or not self._all_normal or record.client_ids != ctx.client_ids:
            return None
        rule = ctx.column_rule(record.client_ids)
        found = None if rule is None else self._cohort.aggregate(record, global_weights, rule)
        if found is None or not bool(self._verdicts(found[1])[0].all()):
            return None
        self._num_estimated += len(record.client_ids)
        return found[0]

    def _estimated(
        self, record: RoundRecord, global_weights: Tensor, ctx: RecoveryContext
    ) -> CohortUpdates | None:
        """Estimate all updates; ask the clients whose estimate is abnormal or missing."""
        if not record.client_ids:
            return ctx.exact(ctx.client_ids, "fallback")
        aggregated = self._aggregated(record, global_weights, ctx)
        if aggregated is not None:
            return aggregated
        estimates, normal, abnormal = self._estimates(record, global_weights)
        self._num_estimated += int(normal.sum())
        self._all_normal = bool(normal.all())
        if self.diagnose:
            self._compare(record, estimates, normal, ctx)
        usable = list(compress(record.client_ids, normal.tolist()))
        if tuple(usable) == ctx.client_ids:
            return estimates
        exceeding = set(compress(record.client_ids, abnormal.tolist()))
        missing = set(ctx.client_ids).difference(usable, exceeding)
        # Copies: the next estimates, and what is learned, may be written to the same memory.
        replaced = estimates.joined(client_ids=[c for c in ctx.client_ids if c in exceeding])
        if self.on_missing == "estimate":
            estimates = estimates.joined(client_ids=usable)
        exact = []
        for reason, group in (("abnormality", exceeding), ("fallback", missing)):
            if group:
                asked = [c for c in ctx.client_ids if c in group]
                exact.append(self._exact(asked, reason, record, global_weights, ctx, replaced))
        known = set(usable).union(*(sent.client_ids for sent in exact))
        ids = [c for c in ctx.client_ids if c in known]
        return estimates.joined(*exact, client_ids=ids) if ids else None

    def _compare(
        self, record: RoundRecord, estimates: CohortUpdates, normal: Tensor, ctx: RecoveryContext
    ) -> None:
        """Compare the estimates that are used, or some of them, with exact updates."""
        used = normal.nonzero().flatten()
        if self.diagnose is not True:
            generator = torch_generator(ctx.seed, "diagnose", record.round)
            used = used[torch.randperm(len(used), generator=generator)[: self.diagnose]]
        if len(used):
            ctx.compare(estimates.select([record.client_ids[i] for i in used.tolist()]))

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes that the estimator keeps."""
        if self.estimator is None:
            return 0
        return self.estimator.kept_bytes(num_clients, num_parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, the counters and the estimator's state."""
        return {
            "threshold": self._threshold.state_dict(),
            "estimated": self._num_estimated,
            "filtered": self._num_filtered,
            "estimator": {} if self._cohort is None else self._cohort.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._threshold.load_state_dict(state["threshold"])
        self._num_estimated = state["estimated"]
        self._num_filtered = state["filtered"]
        if self._cohort is not None:
            self._cohort.load_state_dict(state["estimator"])

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """Return the states of the shards' estimators."""
        return {} if self._cohort is None else self._cohort.shard_states()

    def load_shard_states(self, states: dict[int, dict[str, Any]], history: HistoryView) -> None:
        """Take over what `shard_states` returned."""
        if self._cohort is not None:
            self._cohort.load_shard_states(states, history)

    def diagnostics(self) -> dict[str, float]:
        """Return the threshold, the numbers of updates estimated and filtered, and more."""
        return {
            "abnormality_threshold": self._threshold.value,
            "estimated_updates": float(self._num_estimated),
            "filtered_updates": float(self._num_filtered),
            **({} if self._cohort is None else self._cohort.diagnostics()),
        }


def _estimator(given: str | Estimator | None) -> Estimator | None:
    """Return the estimator of the argument `estimator`; `None` for none."""
    if given is None or given == "none":
        return None
    if isinstance(given, str) and given in _ESTIMATORS:
        return _ESTIMATORS[given]()
    if not isinstance(given, Estimator):
        names = (*_ESTIMATORS, "none")
        raise ConfigurationError(
            expected(
                "estimator", "an Estimator or a name", given, known=names, hint=of_class(given)
            )
        )
    return given
