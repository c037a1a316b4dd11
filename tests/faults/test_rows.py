"""Every row of the fault table, shortened. `benchmarks/faults.py` runs the release counts."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedrec

sys.path.insert(0, str(Path(__file__).parent))

import fault_rows

ROWS = [row for row in fault_rows.ROWS if row.tests]


@functools.cache
def outcomes(torch: bool, slow: bool) -> dict[str, Any]:
    """Do rows in a process of their own, which forks: those with torch apart from those without."""
    keys = [row.key for row in ROWS if (row.needs_torch, row.slow) == (torch, slow)]
    found = subprocess.run(
        [sys.executable, fault_rows.__file__, *keys, *(["--torch"] if torch else [])],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedrec.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.key, marks=[pytest.mark.slow] * row.slow) for row in ROWS],
)
def test_row(row: fault_rows.Row) -> None:
    found = outcomes(row.needs_torch, row.slow)
    if row.key in found["skipped"]:
        pytest.skip("mounting file systems is for root")
    outcome = found["rows"][row.key]
    assert outcome["failures"] == []
    assert outcome["trials"] == row.tests
    # Every trial has looked at something: a count of what it did, by name.
    assert sum(outcome["facts"].values()) > 0


def test_the_store_needs_no_torch() -> None:
    """So that a process that is killed has hardly begun to start."""
    assert outcomes(False, False)["torch"] is False
