"""Who was forgotten when: a list in the history, and a note while clients are being forgotten."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.exceptions import HistoryCorruptedError
from fedrec.history.lmdb.damage import Damage
from fedrec.history.lmdb.records import FORGOTTEN, NAMES, canonical, digest

__all__ = ["broken_chain", "chained", "noted", "write_note"]

NOTE = "forgetting.json"


def chained(
    forgettings: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the list with new forgettings at its end, each with the hash of the one before."""
    result = [dict(forgetting) for forgetting in forgettings]
    for forgetting in new:
        result.append({**forgetting, "previous": digest(canonical(result[-1])) if result else ""})
    return result


def broken_chain(forgettings: Sequence[Mapping[str, Any]]) -> list[Damage]:
    """Return the first forgetting that does not follow the one before it, if there is one."""
    previous = ""
    for number, forgetting in enumerate(forgettings, start=1):
        if forgetting.get("previous") != previous:
            reason = f"entry {number} does not follow the one before it: one was changed or removed"
            return [Damage(part=NAMES[FORGOTTEN], reason=reason)]
        previous = digest(canonical(forgetting))
    return []


def write_note(directory: Path, content: Mapping[str, Any]) -> None:
    """Note that clients are being forgotten, until they are."""
    write_atomically(directory / NOTE, canonical(content) + b"\n", private=True)


def noted(directory: Path, store_id: str) -> dict[str, Any] | None:
    """Return the note of clients that are being forgotten in the history with this id, if any.

    Raises:
        HistoryCorruptedError: If it cannot be read.
    """
    path = directory / NOTE
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        is_of_this_history = content["store_id"] == store_id
        names = ("clients", "when", "aggregates", "updates")
        _ = [content[name] for name in names]  # are there
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HistoryCorruptedError(
            f"`{path}`, which says which clients are being forgotten, cannot be read: {error}. "
            "HINT: remove it, and forget them again."
        ) from error
    return content if is_of_this_history else None
