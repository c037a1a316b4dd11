"""The page of a look into a history: who took part, and how large updates were."""

from __future__ import annotations

import math
import statistics
from html import escape
from pathlib import Path

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.history.tools.browse import Look, RoundLook
from fedrec.report.curves import Series, line_chart, log_axis
from fedrec.report.html import breakable, document, facts, note, number, section, table

__all__ = ["write_look"]

_ROW = 16  # pixels, as in the style sheet


def write_look(look: Look, output: Path) -> Path:
    """Write the page of a look.

    Args:
        look: The look.
        output: File to write.

    Returns:
        The file.
    """
    header = (
        f"<p>{look.num_clients:,} clients, {look.num_rounds:,} rounds, "
        f"{look.num_bytes / 1e6:,.1f} MB. {escape(look.sampled)}</p>"
    )
    parts = [
        section("Norms of updates by client and round", _heat_map(look)),
        section("Norms by round", _curves(look)),
        section("Clients", _clients(look)),
        section("Rounds", _rounds(look)),
        section("History", _facts(look)),
    ]
    name = Path(look.path).name if look.run is None else look.run.name
    if look.run is not None and output.resolve().is_relative_to(look.run.resolve()):
        register_derived(output)  # the page shows norms of single clients
    write_atomically(output, document(name, "fedrec history", header, "".join(parts)))
    return output


def _heat_map(look: Look) -> str:
    if not look.rounds:
        return "<p>No round is stored yet.</p>"
    norms = [norm for r in look.rounds for norm in r.norms.values() if norm > 0]
    low, high = (min(norms), max(norms)) if norms else (1.0, 1.0)
    cells = "".join(
        _cell(client, x, y, r, low, high)
        for y, client in enumerate(look.clients)
        for x, r in enumerate(look.rounds)
    )
    names = "".join(
        f'<li{_marked(look, client)} title="{escape(client)}">{escape(client)}</li>'
        for client in look.clients
    )
    wide, rows = len(look.rounds), len(look.clients)
    first, last = look.rounds[0].round, look.rounds[-1].round
    keys = (
        f'<li><i class="key heat" style="opacity:.12"></i>{low:.3g}</li>'
        f'<li><i class="key heat"></i>{high:.3g}, on a logarithmic scale</li>'
        '<li><i class="key bad"></i>refused</li><li><i class="key lost"></i>not stored</li>'
        '<li><i class="key none"></i>not asked</li>'
    )
    said = "Names in red: malicious, by the recorded truth. " if look.malicious else ""
    said += "Underlined: flagged by the detector. " if look.flagged else ""
    return (
        f'<ul class="legend">{keys}</ul><div class="heatmap"><ol>{names}</ol>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Norms of updates">'
        f'<svg viewBox="0 0 {wide} {rows}" preserveAspectRatio="none" role="img" '
        f'aria-label="Norms from {low:.3g} to {high:.3g}; the tables below have figures" '
        f'style="height:{_ROW * rows}px;min-width:{3 * wide}px">{cells}</svg>'
        f'<p class="ends" style="min-width:{3 * wide}px"><span>round {first}</span><span>{last}</span></p></div></div>'
    ) + (note(said) if said else "")


def _cell(client: str, x: int, y: int, r: RoundLook, low: float, high: float) -> str:
    norm = r.norms.get(client)
    if norm is not None:
        range_ = math.log(high / low) if high > low else 0.0
        place = 1.0 if not range_ else math.log(max(norm, low) / low) / range_
        look, said = f'class="heat" fill-opacity="{0.12 + 0.88 * place:.2f}"', f"{norm:.4g}"
    elif client in r.refused:
        look, said = 'class="bad"', f"refused: {r.refused[client]}"
    elif client in r.lost:
        look, said = 'class="lost"', "not stored"
    else:
        return ""
    title = escape(f"{client}, round {r.round}: {said}")
    return f'<rect {look} x="{x}" y="{y}" width="1" height="1"><title>{title}</title></rect>'


def _marked(look: Look, client: str) -> str:
    names = [
        name
        for name, clients in (("wrong", look.malicious), ("flagged", look.flagged))
        if client in clients
    ]
    return f' class="{" ".join(names)}"' if names else ""


def _curves(look: Look) -> str:
    malicious, series = set(look.malicious), list[Series]()
    others = [c for c in look.clients if c not in malicious]
    for label, style, clients in (
        ("Malicious clients, median", "method-1", look.malicious),
        ("Other clients, median" if malicious else "Clients, median", "method-0", others),
    ):
        middle = [
            (r.round, statistics.median(known))
            for r in look.rounds
            if (known := [r.norms[c] for c in clients if c in r.norms])
        ]
        series.append(Series(label, style, middle))
    aggregates = [(r.round, r.aggregate) for r in look.rounds if r.aggregate is not None]
    series.insert(0, Series("Aggregate", "scratch-line", aggregates))
    series = [s for s in series if s.points]
    values = [value for s in series for _, value in s.points]
    return line_chart(series, "Norm", log_axis(values)) if values else ""


def _clients(look: Look) -> str:
    heads = ["Client", "Samples", "Used", "Refused", "Norm, median", "Norm, largest"]
    if look.scores:
        heads.append("Score")
    rows = []
    for client, samples in look.clients.items():
        norms = [r.norms[client] for r in look.rounds if client in r.norms]
        refused = sum(client in r.refused for r in look.rounds)
        used = len(norms) + sum(client in r.lost for r in look.rounds)
        middle, most = (statistics.median(norms), max(norms)) if norms else (None, None)
        words = [
            word
            for word, clients in (("malicious", look.malicious), ("flagged", look.flagged))
            if client in clients
        ]
        remark = f" <small>({', '.join(words)})</small>" if words else ""
        cells = [f"{breakable(client)}{remark}", f"{samples:,}", str(used), str(refused)]
        cells += [_number(middle), _number(most)]
        rows.append([*cells, *([_number(look.scores.get(client))] if look.scores else [])])
    return table("Clients", heads, rows) + note("Of the rounds that are shown.")


def _rounds(look: Look) -> str:
    rows = [
        [str(r.round), str(r.asked), str(r.used), _number(r.aggregate), _reasons(r)]
        for r in look.rounds
    ]
    if not rows:
        return ""
    shown = table("Rounds", ("Round", "Asked", "Used", "Aggregate", "Refused"), rows)
    return f"<details><summary>{len(rows):,} rounds</summary>{shown}</details>"


def _reasons(r: RoundLook) -> str:
    return escape("; ".join(f"{client}: {why}" for client, why in r.refused.items()))


def _facts(look: Look) -> str:
    run = {} if look.run is None else {"run": str(look.run)}
    return facts(
        "History",
        {
            **run,
            "rounds": f"{look.num_rounds:,}",
            "clients": f"{look.num_clients:,}",
            "parameters of the model": f"{look.num_parameters:,}",
            "size on disk": f"{look.num_bytes / 1e6:,.1f} MB",
            "attack": look.attack or "none recorded",
            "flagged": ", ".join(look.flagged) or "nobody",
        },
    )


def _number(value: float | None) -> str:
    return number(value, "-" if value is None else f"{value:.3g}")
