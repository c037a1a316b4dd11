"""Imports go one way, and every picture of the rooms says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import rooms  # noqa: E402


@pytest.mark.parametrize("for_types", [False, True], ids=["loaded", "with types"])
def test_no_module_imports_itself_by_any_way_round(for_types: bool) -> None:
    assert rooms.cycles(for_types) == []


def test_the_way_of_an_update_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    way = text.partition("## The house")[2].partition("\n## ")[0]
    named = re.findall(r"\b([a-z_]+/[a-z_/]+\.py)\b", way)
    assert len(named) > 8
    files = [name if name.startswith("benchmarks/") else f"fedrec/{name}" for name in named]
    assert [name for name in files if not (ROOT / name).is_file()] == []
