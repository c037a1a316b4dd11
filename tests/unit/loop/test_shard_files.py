"""The files of a checkpoint that belong to shards of clients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.exceptions import ConfigurationError, HistoryCorruptedError
from fedrec.history import LMDBHistory, MemoryHistory, ShardedHistory
from fedrec.loop.checkpoint import ShardFiles, load_state
from fedrec.recoverers import FedRecover
from fedrec.testing.problems import quadratic_federation


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-shard-*"))


def test_two_files_of_a_shard_take_turns(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path, ["left-out"], MemoryHistory())
    for next_round in (3, 5):
        states = {v: {"anchors": torch.full((2,), 10.0 * next_round + v)} for v in (1, 2)}
        assert files.write(states, next_round)
        assert len(_names(tmp_path)) == (2 if next_round == 3 else 4)  # the ones before stay
        found = ShardFiles(tmp_path, (), MemoryHistory()).read([2], files.turn, next_round)
        assert found[2]["anchors"].tolist() == [10.0 * next_round + 2] * 2
    files.remove(all_but=files.turn)
    assert _names(tmp_path) == [f"checkpoint-shard-00{v}-{files.turn}.npz" for v in (1, 2)]
    with pytest.raises(HistoryCorruptedError, match=r"is before round 5, and the one .* round 3"):
        files.read([1], files.turn, 3)
    with pytest.raises(HistoryCorruptedError, match=r"checkpoint-shard-000-.*cannot be read"):
        files.read([0], files.turn, 5)
    # A client that is forgotten is in none of them, if it was left out.
    assert '"without": ["left-out"]' in (tmp_path / "derived.jsonl").read_text()
    files.remove()
    assert _names(tmp_path) == []


def test_without_a_folder_there_are_no_files() -> None:
    files = ShardFiles(None, (), MemoryHistory())
    assert not files.write({0: {}}, 1)
    files.remove()


class _StopAt(Callback):
    def on_round_end(self, loop: Any, ctx: Any, metrics: Any) -> None:
        if ctx.round == 8:
            raise KeyboardInterrupt


def test_a_recovery_in_shards_goes_on_from_their_files(tmp_path: Path) -> None:
    federation, history = quadratic_federation(num_clients=6, size=40), MemoryHistory()
    settings: dict[str, Any] = {
        "accelerator": "cpu", "enable_progress_bar": False, "checkpoint_every": 0, "num_shards": 3,
    }  # fmt: skip
    loop = FederatedLoop(**settings)
    loop.record(federation, FedAvg(), history, max_rounds=12, server_lr=0.1)
    method = {"warmup_rounds": 4, "correction_period": 4, "final_rounds": 1}
    left_out = ["q0", "q1"]  # nobody is left in the first shard
    whole = loop.recover(federation, history, FedRecover(**method), left_out)
    stopped = FederatedLoop(**settings, default_root_dir=tmp_path, callbacks=[_StopAt()])
    with pytest.raises(KeyboardInterrupt):
        stopped.recover(federation, history, FedRecover(**method), left_out)
    folder = tmp_path / "recover" / "FedRecover"
    state = load_state(folder / "checkpoint.npz")
    assert state["recoverer"]["estimator"] == {}  # it is in the files
    turn = state["shard_files"]
    assert _names(folder) == [f"checkpoint-shard-00{v}-{turn}.npz" for v in (1, 2)]
    one = load_state(folder / f"checkpoint-shard-002-{turn}.npz")
    assert one["state"]["remaining"] == ["q4", "q5"]
    again = FederatedLoop(**settings, default_root_dir=tmp_path)
    resumed = again.recover(federation, history, FedRecover(**method), left_out, resume=True)
    assert torch.equal(resumed.global_weights, whole.global_weights)
    assert resumed.diagnostics == whole.diagnostics
    assert _names(folder) == []
    # What one estimator of all clients comes to is almost the same.
    alone = FederatedLoop(**{**settings, "num_shards": None})
    one_piece = MemoryHistory()
    alone.record(federation, FedAvg(), one_piece, max_rounds=12, server_lr=0.1)
    other = alone.recover(federation, one_piece, FedRecover(**method), left_out)
    torch.testing.assert_close(resumed.global_weights, other.global_weights)
    assert {n: pytest.approx(v) for n, v in resumed.diagnostics.items()} == other.diagnostics


def test_one_file_is_read_by_several_processes_and_written_by_one(tmp_path: Path) -> None:
    two: Any = SimpleNamespace(size=2)
    message = "Expected `history` to be one that 2 processes can write to, but got 'LMDBHistory'"
    with pytest.raises(ConfigurationError, match=message):
        LMDBHistory(tmp_path / "a").require_writers(two)
    LMDBHistory(tmp_path / "a").attach(two)
    ShardedHistory(tmp_path / "b").require_writers(two)
    MemoryHistory().require_writers(two)
