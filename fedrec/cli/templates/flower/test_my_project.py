"""The whole way, with real processes on this machine: start.py in short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedrec.recipe import load_recipe, run

HERE = Path(__file__).resolve().parent


def test_the_rehearsal_finds_the_attacker_and_recovers(tmp_path: Path) -> None:
    """The recovered model is about as good as one trained from scratch, and far cheaper."""
    recipe = load_recipe(HERE / "my_project.yaml")
    results = run(recipe, output_dir=tmp_path, progress=False)
    recovered, scratch = results["methods"]
    assert results["detection"]["malicious"] == ["client-3"]
    assert recovered["ter"] <= scratch["ter"] + 0.05 < results["poisoned"]["ter"]
    assert recovered["acp"] > 0.7


def test_flower_records_and_recovers_what_one_process_does(tmp_path: Path) -> None:
    """The models are equal, and nothing is on standard error."""
    start = [sys.executable, str(HERE / "start.py"), "--rounds", "6"]
    start += ["--folder", str(tmp_path / "live")]
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What the clients sent with Flower and in one process: equal" in done.stdout
    assert "The recovered models with Flower and in one process: equal" in done.stdout
    assert not done.stderr
