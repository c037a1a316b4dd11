"""Puts pages into the navigation of `mkdocs.yml`, below the page that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["extend"]


def extend(entries: list[Any], below: Callable[[str], list[dict[str, Any]]]) -> None:
    """Add what `below` returns for a page to the list that names the page, at every depth."""
    for entry in list(entries):
        if isinstance(entry, str):
            entries.extend(below(entry))
        else:
            for inner in entry.values():
                if isinstance(inner, list):
                    extend(inner, below)
