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
def outcomes(torch: bool) -> dict[str, Any]:
    """Do all rows in a process of their own, which forks: once with torch and once without."""
    found = subprocess.run(
        [sys.executable, fault_rows.__file__, *(["--torch"] if torch else [])],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(fedrec.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_row(row: fault_rows.Row) -> None:
    found = outcomes(row.needs_torch)
    if row.key in found["skipped"]:
        pytest.skip("mounting file systems is for root")
    outcome = found["rows"][row.key]
    assert outcome["failures"] == []
    assert outcome["trials"] == row.tests
    # Every trial has looked at something: a count of what it did, by name.
    assert sum(outcome["facts"].values()) > 0


def test_the_store_needs_no_torch() -> None:
    """So that a process that is killed has hardly begun to start."""
    assert outcomes(False)["torch"] is False
