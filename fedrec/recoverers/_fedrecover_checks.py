"""What FedRecover checks: its arguments, and a history that keeps some updates only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedrec._checks import check_bool, check_choice, check_float, check_int, is_integer
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recoverers.update_filter import UpdateFilter

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView
    from fedrec.recoverers.fedrecover import FedRecover

__all__ = ["check_arguments", "check_kept", "check_rounds"]

_log = logging.getLogger(__name__)


def check_arguments(new: FedRecover) -> None:
    """Store numbers as plain ones; raise `ConfigurationError` if an argument is out of range."""
    new.warmup_rounds = check_int("warmup_rounds", new.warmup_rounds, minimum=1)
    if new.correction_period is not None:
        new.correction_period = check_int("correction_period", new.correction_period, minimum=1)
    if new.abnormality_threshold is not None:
        new.abnormality_threshold = check_float(
            "abnormality_threshold", new.abnormality_threshold, minimum=0, open_minimum=True
        )
    if new.tolerance_rate is not None:
        new.tolerance_rate = check_float(
            "tolerance_rate", new.tolerance_rate, minimum=0, maximum=1, open_maximum=True
        )
    new.start_round = check_int("start_round", new.start_round, minimum=0)
    new.final_rounds = check_int("final_rounds", new.final_rounds, minimum=0)
    new.buffer_size = check_int("buffer_size", new.buffer_size, minimum=1)
    if new.estimate is not None:
        check_choice("estimate", new.estimate, ("lbfgs", "history"))
    check_choice("buffer", new.buffer, ("paired", "paper"))
    check_bool("negative_curvature", new.negative_curvature)
    if new.update_filter is not None and not isinstance(new.update_filter, UpdateFilter):
        raise ConfigurationError(expected("update_filter", "an UpdateFilter", new.update_filter))
    if new.update_filter is not None and new.estimate is None:
        hint = "with `estimate=None` there is nothing to compare with."
        raise ConfigurationError(expected("update_filter", "none", new.update_filter, hint=hint))
    if not isinstance(new.diagnose, bool):
        if not is_integer(new.diagnose) or new.diagnose < 1:
            requirement = "true, false, or an integer of at least 1"
            raise ConfigurationError(expected("diagnose", requirement, new.diagnose))
        new.diagnose = int(new.diagnose)
    if new.diagnose and new.estimate is None:
        hint = "with `estimate=None` there is nothing to compare."
        raise ConfigurationError(expected("diagnose", "false", new.diagnose, hint=hint))
    if new.estimate == "lbfgs" and new.warmup_rounds <= new.buffer_size:
        raise ConfigurationError(
            expected(
                "warmup_rounds",
                f"more than buffer_size={new.buffer_size}",
                new.warmup_rounds,
                hint="the first round gives no pair, since both models are still equal.",
            )
        )


def check_rounds(new: FedRecover, max_rounds: int) -> str | None:
    """Return what to warn of if updates are estimated in none of the rounds.

    Args:
        new: The recoverer.
        max_rounds: Rounds of the recovery.

    Raises:
        ConfigurationError: If it would start after the last of them.
    """
    if new.start_round >= max_rounds:
        requirement = f"less than the {max_rounds} rounds of the recovery"
        raise ConfigurationError(expected("start_round", requirement, new.start_round))
    rounds = range(new.start_round, max_rounds)
    if any(new.exact_reason(t, max_rounds) is None for t in rounds):
        return None
    began = f" from round {new.start_round} on" if new.start_round else ""
    return (
        f"FedRecover asks all clients in each of the {len(rounds)} rounds{began}, so it estimates "
        f"nothing and spares them nothing (warmup_rounds={new.warmup_rounds}, "
        f"final_rounds={new.final_rounds}, correction_period={new.correction_period}). HINT: lower "
        "these, or record more rounds."
    )


def check_kept(
    history: HistoryView,
    rounds: Sequence[int],
    estimated: Sequence[int],
    buffer: str,
) -> None:
    """Say what the updates that the history did not keep will cost.

    Args:
        history: The recording, and the clients that take part.
        rounds: Rounds of the recovery.
        estimated: Those of them in which updates are estimated.
        buffer: FedRecover's argument.

    Raises:
        ConfigurationError: If none is left to estimate from, or `buffer="paper"` lacks one.
    """
    keep = dict(history.manifest.keep)
    if buffer == "paper":
        kept, sent = history.count(rounds)
        if kept < sent:
            raise ConfigurationError(
                f'FedRecover(buffer="paper") needs all {sent} updates of the remaining '
                f'clients, but the history keeps {kept} ({keep=}). HINT: use buffer="paired".'
            )
    kept, sent = history.count(estimated)
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
