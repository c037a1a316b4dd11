"""The whole way, with real processes on this machine: start.py in short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = Path(__file__).resolve().parent / "start.py"


def test_flower_records_and_recovers_what_one_process_does(tmp_path: Path) -> None:
    """The models are equal, and nothing is on standard error."""
    command = [sys.executable, str(START), "--rounds", "6", "--folder", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "record: the model of Flower and that of one process are equal" in done.stdout
    assert "recover: the model of Flower and that of one process are equal" in done.stdout
    assert not done.stderr
