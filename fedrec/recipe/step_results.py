"""The results that a run folder keeps of each step: recording, detection, recovery."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedrec.history import HistoryStore
from fedrec.metrics import rounds_to_converge
from fedrec.types import Detection, RunResult

__all__ = ["CONVERGENCE", "detection_result", "finite", "method_result", "recording_result"]

#: Figures of a recovery that converged, if its error was computed in every round.
CONVERGENCE = ("rounds_to_converge", "exact_rounds_to_converge", "local_steps_to_converge")


def recording_result(
    result: RunResult, history: HistoryStore, *, synthetic: bool
) -> dict[str, Any]:
    """Return the result to keep of a recording, except TER and ASR.

    Args:
        result: The result of `FederatedLoop.record`.
        history: The history of the recording.
        synthetic: Whether the data set is made up and only stands in for a real one.
    """
    manifest = history.manifest
    return {
        "rounds": result.rounds,
        "seconds": result.seconds,
        "client_seconds": sum(result.client_seconds.values()),
        "synthetic_data": synthetic,
        "malicious": list(manifest.malicious),
        "execution": dict(result.execution),
        "versions": dict(manifest.versions),
        "history": {
            "bytes": history.num_bytes(),
            "rounds": len(history.rounds()),
            "clients": len(manifest.clients),
            "parameters": manifest.num_parameters,
            "codec": manifest.codec,
            "keep": dict(manifest.keep),
            "encryption": manifest.encryption,
        },
    }


def detection_result(detection: Detection, truth: Sequence[str]) -> dict[str, Any]:
    """Return the result to keep of a detection.

    Args:
        detection: The verdict.
        truth: Ids of the malicious clients.
    """
    return {
        "malicious": list(detection.malicious),
        "fnr": detection.false_negative_rate(truth),
        "fpr": detection.false_positive_rate(truth),
        "round": detection.round,
        "seen": list(detection.seen),
        "truth": list(truth),
        "scores": finite(detection.scores),
    }


def method_result(result: RunResult) -> dict[str, Any]:
    """Return the result to keep of a recovery, except TER and ASR.

    Args:
        result: The result of `FederatedLoop.recover`.
    """
    ledger = result.ledger
    cp = ledger.cp() if ledger is not None else {}
    return {
        "acp": ledger.acp() if ledger is not None and cp else None,
        "cp_min": min(cp.values(), default=None),
        "cp_max": max(cp.values(), default=None),
        "exact_rounds_by_reason": ledger.exact_rounds_by_reason() if ledger is not None else {},
        "client_bytes": ledger.total_bytes() if ledger is not None else None,
        **_convergence(result),
        "seconds": result.seconds,
        "client_seconds": dict(result.client_seconds),
        "cp": cp,
        "rounds": result.rounds,
        "diagnostics": finite(result.diagnostics),
    }


def _convergence(result: RunResult) -> dict[str, float | None]:
    """Return the rounds until the model converged, and what a client computed in them, on average.

    All are `None` if the test error is not known after every round.
    """
    rounds = None
    if len(result.curve) == result.rounds and all("ter" in row for row in result.curve):
        rounds = rounds_to_converge([row["ter"] for row in result.curve])
    costs: dict[str, float | None] = dict.fromkeys(CONVERGENCE)
    if rounds is not None and result.ledger is not None:
        ledger = result.ledger.before(rounds)
        exact = sum(ledger.exact_rounds_by_reason().values())
        costs = dict(zip(CONVERGENCE, (rounds, exact, ledger.mean_local_steps()), strict=True))
    return costs


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that are finite: JSON has no others.

    Args:
        values: Numbers by name.

    Examples:
        >>> finite({"a": 1.0, "b": float("nan")})
        {'a': 1.0}
    """
    return {key: float(value) for key, value in values.items() if math.isfinite(value)}
