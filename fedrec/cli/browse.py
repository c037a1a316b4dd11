"""`fedrec history browse`: a look into a history, in the terminal or as a page."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrec.cli.parser import Options
from fedrec.history.tools.browse import Look, browse

__all__ = ["browse_command", "look_text"]

_CELL = 7
_MOST_CLIENTS = 40  # in the terminal
_PAGE_ROUNDS = 200
_PAGE_CLIENTS = 100
_LISTED = 10


def browse_command(
    args: Options, master_key: str | None, progress: Callable[[int], None]
) -> tuple[dict[str, Any], str, int]:
    """Return the look as plain values, the text for the terminal, and the exit code."""
    width = shutil.get_terminal_size().columns
    look = browse(
        args.target,
        rounds=args.rounds,
        clients=args.clients,
        most_rounds=_PAGE_ROUNDS if args.output or args.json else max(1, (width - 24) // _CELL),
        most_clients=_PAGE_CLIENTS if args.output or args.json else _MOST_CLIENTS,
        master_key=master_key,
        progress=progress,
    )
    values = {**dataclasses.asdict(look), "run": None if look.run is None else str(look.run)}
    if not args.output:
        return values, look_text(look, width), 0
    from fedrec.report.history import write_look

    return values, str(write_look(look, Path(args.output))), 0


def look_text(look: Look, width: int) -> str:
    """Return a look as lines that fit a terminal; rounds that do not fit beside go below.

    Args:
        look: The look.
        width: Columns of the terminal.
    """
    size = f"{look.num_parameters:,} parameters, {look.num_bytes / 1e6:,.1f} MB"
    lines = [
        f"History {look.path}",
        f"  {look.num_rounds:,} rounds, {look.num_clients:,} clients, {size}",
        f"  attack: {look.attack or 'none recorded'}",
    ]
    if look.sampled:
        lines += [f"  {look.sampled}", "  --rounds and --clients choose others."]
    marks = dict.fromkeys(look.malicious, "*")
    marks |= {c: marks.get(c, "") + "!" for c in look.flagged}
    names = {c: f"{c}{marks.get(c, '')}" for c in look.clients}
    label = min(max(map(len, (*names.values(), "aggregate"))), 16)
    score = _CELL if look.scores else 0
    beside = max(1, (width - label - score) // _CELL)
    for start in range(0, len(look.rounds), beside):
        part = look.rounds[start : start + beside]
        head = ["round".ljust(label), *(["score".rjust(score)] if score else [])]
        lines += ["", "".join([*head, *(f"{r.round:>{_CELL}}" for r in part)])]
        for client, name in names.items():
            cells = [_short(name, label)]
            if score:
                cells.append(_number(look.scores.get(client)))
            cells += [_cell(r.norms.get(client), client, r.refused, r.lost) for r in part]
            lines.append("".join(cells))
        for name, values in (
            ("aggregate", [_number(r.aggregate) for r in part]),
            ("asked", [f"{r.asked:>{_CELL}}" for r in part]),
            ("used", [f"{r.used:>{_CELL}}" for r in part]),
        ):
            lines.append("".join([name.ljust(label), " " * score, *values]))
    lines += ["", "Norms of updates; not asked: `.`, refused: x, not stored: ?."]
    if marks:
        lines.append("*: recorded as malicious, !: flagged by the detector.")
    reasons = [(r.round, c, why) for r in look.rounds for c, why in r.refused.items()]
    lines += [f"Refused in round {t}: {c}: {why}" for t, c, why in reasons[:_LISTED]]
    if len(reasons) > _LISTED:
        lines.append(f"and {len(reasons) - _LISTED} more.")
    return "\n".join(lines)


def _short(name: str, label: int) -> str:
    return name.ljust(label) if len(name) <= label else f"{name[: label - 3]}..."


def _cell(norm: float | None, client: str, refused: dict[str, str], lost: tuple[str, ...]) -> str:
    if norm is not None:
        return _number(norm)
    return f"{'x' if client in refused else '?' if client in lost else '.':>{_CELL}}"


def _number(value: float | None) -> str:
    """Return a number in seven columns, the first of them empty.

    Examples:
        >>> _number(0.123456), _number(1234.5), _number(2.5e-7), _number(None)
        ('  0.123', '   1234', '  2e-07', '       ')
    """
    if value is None:
        return " " * _CELL
    text = f"{value:#.3g}".removesuffix(".") if value < 1000 else f"{value:.0f}"
    return f"{text if len(text) < _CELL else f'{value:.0e}':>{_CELL}}"
