"""What several commands write: JSON, and lists of names. Imports nothing heavy."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
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
    r"""Return a docstring in lines of a terminal; what goes on with a line is joined to it first.

    Args:
        text: Lines of text.
        width: Letters in a line; by default those of the terminal.

    Examples:
        >>> print(wrapped("A list of\nsome:\n    - a rule of any kind.", width=20))
        A list of some:
            - a rule of any
              kind.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    lines = []
    for line in _joined(text.splitlines()):
        indent = line[: len(line) - len(line.lstrip())]
        begins = _ITEM.match(line)
        hanging = "" if begins is None else "  " if begins[1] == "- " else "    "
        lines += lines_of(line, width, "", indent + hanging) or [""]
    return "\n".join(lines)


def _joined(lines: Iterable[str]) -> list[str]:
    joined = [""]
    in_code = False
    for line in lines:
        in_code = line.lstrip().startswith(">>>") or (in_code and line.strip() != "")
        goes_on = line.strip() and joined[-1].strip() and not in_code and not _ITEM.match(line)
        # What is below a heading, as `Returns:`, stays there.
        if goes_on and not (joined[-1].endswith(":") and line.startswith(" ")):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined[1:]


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


# What begins a line of its own: items, arguments, the end of a signature, code, formulas.
_ITEM = re.compile(r"\s*(- |\w[\w.]*: |\)|>>>|\$\$)")
# A column of text that is narrower is hard to read.
_LEGIBLE = 40
