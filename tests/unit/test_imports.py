"""Imports go one way, and every picture of the rooms says so."""

from __future__ import annotations

import re
import subprocess
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


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import fedrec", {"fedrec", "fedrec._lazy"}),
        ("import fedrec.exceptions", {"fedrec", "fedrec._lazy", "fedrec.exceptions"}),
    ],
)
def test_importing_fedrec_loads_nothing_but_the_standard_library(
    statement: str, loaded: set[str]
) -> None:
    """No torch, no NumPy: they come with the first name that needs them."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    new = set(done.stdout.split())
    assert {name for name in new if name.partition(".")[0] not in sys.stdlib_module_names} == loaded


def test_a_public_name_loads_its_package_and_is_kept() -> None:
    code = (
        "import sys, fedrec; assert 'torch' not in sys.modules; fedrec.Aggregator;"
        "print('torch' in sys.modules, 'Aggregator' in vars(fedrec), 'fedrec.loop' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["True", "True", "False"]
