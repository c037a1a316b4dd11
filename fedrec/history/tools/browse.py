"""A look into a history: who was asked, who sent what, and how large updates were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.exceptions import ConfigurationError, expected
from fedrec.history.base import HistoryStore
from fedrec.history.manifest import FLOAT_BYTES
from fedrec.history.tools.frame import update_figures
from fedrec.history.tools.opening import history_folder, open_history

__all__ = ["Look", "RoundLook", "browse", "evenly", "select"]

# What a look reads at most, unless rounds or clients are named.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RoundLook:
    """One round of a look.

    Args:
        round: Round $t$, 0-based.
        asked: How many clients were asked.
        used: How many updates were aggregated.
        aggregate: Norm of the aggregate, `None` if no update of the round was read.
        refused: Why updates were not used, by client; of the clients of the look.
        norms: Norms of updates by client; those that can be read, of the clients of the look.
        lost: Clients of the look whose updates were aggregated and are not stored.
    """

    round: int
    asked: int
    used: int
    aggregate: float | None
    refused: dict[str, str]
    norms: dict[str, float]
    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Look:
    """Rounds and clients of a history, with the norms of their updates.

    Args:
        path: Directory of the history.
        run: Run folder that it lies in, or `None`.
        num_rounds: Rounds that are stored.
        num_clients: Clients of the recording.
        num_parameters: $d$.
        num_bytes: Size of the file.
        attack: Name of the recorded attack, or `None`.
        clients: Clients of the look, in the order of the recording, with their numbers of samples.
        malicious: The recorded truth, of these clients.
        flagged: Whom the run's detector flagged, of these clients.
        scores: The detector's score by client.
        rounds: Rounds of the look, in order.
    """

    path: str
    run: Path | None
    num_rounds: int
    num_clients: int
    num_parameters: int
    num_bytes: int
    attack: str | None
    clients: dict[str, int]
    malicious: tuple[str, ...]
    flagged: tuple[str, ...]
    scores: dict[str, float]
    rounds: tuple[RoundLook, ...]

    @property
    def sampled(self) -> str:
        """A sentence on what is left out; empty if nothing is."""
        parts = [
            f"{len(shown):,} of {total:,} {name}"
            for shown, total, name in (
                (self.rounds, self.num_rounds, "rounds"),
                (self.clients, self.num_clients, "clients"),
            )
            if len(shown) < total
        ]
        return f"A part of the history: {' and '.join(parts)}." if parts else ""


def browse(
    path: str | Path,
    *,
    rounds: str | None = None,
    clients: str | None = None,
    most_rounds: int,
    most_clients: int,
    master_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Look:
    """Read rounds of a history, one after the other.

    Args:
        path: The history, or the run folder it lies in.
        rounds: Rounds to read, such as `0,5,10:20` (see `select`); by default all or, of many,
            some that lie evenly.
        clients: Ids of clients, with commas between them; by default all or, of many, some that
            lie evenly, those that are malicious or were flagged among them.
        most_rounds: The most rounds where they are not named.
        most_clients: The most clients where they are not named.
        master_key: Where the master key of an encrypted history comes from.
        progress: Called with the number of rounds that are left.

    Raises:
        ConfigurationError: If a round or a client is not in the history.
        HistoryError: If the history cannot be read.
    """
    folder = history_folder(path)
    run = folder.parent if (folder.parent / "recipe.yaml").exists() else None
    detection = _detection(run)
    with open_history(folder, master_key=master_key) as history:
        manifest, stored = history.manifest, len(history.rounds())
        flagged = [c for c in detection.get("malicious", ()) if c in manifest.clients]
        if clients is None:
            first = {*manifest.malicious, *flagged}
            chosen = _sampled(list(manifest.clients), first, most_clients)
        else:
            chosen = _named(clients, list(manifest.clients))
        if rounds is None:
            size = FLOAT_BYTES * manifest.num_parameters * (len(chosen) + 2)
            most = min(most_rounds, max(2, _MOST_BYTES // size))
            numbers = evenly(range(stored), most)
        else:
            numbers = select(rounds, stored)
        looks = []
        for done, t in enumerate(numbers):
            looks.append(_look(history, t, chosen))
            if progress is not None:
                progress(len(numbers) - done - 1)
        attack = None if manifest.attack is None else manifest.attack.get("class_path", "")
        scores = detection.get("scores") or {}
        return Look(
            path=str(folder),
            run=run,
            num_rounds=stored,
            num_clients=len(manifest.clients),
            num_parameters=manifest.num_parameters,
            num_bytes=history.num_bytes(),
            attack=None if attack is None else str(attack).rpartition(".")[2],
            clients={c: manifest.clients[c] for c in chosen},
            malicious=tuple(c for c in chosen if c in manifest.malicious),
            flagged=tuple(c for c in chosen if c in flagged),
            scores={c: float(scores[c]) for c in chosen if c in scores},
            rounds=tuple(looks),
        )


def _look(history: HistoryStore, t: int, clients: Sequence[str]) -> RoundLook:
    index, wanted = history.index(t), frozenset(clients)
    kept = [c for c in index.kept if c in wanted]
    figures = update_figures(history, t, kept)
    return RoundLook(
        round=t,
        asked=len(index.cohort),
        used=len(index.present),
        aggregate=figures.aggregate,
        refused={c: reason for c, reason in index.refused.items() if c in wanted},
        norms={c: norm for c, (norm, _, _) in figures.by_client.items()},
        lost=tuple(c for c in index.lost if c in wanted),
    )


def _detection(run: Path | None) -> dict[str, Any]:
    """Return what the detector of a run found; empty if there is nothing."""
    try:
        found = json.loads((run / "detection.json").read_text(encoding="utf-8")) if run else {}
        result = found.get("result") or {}
    except (OSError, ValueError, AttributeError):
        return {}
    return result if isinstance(result, dict) else {}


def _named(text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        given = unknown[0] if unknown else text
        raise ConfigurationError(expected("--clients", "ids of clients", given, known=known[:20]))
    return [client for client in known if client in names]


def _sampled(clients: list[str], first: set[str], most: int) -> list[str]:
    """Return at most so many clients in their order: `first` ones before others."""
    important = [c for c in clients if c in first][:most]
    others = [c for c in clients if c not in first]
    rest = evenly(range(len(others)), most - len(important)) if most > len(important) else []
    chosen = {*important, *(others[i] for i in rest)}
    return [c for c in clients if c in chosen]


def evenly(items: range, most: int) -> list[int]:
    """Return at most so many items that lie evenly, the first and the last among them.

    Examples:
        >>> evenly(range(600), 4), evenly(range(3), 4), evenly(range(9), 1)
        ([0, 200, 399, 599], [0, 1, 2], [0])
    """
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[0]]
    last = len(items) - 1
    return [items[math.floor(i * last / (most - 1) + 0.5)] for i in range(most)]


def select(text: str, stored: int) -> list[int]:
    """Return the rounds that a text names: numbers, and ranges as in Python, with commas between.

    Args:
        text: Such as `7`, `0,10,20`, `100:200`, `::50` or `-1`, the last round.
        stored: Rounds that are stored.

    Raises:
        ConfigurationError: If it names no round, or one that is not stored.

    Examples:
        >>> select("0,3:5,-1", 10), select("::4", 10)
        ([0, 3, 4, 9], [0, 4, 8])
    """
    chosen: set[int] = set()
    for part in text.split(","):
        try:
            numbers = [int(number) if number.strip() else None for number in part.split(":")]
            if len(numbers) > 1:
                chosen |= set(range(stored)[slice(*numbers)])
            else:
                chosen.add(range(stored)[int(part)])
        except (TypeError, ValueError, IndexError) as error:
            requirement = f"stored rounds (0 to {stored - 1}), such as 7, 0,10,20 or 100:200:10"
            raise ConfigurationError(expected("--rounds", requirement, part)) from error
    if not chosen:
        raise ConfigurationError(expected("--rounds", f"stored rounds (0 to {stored - 1})", text))
    return sorted(chosen)
