"""Bars as plain HTML, which fits any width by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedrec.report.table import exact_rounds

__all__ = ["cost_bars", "score_bars"]

_REASONS = {
    "warmup": "warm-up",
    "correction": "periodic correction",
    "abnormality": "abnormality fixing",
    "final": "final tuning",
    "fallback": "no usable estimate",
    "scratch": "training from scratch",
    "other": "other",
}
_SHOWN = 24


def cost_bars(methods: Sequence[Mapping[str, Any]]) -> str:
    """Draw how many rounds a client was asked in, by reason, one stacked bar per method.

    Args:
        methods: As in `results.json`.
    """
    longest = max([exact_rounds(m) for m in methods] + [1e-9])
    used = [r for r in _REASONS if any(m["exact_rounds_by_reason"].get(r) for m in methods)]
    keys = "".join(f'<li><i class="key {r}"></i>{_REASONS[r]}</li>' for r in used)
    rows = []
    for method in methods:
        parts = method["exact_rounds_by_reason"]
        pieces = "".join(
            f'<i class="{r}" style="width:{100 * parts[r] / longest:.3f}%" '
            f'title="{_REASONS[r]}: {parts[r]:.1f} rounds"></i>'
            for r in used
            if parts.get(r)
        )
        saved = "" if method["acp"] is None else f", {method['acp']:.1f} % saved"
        rows.append(
            f'<div class="bar"><span class="name">{escape(method["name"])}</span>'
            f'<span class="track">{pieces}</span>'
            f'<span class="value">{exact_rounds(method):.1f} rounds{saved}</span></div>'
        )
    return f'<ul class="legend">{keys}</ul><div class="bars">{"".join(rows)}</div>'


def score_bars(detection: Mapping[str, Any]) -> str:
    """Draw the detector's score of every client, most suspicious first.

    Args:
        detection: As in `detection.json`: `scores`, `malicious` (flagged) and `truth`.
    """
    scores = sorted(detection["scores"].items(), key=lambda item: (-item[1], item[0]))
    low, high = min(0.0, scores[-1][1]), max(0.0, scores[0][1])
    rows = []
    for client, score in scores:
        kind = "malicious" if client in detection["truth"] else "benign"
        width = 100 * (score - low) / (high - low) if high > low else 0.0
        flagged = "flagged" if client in detection["malicious"] else ""
        rows.append(
            f'<div class="score"><span class="name">{escape(client)}</span>'
            f'<span class="track"><i class="{kind}" style="width:{width:.2f}%" '
            f'title="{kind}"></i></span><span class="value">{score:.3g}</span>'
            f'<span class="flag">{flagged}</span></div>'
        )
    keys = (
        '<ul class="legend"><li><i class="key malicious"></i>malicious (ground truth)</li>'
        '<li><i class="key benign"></i>benign</li></ul>'
    )
    first, rest = "".join(rows[:_SHOWN]), "".join(rows[_SHOWN:])
    more = (
        f"<details><summary>The other {len(rows) - _SHOWN} clients</summary>"
        f'<div class="scores">{rest}</div></details>'
        if rest
        else ""
    )
    return f'{keys}<div class="scores">{first}</div>{more}'
