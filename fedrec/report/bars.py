"""Bar charts as plain HTML, which adapts to any width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedrec.report.curves import ticks
from fedrec.report.html import number
from fedrec.report.table import exact_rounds, percent

__all__ = ["cost_bars", "histogram", "score_bars", "seconds_bars", "value_bars"]

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
_BINS = 8
# The verdict on a client, by (is malicious, was flagged).
_VERDICTS = {
    (True, True): "found",
    (True, False): "missed",
    (False, True): "false alarm",
    (False, False): "",
}


def cost_bars(methods: Sequence[Mapping[str, Any]], longest: float = 0.0) -> str:
    """Draw the rounds a client was asked in, by reason, as one stacked bar per method.

    Args:
        methods: The methods of `results.json`.
        longest: Value of the full width, if it is more than the longest bar.
    """
    bars = []
    for method in methods:
        text = f"{exact_rounds(method):.1f} rounds"
        if method["acp"] is not None:
            text += f", {number(method['acp'], percent(method['acp']))} % saved"
        bars.append((method["name"], method["exact_rounds_by_reason"], text))
    return _stacked(bars, _REASONS, "rounds", longest)


def seconds_bars(steps: Sequence[tuple[str, float, Mapping[str, float]]]) -> str:
    """Draw the wall-clock seconds of steps: of the server, and of clients by reason.

    Args:
        steps: For each step its name, its seconds, and the seconds spent by clients, by reason or
            under `"record"`.
    """
    labels = {"server": "server", "record": "clients, recording"}
    labels |= {reason: f"clients, {text}" for reason, text in _REASONS.items()}
    bars = []
    for name, seconds, clients in steps:
        asked = sum(clients.values())
        parts = {"server": max(seconds - asked, 0.0), **clients}
        text = f"{seconds:.1f} s, {asked:.1f} by clients"
        bars.append((name, parts, text))
    return _stacked(bars, labels, "s", 0.0)


def _stacked(
    bars: Sequence[tuple[str, Mapping[str, float], str]],
    labels: Mapping[str, str],
    unit: str,
    longest: float,
) -> str:
    """Draw bars of (name, parts, HTML behind the bar); parts are in the order of the labels."""
    longest = max([longest, *(sum(parts.values()) for _, parts, _ in bars), 1e-9])
    used = [key for key in labels if any(parts.get(key) for _, parts, _ in bars)]
    keys = "".join(f'<li><i class="key {key}"></i>{labels[key]}</li>' for key in used)
    rows = []
    for name, parts, text in bars:
        drawn = [key for key in used if parts.get(key)]
        pieces = "".join(
            f'<i class="{key}" style="width:{100 * parts[key] / longest:.3f}%" '
            f'title="{labels[key]}: {parts[key]:.1f} {unit}"></i>'
            for key in drawn
        )
        listed = ", ".join(f"{labels[key]} {parts[key]:.1f} {unit}" for key in drawn) or "none"
        rows.append(
            f'<div class="bar"><span class="name">{escape(name)}</span>'
            f'<span class="track" role="img" aria-label="{escape(listed)}">{pieces}</span>'
            f'<span class="value">{text}</span></div>'
        )
    return f'<ul class="legend">{keys}</ul><div class="bars">{"".join(rows)}</div>'


def value_bars(
    rows: Sequence[tuple[str, str, float, str]], most: float, reference: float | None
) -> str:
    """Draw one figure of every model, with a line across at the value of the reference.

    Args:
        rows: For each model its name, CSS class, value, and the value as text.
        most: Value of the full width, if it is more than the largest value.
        reference: Value of the reference; `None` for no line.
    """
    most = max([most, *(value for _, _, value, _ in rows), 1e-9])
    line = "" if reference is None else f'<b style="left:{100 * reference / most:.3f}%"></b>'
    drawn = "".join(
        f'<div class="bar figure"><span class="name">{escape(name)}</span>'
        f'<span class="track" aria-hidden="true"><i class="fill {style}" '
        f'style="width:{100 * max(value, 0.0) / most:.3f}%"></i>{line}</span>'
        f'<span class="value">{number(value, text)}</span></div>'
        for name, style, value, text in rows
    )
    return f'<div class="bars">{drawn}</div>'


def histogram(values: Sequence[float], unit: str, style: str) -> str:
    """Draw the number of clients by value, one bar per interval.

    Args:
        values: One value per client, not all of them the same.
        unit: Unit behind the numbers.
        style: CSS class of the bars.
    """
    low, high = min(values), max(values)
    step = ticks(high - low, _BINS)[1]
    first = math.floor(low / step + 1e-9)
    counts: dict[int, int] = {}
    for value in values:
        place = math.floor(value / step + 1e-9)
        counts[place] = counts.get(place, 0) + 1
    most = max(counts.values())
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    rows = []
    for place in range(first, max(counts) + 1):
        count = counts.get(place, 0)
        plural = "client" if count == 1 else "clients"
        rows.append(
            f'<div class="bin"><span class="name">{place * step:.{digits}f} to '
            f"{(place + 1) * step:.{digits}f} {unit}</span>"
            f'<span class="track" aria-hidden="true"><i class="fill {style}" '
            f'style="width:{100 * count / most:.2f}%"></i></span>'
            f'<span class="value">{count} {plural}</span></div>'
        )
    return f'<div class="bins">{"".join(rows)}</div>'


def score_bars(detection: Mapping[str, Any]) -> str:
    """Draw the detector's score of every client, most suspicious first.

    Args:
        detection: The result of `detection.json`: `scores`, `malicious` (flagged) and `truth`.
    """
    scores = sorted(detection["scores"].items(), key=lambda item: (-item[1], item[0]))
    low, high = min(0.0, scores[-1][1]), max(0.0, scores[0][1])
    rows = []
    for client, score in scores:
        malicious = client in detection["truth"]
        kind = "malicious" if malicious else "benign"
        width = 100 * (score - low) / (high - low) if high > low else 0.0
        verdict = _VERDICTS[malicious, client in detection["malicious"]]
        wrong = " wrong" if verdict in ("missed", "false alarm") else ""
        name = escape(client)
        rows.append(
            f'<div class="score"><span class="name" title="{name}">{name}</span>'
            f'<span class="track" role="img" aria-label="{kind}"><i class="{kind}" '
            f'style="width:{width:.2f}%" title="{kind}"></i></span>'
            f'<span class="value">{number(score, f"{score:#.3g}")}</span>'
            f'<span class="flag{wrong}">{verdict}</span></div>'
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
