"""Killed at any moment, recording and recovery end as if nothing had happened."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedrec.history import LMDBHistory, MemoryHistory

sys.path.insert(0, str(Path(__file__).parent))
import runs

ROOT = Path(__file__).parents[2]


def start(mode: str, folder: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("runs.py")), mode, str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def calls(mode: str, folder: Path) -> int:
    path = folder / f"{mode}.calls"
    return path.stat().st_size if path.exists() else 0


def kill_after(process: subprocess.Popen, mode: str, folder: Path, number: int) -> None:
    """Send SIGKILL once clients were asked this often in all."""
    deadline = time.monotonic() + 120
    while calls(mode, folder) < number and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output.decode()


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output.decode()


@pytest.fixture(scope="module")
def uninterrupted():
    threads = torch.get_num_threads()
    history = MemoryHistory()
    recorded = runs.record(history, None)
    recovered = runs.recover(history, None)
    torch.set_num_threads(threads)
    return recorded, recovered, history


def test_sigkill_while_recording_and_while_recovering(uninterrupted, tmp_path: Path) -> None:
    recorded, recovered, memory = uninterrupted
    per_round = runs.CLIENTS
    kill_after(start("record", tmp_path), "record", tmp_path, 23 * per_round + 2)
    finish(start("record", tmp_path))
    assert torch.equal(torch.load(tmp_path / "record.pt"), recorded.global_weights)
    # Starting over would ask everyone again; the kill costs the round it hit, and the one before if
    # that was still being written, no more.
    total = runs.ROUNDS * per_round
    assert total <= calls("record", tmp_path) <= total + 2 * per_round
    with LMDBHistory(tmp_path / "history") as history:
        assert history.rounds() == memory.rounds()
        for t in history.rounds():
            mine, theirs = history.read_round(t), memory.read_round(t)
            assert torch.equal(mine.updates, theirs.updates)
            assert torch.equal(mine.aggregate, theirs.aggregate)
    with (tmp_path / "record" / "metrics.csv").open() as file:
        assert [int(row["round"]) for row in csv.DictReader(file)] == list(range(runs.ROUNDS))

    asked = len(recovered.ledger.entries)
    kill_after(start("recover", tmp_path), "recover", tmp_path, asked // 2)
    finish(start("recover", tmp_path))
    assert torch.equal(torch.load(tmp_path / "recover.pt"), recovered.global_weights)
    assert asked <= calls("recover", tmp_path) <= asked + per_round - 1
    with (tmp_path / "recover" / "FedRecover" / "ledger.csv").open() as file:
        assert len(list(csv.DictReader(file))) == asked
    with (tmp_path / "recover" / "FedRecover" / "metrics.csv").open() as file:
        assert [int(row["round"]) for row in csv.DictReader(file)] == list(range(runs.ROUNDS))


def test_ctrl_c_stops_between_rounds_and_says_so(tmp_path: Path) -> None:
    process = start("record", tmp_path)
    while calls("record", tmp_path) < 60:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert b"KeyboardInterrupt: Stopped after round" in output
    assert calls("record", tmp_path) % runs.CLIENTS == 0, "the round was finished"
    with LMDBHistory(tmp_path / "history") as history:
        assert len(history.rounds()) == calls("record", tmp_path) // runs.CLIENTS
