"""The sections of a run's page."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from html import escape
from typing import Any

from omegaconf import OmegaConf

from fedrec.recipe.tables import name_of_recorded
from fedrec.report.bars import cost_bars, histogram, score_bars, seconds_bars, value_bars
from fedrec.report.costs import table_of_costs
from fedrec.report.curves import Series, line_chart, line_key, linear_axis, log_axis
from fedrec.report.html import breakable, facts, note, number, section, table
from fedrec.report.run import REFERENCE, Run
from fedrec.report.table import detection_text, exact_rounds, fraction, percent
from fedrec.types import EstimateError

__all__ = ["CURVES", "headline", "sections"]

#: Figures that have curves, with the headings of their sections.
CURVES = {
    "ter": "Test error rate (TER, %) by round",
    "asr": "Attack success rate (ASR, %) by round",
}

_COLUMNS = [
    *("Model", "TER %", "ASR %", "Distance", "ACP %", "CP % min-max"),
    *("Exact rounds", "Client MB", "Seconds"),
]


def headline(run: Run) -> str:
    """Return the line below the name of a run, with its size and its detection."""
    history = run.results["history"]
    text = (
        f"{history['clients']} clients, {history['rounds']} rounds, "
        f"{history['bytes'] / 1e6:,.1f} MB of history. "
        f"{detection_text(run.results['detection'])}"
    )
    return f"<p>{escape(text)}</p>{synthetic(run)}"


def synthetic(run: Run) -> str:
    """Return a warning if a run's data set is made up, else an empty text."""
    if not run.results.get("synthetic_data"):
        return ""
    node = run.results["recipe"].get("data")
    name = str(node["class_path"] if isinstance(node, Mapping) else node).rpartition(".")[2]
    return (
        f'<p class="warning">Synthetic data: {escape(name)} is made up. These figures say nothing '
        "about the real data set that it stands in for.</p>"
    )


def sections(run: Run, styles: Mapping[str, str]) -> str:
    """Return all sections of a run.

    Args:
        run: The run.
        styles: CSS class by method.
    """
    parts = [
        section("Summary", _warnings(run) + _summary(run, styles) + _failures(run)),
        section("Metrics", _metrics(run, styles)),
        section("Beside training from scratch", _figures(run, styles)),
        *(section(title, _curves(run, figure, styles)) for figure, title in CURVES.items()),
        section("What recovery costs clients, by reason", _cost(run)),
        section("Cost saving over clients", _savings(run, styles)),
        section("What recovery costs each client", _clients(run)),
        section("Estimated against exact updates", _estimates(run, styles)),
        section("Detection", _detection(run)),
        section("History", _history(run)),
        section("Wall-clock time", _seconds(run)),
        section("Settings", f'<pre tabindex="0">{escape(_yaml(run))}</pre>'),
        section(
            "Execution and versions",
            facts(
                "Execution and versions", {**run.results["execution"], **run.results["versions"]}
            ),
        ),
        section("Do it again", _again(run)),
    ]
    return "".join(parts)


def _summary(run: Run, styles: Mapping[str, str]) -> str:
    poisoned = run.results["poisoned"]
    rows = [
        [
            f"{line_key('poisoned')}{name_of_recorded(run.results)} model",
            number(poisoned["ter"], percent(poisoned["ter"])),
            number(poisoned["asr"], percent(poisoned["asr"])),
            _distance(poisoned),
            *[""] * 5,
        ]
    ]
    for method in run.methods:
        style, size = styles[method["name"]], method.get("client_bytes")
        remark = " <small>(reference)</small>" if style == REFERENCE else ""
        cp = f"{percent(method['cp_min'])}-{percent(method['cp_max'])}"
        rows.append(
            [
                f"{line_key(style)}{breakable(method['name'])}{remark}",
                number(method["ter"], percent(method["ter"])),
                number(method["asr"], percent(method["asr"])),
                _distance(method),
                number(method["acp"], percent(method["acp"])),
                cp if method["cp_min"] is not None else "-",
                number(exact_rounds(method), f"{exact_rounds(method):.1f}"),
                number(size, "-" if size is None else f"{size / 1e6:,.1f}"),
                number(method["seconds"], f"{method['seconds']:.1f}"),
            ]
        )
    heads, names = _COLUMNS, "TER and ASR"
    if all(model["asr"] is None for model in (poisoned, *run.methods)):
        heads, names = _COLUMNS[:2] + _COLUMNS[3:], "TER"
        rows = [row[:2] + row[3:] for row in rows]
    return table("Summary of all models", heads, rows) + note(
        f"{names}: on the whole test set. Distance: between the weights and those of training from "
        "scratch, divided by the length of the latter. ACP: the part of the rounds in which a "
        "client was not asked, on average. CP: the same for single clients. Exact rounds: rounds "
        "in which a client was asked, on average. Client MB: what all clients receive and send "
        "during recovery."
    )


def _warnings(run: Run) -> str:
    """Return why models cannot be compared."""
    texts = run.results.get("warnings", [])
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def _failures(run: Run) -> str:
    """Return the reasons of the methods that failed, and so are missing in the summary."""
    return "".join(
        f'<p class="warning">{escape(f"{label} failed: {reason}")}</p>'
        for label, reason in run.results.get("failures", {}).items()
    )


def _distance(model: Mapping[str, Any]) -> str:
    return number(model.get("relative_distance"), fraction(model.get("relative_distance")))


def _metrics(run: Run, styles: Mapping[str, str]) -> str:
    """Return a table of the recipe's own metrics."""
    name = f"{name_of_recorded(run.results)} model"
    models = [{"name": name, **run.results["poisoned"]}, *run.methods]
    labels = list(dict.fromkeys(label for model in models for label in model.get("metrics", {})))
    if not labels:
        return ""
    rows = []
    for model in models:
        values = [model.get("metrics", {}).get(label) for label in labels]
        key = line_key(styles.get(model["name"], "poisoned"))
        cells = [number(value, fraction(value)) for value in values]
        rows.append([f"{key}{breakable(model['name'])}", *cells])
    return table("Metrics of all models", ("Model", *labels), rows) + note(
        "On the whole test set. For a metric that asks about members, these are the training data "
        "of the excluded clients."
    )


def _figures(run: Run, styles: Mapping[str, str]) -> str:
    """Draw TER, ASR and ACP of every model, with a line at the value of train-from-scratch."""
    reference, poisoned = run.reference, run.results["poisoned"]
    if not run.methods:
        return ""
    models = [{"name": f"{name_of_recorded(run.results)} model", **poisoned}, *run.methods]
    blocks = []
    for figure, title, most in (
        ("ter", "Test error rate (TER, %)", 0.0),
        ("asr", "Attack success rate (ASR, %)", 0.0),
        ("acp", "Average cost-saving percentage (ACP, %)", 1.0),
    ):
        rows = [
            (m["name"], styles.get(m["name"], "poisoned"), m[figure], percent(m[figure]))
            for m in models
            if m.get(figure) is not None
        ]
        if not rows:
            continue
        line = None if reference is None or figure == "acp" else reference[figure]
        blocks.append(f"<div><h3>{title}</h3>{value_bars(rows, most, line)}</div>")
    text = "" if reference is None else f" The line across is {escape(reference['name'])}."
    if poisoned["asr"] is not None:
        text += " A model that predicts nothing well has a low ASR, too."
    return f'<div class="side">{"".join(blocks)}</div>' + note(f"On the whole test set.{text}")


def _curves(run: Run, figure: str, styles: Mapping[str, str]) -> str:
    series = run.curves(figure, styles)
    return line_chart(series, CURVES[figure].removesuffix(" by round")) if series else ""


def _cost(run: Run) -> str:
    if not run.methods:
        return ""
    return cost_bars(run.methods) + note(
        "Rounds in which a remaining client had to compute an update, on average."
    )


def _savings(run: Run, styles: Mapping[str, str]) -> str:
    blocks, same = [], []
    for method in run.methods:
        name = method["name"]
        savings = [100 * cp for cp in run.cost_savings(name).values()]
        if savings and max(savings) - min(savings) < 1e-9:
            text = f"{savings[0]:.1f} % for each of {len(savings)} clients"
            same.append([f"{line_key(styles[name])}{breakable(name)}", text])
        elif savings:
            drawn = histogram(savings, "%", styles[name])
            blocks.append(f"<div><h3>{escape(name)}</h3>{drawn}</div>")
    if not blocks and not same:
        return ""
    drawn = f'<div class="side">{"".join(blocks)}</div>' if blocks else ""
    listed = table("Methods that spare all clients the same", (), same, "facts") if same else ""
    return (
        drawn
        + listed
        + note("How many of the remaining clients were not asked in which part of their rounds.")
    )


def _clients(run: Run) -> str:
    """Return a table of what each client was asked for, for each method that asks."""
    reference = run.reference
    scratch = {} if reference is None else run.costs(reference["name"])
    blocks = []
    for method in run.methods:
        spent = run.costs(method["name"])
        if not spent or method is reference:
            continue
        # Clients that were spared everything are listed, too.
        spent = {c: spent.get(c, (0, 0, 0.0)) for c in {**scratch, **spent}}
        heads, rows = table_of_costs(spent, scratch)
        name = escape(method["name"])
        cells = [[escape(client), *rest] for client, *rest in rows]
        listed = table(f"Costs by client of {method['name']}", heads, cells)
        blocks.append(f"<details><summary>{name}</summary>{listed}</details>")
    if not blocks:
        return ""
    return "".join(blocks) + note(
        "For each client: how often it was asked, and what it received and sent. Live clients also "
        "report seconds."
    )


def _estimates(run: Run, styles: Mapping[str, str]) -> str:
    """Draw the errors of estimates of the methods for which they were measured."""
    rows, errors, cosines = [], [], []
    for method in reversed(run.methods):
        compared = run.estimate_errors(method["name"])
        if not compared:
            continue
        name, style = method["name"], styles[method["name"]]
        rounds: dict[int, list[EstimateError]] = {}
        for row in compared:
            rounds.setdefault(row.round, []).append(row)
        worst = [(t, max(r.relative_error for r in group)) for t, group in rounds.items()]
        middle = [
            (t, statistics.median(r.relative_error for r in group)) for t, group in rounds.items()
        ]
        errors += [
            Series(f"{name}, worst client", f"{style} faint", worst),
            Series(f"{name}, median", style, middle),
        ]
        lowest = [(t, min(r.cosine for r in group)) for t, group in rounds.items()]
        central = [(t, statistics.median(r.cosine for r in group)) for t, group in rounds.items()]
        cosines += [
            Series(f"{name}, worst client", f"{style} faint", lowest),
            Series(f"{name}, median", style, central),
        ]
        all_errors = [r.relative_error for r in compared]
        all_cosines = [r.cosine for r in compared]
        figures = [statistics.median(all_errors), max(all_errors)]
        figures += [statistics.median(all_cosines), min(all_cosines)]
        cells = [number(value, f"{value:.3f}") for value in figures]
        rows.append([f"{line_key(style)}{breakable(name)}", f"{len(compared):,}", *cells])
    if not rows:
        return ""
    heads = (
        "Method",
        "Compared",
        "Error, median",
        "Error, worst",
        "Cosine, median",
        "Cosine, worst",
    )
    flat = [v for s in errors for _, v in s.points], [v for s in cosines for _, v in s.points]
    return (
        table("Estimated against exact updates", heads, rows[::-1])
        + "<h3>Relative error by round</h3>"
        + line_chart(errors, "Relative error of estimated updates", log_axis(flat[0]))
        + "<h3>Cosine by round</h3>"
        + line_chart(cosines, "Cosine of estimated and exact updates", linear_axis(flat[1]))
        + note(
            "Relative error: distance between a client's estimated and its exact update, divided "
            "by the length of the exact one. Only estimates that were used are compared. This is "
            "for simulations (<code>diagnose</code>): it costs no client anything, and does not "
            "change the recovery."
        )
    )


def _detection(run: Run) -> str:
    detection = run.detection
    if detection is None:
        return ""
    text = f"<p>{escape(detection_text(run.results['detection']))}</p>"
    seen = set(detection.get("seen", detection["scores"]))
    truth, flagged = set(detection["truth"]) & seen, set(detection["malicious"])
    for title, clients in (
        ("Missed (false negatives)", sorted(truth - flagged)),
        ("False alarms (false positives)", sorted(flagged - truth)),
    ):
        names = ", ".join(clients) if clients else "none"
        text += f"<p>{title}: {escape(names)}.</p>"
    return text + (score_bars(detection) if detection["scores"] else "")


def _history(run: Run) -> str:
    history = run.results["history"]
    rows = {
        "size on disk": f"{history['bytes'] / 1e6:,.1f} MB",
        "size per round": f"{history['bytes'] / 1e6 / max(history['rounds'], 1):,.3f} MB",
        "rounds": history["rounds"],
        "clients": history["clients"],
    }
    if "codec" in history:
        kept = ", ".join(f"{key}={value}" for key, value in history["keep"].items())
        rows |= {
            "parameters of the model": f"{history['parameters']:,}",
            "codec of updates": history["codec"],
            "updates kept": kept or "all",
            "encryption": history["encryption"] or "none",
        }
    return facts("History", rows)


def _seconds(run: Run) -> str:
    recording = run.results.get("recording", {})
    steps = []
    if recording.get("client_seconds") is not None:
        clients = {"record": recording["client_seconds"]}
        steps.append(("Recording", recording["seconds"], clients))
    steps += [
        (method["name"], method["seconds"], method["client_seconds"])
        for method in run.methods
        if method.get("client_seconds") is not None
    ]
    if not steps:
        return ""
    return seconds_bars(steps) + note(
        "Clients are simulated: their seconds are those of this machine, for all of them together, "
        "with the attack. Server: everything else, also reading and writing the history. "
        "Evaluation is left out. If the recording was interrupted, this is its last part."
    )


def _yaml(run: Run) -> str:
    recipe: Any = dict(run.results["recipe"])
    return OmegaConf.to_yaml(OmegaConf.create(recipe))


def _again(run: Run) -> str:
    """Return the command that repeats the run."""
    command = ["fedrec", "run", str(run.folder / "recipe.yaml"), f"name={run.name}-again"]
    return f'<pre tabindex="0">{escape(shlex.join(command))}</pre>' + note(
        "The same versions, execution and seed give the same figures. "
        "A recipe with classes of your own also needs <code>--allow</code>."
    )
