"""The page of messages quotes messages that fedrec has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "howto" / "troubleshooting.md"


def texts() -> str:
    """All texts of the source, one a line; a value in a text is a zero character."""
    found: list[str] = []
    for path in sorted((REPOSITORY / "fedrec").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_quoted_message_is_in_the_source() -> None:
    quoted = re.findall(r'^### "(.+)"$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) >= 15
    known = texts()
    assert [message for message in quoted if message not in known] == []
