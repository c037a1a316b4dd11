"""A page that shows a run: no network, no other file, readable on a phone and in the dark."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedrec._files import write_atomically
from fedrec.metrics_log import read_metrics
from fedrec.recipe.schema import folder_name, label_of
from fedrec.report.bars import cost_bars, score_bars
from fedrec.report.curves import Series, line_chart, line_key
from fedrec.report.table import detection_text, exact_rounds, fraction, percent

__all__ = ["write_report"]


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder.

    Args:
        folder: A run folder with `results.json`.

    Returns:
        The file.
    """
    folder = Path(folder)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    path = folder / "report.html"
    write_atomically(path, _page(folder, results).encode())
    return path


def _page(folder: Path, results: Mapping[str, Any]) -> str:
    name = escape(str(results["recipe"]["name"]))
    files = resources.files("fedrec.report")
    style = (files / "page.css").read_text(encoding="utf-8")
    script = (files / "page.js").read_text(encoding="utf-8")
    # Only this very script may run, whatever a recipe has put into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = [
        _section("Summary", _summary(results)),
        _curves(folder, results, "ter", "Test error rate (TER) by round"),
        _curves(folder, results, "asr", "Attack success rate (ASR) by round"),
        _cost(results["methods"]),
        _detection(folder, results["detection"]),
        _section("Settings", _settings(results["recipe"])),
        _section("Execution and versions", _facts(results)),
        _section("Do it again", _again(folder, results["recipe"])),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name} - fedrec</title><style>{style}</style></head>"
        f"<body><header><p>fedrec run</p><h1>{name}</h1>{_headline(results)}</header>"
        f"<main>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _headline(results: Mapping[str, Any]) -> str:
    history = results["history"]
    megabytes = history["bytes"] / 1e6
    return (
        f"<p>{history['clients']} clients, {history['rounds']} rounds, "
        f"{megabytes:,.1f} MB of history. {escape(detection_text(results['detection']))}</p>"
    )


def _summary(results: Mapping[str, Any]) -> str:
    heads = ("TER", "ASR", "ACP %", "CP % min-max", "Exact rounds", "Seconds")
    head = "".join(f"<th>{h}</th>" for h in heads)
    poisoned = results["poisoned"]
    rows = [
        _row("Poisoned model", "poisoned", [fraction(poisoned["ter"]), fraction(poisoned["asr"])])
    ]
    styles = _styles(results)
    for method in results["methods"]:
        cells = [
            fraction(method["ter"]),
            fraction(method["asr"]),
            percent(method["acp"]),
            f"{percent(method['cp_min'])}-{percent(method['cp_max'])}",
            f"{exact_rounds(method):.1f}",
            f"{method['seconds']:.1f}",
        ]
        rows.append(_row(method["name"], styles[method["name"]], cells))
    return (
        f'<div class="scroll"><table><thead><tr><th>Model</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        "<p class=note>TER and ASR on the whole test set. ACP: rounds a client is spared, on "
        "average, compared to training from scratch; CP: the same for single clients. Exact "
        "rounds: rounds a client computes in, on average.</p>"
    )


def _row(name: str, style: str, cells: Sequence[str]) -> str:
    swatch = line_key(style)
    note = " <small>(reference)</small>" if style == "scratch-line" else ""
    padded = [*cells, *[""] * (6 - len(cells))]
    return (
        f"<tr><th>{swatch}{escape(name)}{note}</th>{''.join(f'<td>{c}</td>' for c in padded)}</tr>"
    )


def _styles(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the CSS class of every method; a method keeps its colour throughout the page."""
    styles: dict[str, str] = {}
    for node in results["recipe"].get("recoverers") or []:
        path = node["class_path"] if isinstance(node, Mapping) else node
        reference = str(path).rpartition(".")[2] == "TrainFromScratch"
        taken = sum(style.startswith("method-") for style in styles.values())
        styles[label_of(node)] = "scratch-line" if reference else f"method-{taken % 8}"
    return styles


def _curves(folder: Path, results: Mapping[str, Any], figure: str, title: str) -> str:
    styles = _styles(results)
    methods = [m["name"] for m in results["methods"]]
    # Drawn from the back to the front: the recording, the references, the first method on top.
    series = [Series("Poisoned recording", "poisoned", _points(folder / "record", figure))]
    for name in reversed(methods):
        points = _points(folder / "recover" / folder_name(name), figure)
        reference = styles[name] == "scratch-line"
        label = f"{name} (reference)" if reference else name
        series.append(Series(label, styles[name], points))
    series = [s for s in series if s.points]
    return _section(title, line_chart(series, title)) if series else ""


def _points(folder: Path, figure: str) -> list[tuple[float, float]]:
    rows = read_metrics(folder / "metrics.csv")
    return [(row["round"], row[figure]) for row in rows if figure in row]


def _cost(methods: Sequence[Mapping[str, Any]]) -> str:
    if not methods:
        return ""
    note = (
        "<p class=note>Rounds in which a remaining client had to compute an update, on average.</p>"
    )
    return _section("What recovery costs clients, by reason", cost_bars(methods) + note)


def _detection(folder: Path, detection: Mapping[str, Any] | None) -> str:
    if detection is None:
        return ""
    stored = json.loads((folder / "detection.json").read_text(encoding="utf-8"))["result"]
    text = f"<p>{escape(detection_text(detection))}</p>"
    return _section("Detection", text + (score_bars(stored) if stored["scores"] else ""))


def _settings(recipe: Mapping[str, Any]) -> str:
    return f"<pre>{escape(OmegaConf.to_yaml(OmegaConf.create(dict(recipe))))}</pre>"


def _facts(results: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in {**results["execution"], **results["versions"]}.items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def _again(folder: Path, recipe: Mapping[str, Any]) -> str:
    command = ["fedrec", "run", str(folder / "recipe.yaml"), f"name={recipe['name']}-again"]
    return (
        f"<pre>{escape(shlex.join(command))}</pre>"
        "<p class=note>With the same versions, execution and seed, the same figures come out. "
        "A recipe with classes of your own needs <code>--allow</code> as well.</p>"
    )
