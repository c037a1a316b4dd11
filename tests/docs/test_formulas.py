"""Formulas reach the page as they were written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "fedrec").rglob("*.py")]
INLINE = re.compile(r"(?<![$\\])\$([^$\n]+)\$(?!\$)")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_inline_formulas_have_no_markdown_escapes(path: Path) -> None:
    r"""Markdown takes `\_` and `\{` apart before a formula is read; `\lbrace` and words do."""
    text = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))
    broken = [f for f in INLINE.findall(text) if re.search(r"\\[_{}\[\]()#+.!*`\\-]", f)]
    assert broken == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_every_command_of_a_formula_is_understood(path: Path) -> None:
    r"""What the converter does not know, `\arg` for one, it leaves as it is."""
    converter = pytest.importorskip("latex2mathml.converter")
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    formulas = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL) + INLINE.findall(text)
    unknown = [f for f in formulas if "\\" in converter.convert(f)]
    assert unknown == []
