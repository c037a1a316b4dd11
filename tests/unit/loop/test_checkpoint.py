"""The state of an interrupted recovery: what is saved comes back, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedrec.exceptions import HistoryCorruptedError
from fedrec.loop.checkpoint import load_state, save_state

STATE = {"w": torch.arange(3.0), "n": [1, None, "x", {"deep": True}], "pair": (1.5, 2)}


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "state.npz"
    save_state(path, STATE)
    return path


def test_round_trip(tmp_path: Path) -> None:
    found = load_state(saved(tmp_path))
    assert torch.equal(found.pop("w"), torch.arange(3.0))
    assert found == {"n": [1, None, "x", {"deep": True}], "pair": [1.5, 2]}


def test_a_damaged_byte_is_noticed_or_does_not_matter(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    noticed = 0
    for i in range(len(whole)):
        for flip in (0x01, 0xFF):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :])
            try:
                found = load_state(path)
            except HistoryCorruptedError:
                noticed += 1
                continue
            assert torch.equal(found["w"], torch.arange(3.0))
            assert found["n"] == STATE["n"]
    assert noticed > len(whole)


@pytest.mark.parametrize("kept", [0, 1, 10, 100, -1])
def test_a_cut_file_is_refused_with_the_way_out(tmp_path: Path, kept: int) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(HistoryCorruptedError, match=r"state\.npz.*HINT: delete it to start over"):
        load_state(path)
