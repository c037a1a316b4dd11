"""Who was forgotten when: a list in the history, and a note while it is being done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.exceptions import HistoryCorruptedError
from fedrec.history.lmdb.damage import Damage
from fedrec.history.lmdb.records import FORGOTTEN, NAMES, canonical, digest

__all__ = ["broken_entries", "chained", "note", "noted"]

NOTE = "forgetting.json"


def chained(
    entries: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a list with new entries at its end, each with the hash of the one before."""
    result = [dict(entry) for entry in entries]
    for entry in new:
        result.append({**entry, "previous": digest(canonical(result[-1])) if result else ""})
    return result


def broken_entries(entries: Sequence[Mapping[str, Any]]) -> list[Damage]:
    """Return the first entry that does not follow the one before it, if there is one."""
    previous = ""
    for number, entry in enumerate(entries, start=1):
        if entry.get("previous") != previous:
            reason = f"entry {number} does not follow the one before it: one was changed or removed"
            return [Damage(part=NAMES[FORGOTTEN], reason=reason)]
        previous = digest(canonical(entry))
    return []


def note(directory: Path, content: Mapping[str, Any]) -> None:
    """Note down that clients are being forgotten, so that nobody takes it for done."""
    write_atomically(directory / NOTE, canonical(content) + b"\n", private=True)


def noted(directory: Path, store_id: str) -> dict[str, Any] | None:
    """Return what was noted down for the history with this id and not finished.

    Raises:
        HistoryCorruptedError: If it cannot be read.
    """
    path = directory / NOTE
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        mine = found["store_id"] == store_id
        found["clients"], found["when"], found["aggregates"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HistoryCorruptedError(
            f"`{path}`, which says which clients are being forgotten, cannot be read: {error}. "
            "HINT: remove it, and forget them again."
        ) from error
    return found if mine else None
