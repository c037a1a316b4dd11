"""Flower's own simulation, whose clients are processes of Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "simulated.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_flowers_simulation_does_what_one_process_does() -> None:
    pytest.importorskip("ray")
    settings = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # or its processes wait for all others on a busy machine
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True]\n"
