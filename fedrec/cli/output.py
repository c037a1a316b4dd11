"""What several commands write: JSON, and lists of names. Imports nothing heavy."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from fedrec.exceptions import FedrecError, RecipeError

__all__ = ["definitions", "error_as_json", "lines_of", "wrapped", "write_json"]


def write_json(value: Any) -> None:
    """Write the one JSON document of a command to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def error_as_json(error: FedrecError) -> dict[str, Any]:
    """Return an error as the document of a command that came to nothing.

    Examples:
        >>> error_as_json(FedrecError("No."))
        {'error': {'type': 'FedrecError', 'message': 'No.'}}
    """
    about: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, RecipeError):
        about["mistakes"] = error.errors
    return {"error": about}


def definitions(texts: Mapping[str, str], width: int | None = None) -> str:
    """Return names with what they mean, beside them where there is room and otherwise below.

    Args:
        texts: What each name means.
        width: Letters in a line; by default those of the terminal.

    Examples:
        >>> print(definitions({"Krum": "One update.", "Median": "In the middle."}, width=60))
        Krum    One update.
        Median  In the middle.
        >>> print(definitions({"Krum": "One of the updates."}, width=40))
        Krum
            One of the updates.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    longest = max(map(len, texts), default=0) + 2
    beside = width - longest >= _LEGIBLE
    indent = " " * (longest if beside else 4)
    lines = []
    for name, text in texts.items():
        first = f"{name:<{longest}}" if beside else indent
        lines += [] if beside else [name]
        lines += lines_of(text, width, first, indent) or [first.rstrip()]
    return "\n".join(lines)


def wrapped(text: str, width: int | None = None) -> str:
    r"""Break lines that are too long between words, and indent what follows as they begin.

    Args:
        text: Lines of text.
        width: Letters in a line; by default those of the terminal.

    Examples:
        >>> print(wrapped("A list:\n    - a rule of any kind.", width=20))
        A list:
            - a rule of any
            kind.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += lines_of(line, width, "", indent) or [""]
    return "\n".join(lines)


def lines_of(text: str, width: int, first: str, others: str) -> list[str]:
    """Return text in lines, broken between words alone.

    Args:
        text: The text.
        width: Letters in a line.
        first: What the first line begins with.
        others: What the other lines begin with.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


# A column of text that is narrower is hard to read.
_LEGIBLE = 40
