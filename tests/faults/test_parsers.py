"""S2: what reads bytes from disk makes of any bytes: what was written, or an error of fedrec's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrec.exceptions import FedrecError, HistoryCorruptedError
from fedrec.history.lmdb.entries import read_entry
from fedrec.history.lmdb.records import ROUND, StoredManifest, canonical, key
from fedrec.history.manifest import Manifest

sys.path.insert(0, str(Path(__file__).parent))

from fault_stores import IDS, D, manifest

RECORDING = StoredManifest("x", manifest())
ENTRY = {
    "round": 3,
    "previous": "0" * 64,
    "execution": "0" * 64,
    "cohort": [0, 1, 2],
    "present": [1, 2],
    "num_samples": [10, 20],
    "refused": [[0, "late"]],
    "updates": ["0" * 16, None],
    "bounds": [1.5, None],
    "max_error": None,
    "global_weights": "1" * 16,
    "aggregate": "2" * 16,
    "buffers": None,
    "departure": None,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FEW = settings(max_examples=60, deadline=None, database=None, derandomize=True)


def read(entry: Any) -> dict[str, Any]:
    return read_entry(json.dumps(entry).encode(), RECORDING, 3, 8 * D)


@FEW
@given(st.binary(max_size=200))
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(FedrecError):
        StoredManifest.load("x", data)
    with pytest.raises(HistoryCorruptedError):
        RECORDING.unpack(memoryview(data), 1, 2)


@FEW
@given(st.integers(0, 47), st.integers(1, 255), st.binary(max_size=64))
def test_any_other_byte_of_a_header_or_payload(place: int, change: int, payload: bytes) -> None:
    made, _ = RECORDING.pack(3, 1, payload)
    assert RECORDING.unpack(memoryview(made), 3, 1) == payload
    for at in {place, 48 + place % max(1, len(payload))} & set(range(len(made))):
        other = bytearray(made)
        other[at] ^= change
        with pytest.raises(HistoryCorruptedError, match="round 3, client `b`"):
            RECORDING.unpack(memoryview(bytes(other)), 3, 1)


@FEW
@given(st.integers(0, 2**32 - 1), st.integers(0, len(IDS) - 1))
def test_a_record_belongs_to_its_key_alone(t: int, index: int) -> None:
    made, _ = RECORDING.pack(t, index, b"payload")
    assert RECORDING.unpack(memoryview(made), t, index) == b"payload"
    for other in ((t ^ 1, index), (t, (index + 1) % len(IDS))):
        assert key(*other) != key(t, index)
        with pytest.raises(HistoryCorruptedError, match="its header says"):
            RECORDING.unpack(memoryview(made), *other)


def test_round_record_that_makes_sense() -> None:
    assert read(ENTRY) == ENTRY


@FEW
@given(st.sampled_from(sorted(ENTRY)), JSON)
def test_round_record_with_anything_in_it(name: str, value: Any) -> None:
    try:
        found = read({**ENTRY, name: value})
    except HistoryCorruptedError:
        return
    # Whatever is let through can be used: indices are clients, lists are as long as each other.
    assert all(0 <= i < len(IDS) for i in found["cohort"] + found["present"])
    lists = [found[n] for n in ("present", "num_samples", "updates", "bounds")]
    assert len({len(one) for one in lists}) == 1
    assert found["round"] == 3


@pytest.mark.parametrize("name", sorted(ENTRY))
def test_round_record_that_lacks_something(name: str) -> None:
    with pytest.raises(HistoryCorruptedError, match="round 3, the round record"):
        read({k: v for k, v in ENTRY.items() if k != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", 4),
        ("round", True),
        ("cohort", [0, 0]),
        ("present", [6, 1]),
        ("present", [-1, 1]),
        ("present", [1, 1]),
        ("present", [1]),
        ("num_samples", [-1, 1]),
        ("num_samples", [2**63, 1]),
        ("refused", [[9, "x"]]),
        ("refused", [[1]]),
        ("updates", ["x" * 16, None]),
        ("updates", ["0" * 17, None]),
        ("bounds", [float("nan"), None]),
        ("bounds", [10**400, None]),
        ("bounds", [-1, None]),
        ("max_error", [0.1]),
        ("buffers", "0" * 16),
        ("aggregate", None),
    ],
)
def test_round_record_that_makes_no_sense(name: str, value: Any) -> None:
    with pytest.raises(HistoryCorruptedError, match="round 3, the round record"):
        read({**ENTRY, name: value})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"round":' * 50_000, "1" * 5000, "3"])
def test_round_record_that_is_none(text: str) -> None:
    with pytest.raises(HistoryCorruptedError, match="round 3, the round record"):
        read_entry(text.encode(), RECORDING, 3, 8 * D)


def test_model_that_the_file_cannot_hold() -> None:
    """Memory for it is not even asked for."""
    huge = StoredManifest("x", manifest(num_parameters=10**12))
    with pytest.raises(HistoryCorruptedError, match="cannot hold 1000000000000 numbers"):
        read_entry(canonical(ENTRY), huge, 3, 10**9)
    assert ROUND == 2**32 - 1


@FEW
@given(st.sampled_from(sorted(json.loads(manifest().to_json()))), JSON)
def test_manifest_with_anything_in_it(name: str, value: Any) -> None:
    raw = {**json.loads(manifest().to_json()), name: value}
    try:
        text = json.dumps(raw)
        found = Manifest.from_json(text)
        StoredManifest("x", found)
    except FedrecError:
        return
    assert len(found.clients) == len(raw["clients"])
    assert found.num_parameters > 0
    assert bytes.fromhex(found.store_id)


@FEW
@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_text_that_is_no_manifest(data: bytes) -> None:
    with pytest.raises(FedrecError):
        Manifest.from_json(data)
