"""The HTML elements of pages; text of users is escaped here."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

__all__ = ["breakable", "document", "facts", "note", "number", "section", "table"]


def document(title: str, kind: str, header: str, main: str) -> bytes:
    """Return a whole page, which fetches nothing and runs no script but its own.

    Args:
        title: Heading of the page, as text.
        kind: Text above the heading.
        header: HTML below the heading.
        main: HTML of the sections.
    """
    files = resources.files("fedrec.report")
    style = (files / "page.css").read_text(encoding="utf-8")
    script = (files / "page.js").read_text(encoding="utf-8")
    # The policy lets only this script run, even if a recipe has put another into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name} - fedrec</title><style>{style}</style></head>"
        f"<body><header><p>{escape(kind)}</p><h1>{name}</h1>{header}</header>"
        f"<main>{main}</main><script>{script}</script></body></html>\n"
    ).encode()


def section(title: str, content: str) -> str:
    """Return a section; an empty text if it has no content.

    Args:
        title: Heading of the section, as text.
        content: HTML.
    """
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def note(text: str) -> str:
    """Return a remark in small print; `text` is HTML."""
    return f'<p class="note">{text}</p>'


def number(value: float | None, text: str) -> str:
    """Return a rounded number as HTML that also holds the exact value.

    Examples:
        >>> number(0.05172, "0.052"), number(None, "-")
        ('<data value="0.05172">0.052</data>', '-')
    """
    return text if value is None else f'<data value="{value!r}">{escape(text)}</data>'


def breakable(name: str) -> str:
    """Return a name as HTML that may be broken between its words.

    That makes tables narrower, without breaks in the middle of a word.

    Examples:
        >>> breakable("TrainFromScratch, k=1")
        'Train<wbr>From<wbr>Scratch, k=<wbr>1'
        >>> breakable("w/o runs/a")
        'w/o runs/<wbr>a'
    """
    return re.sub(r"([=._]|(?<=\w\w)/|[a-z](?=[A-Z]))", r"\1<wbr>", escape(name))


def table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """Return a table that scrolls by itself if it is wide, also by keyboard.

    Args:
        label: Description of the table, for screen readers.
        heads: Column headings, as text; empty for no row of headings.
        rows: Rows of cells as HTML; the first cell names the row.
        style: CSS class of the table.
    """
    head = "".join(f'<th scope="col">{breakable(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    kind = f' class="{style}"' if style else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table{kind}>{top}<tbody>{body}</tbody></table></div>"
    )


def facts(label: str, values: Mapping[str, object]) -> str:
    """Return a table of names and values, both as text."""
    rows = [(escape(str(key)), escape(str(value))) for key, value in values.items()]
    return table(label, (), rows, "facts")
