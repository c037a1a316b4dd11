"""R7: pages of LMDB that lead astray are an error before LMDB follows them.

Without the check, the first and second of these kill the interpreter (SIGBUS), and the last ones
let the next round be written over what is stored.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from fedrec.exceptions import HistoryCorruptedError
from fedrec.history import LMDBHistory

sys.path.insert(0, str(Path(__file__).parent))

from fault_damage import structure
from fault_stores import arrays, record, same

PAGE = 4096
KEY = struct.pack(">II", 1, 2)


def node(data: bytes, live: list[int]) -> int:
    """Return where the node of the update of client 2 in round 1 begins."""
    found = [
        at - 8
        for page in live
        for at in range(PAGE * page, PAGE * page + PAGE - 8)
        if data[at : at + 8] == KEY and data[at - 4 : at] == b"\x01\x00\x08\x00"
    ]
    (at,) = found
    return at


def change(data: bytearray, at: int, code: str, value: int) -> None:
    struct.pack_into(code, data, at, value)


def size(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) + 2, "<H", 0x4000)  # a value of one gigabyte


def place(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) + 16, "<Q", len(data) // PAGE - 1)  # it ends beyond the file


def far(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) + 16, "<Q", 2**63 + 5)


def pointer(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) // PAGE * PAGE + 16, "<H", 0xFFFE)


def key_size(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) + 6, "<H", 0x8008)


def number(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) // PAGE * PAGE, "<Q", 7777)


def kind(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) + 4, "<H", 4)


def bounds(data: bytearray, live: list[int]) -> None:
    change(data, node(data, live) // PAGE * PAGE + 12, "<H", 5000)


def root(data: bytearray, live: list[int]) -> None:
    for meta in (0, PAGE):
        change(data, meta + 88 + 40, "<Q", 1)


def last_page(data: bytearray, live: list[int]) -> None:
    for meta in (0, PAGE):
        change(data, meta + 136, "<Q", 20)


def free_page(data: bytearray, live: list[int]) -> None:
    """Call the page of a value that is in use free."""
    used = struct.unpack_from("<Q", data, node(data, live) + 16)[0]
    meta = max((0, PAGE), key=lambda m: struct.unpack_from("<Q", data, m + 144)[0])
    page = PAGE * struct.unpack_from("<Q", data, meta + 40 + 40)[0]
    offset = struct.unpack_from("<H", data, page + 16)[0]
    change(data, page + offset + 8 + 8 + 8, "<Q", used)  # node, key, and how many there are


CASES: list[Callable[[bytearray, list[int]], None]] = [
    *(size, place, far, pointer, key_size, number, kind, bounds, root, last_page, free_page),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_page_that_leads_astray(
    case: Callable[[bytearray, list[int]], None], tmp_path: Path
) -> None:
    path = record(tmp_path, 4).path
    before = (path / "data.mdb").read_bytes()
    data = bytearray(before)
    case(data, structure(path)[0])
    assert data != before
    (path / "data.mdb").write_bytes(data)
    store = LMDBHistory(path)
    for use in (store.rounds, store.verify, lambda: store.append(arrays(4))):
        with pytest.raises(HistoryCorruptedError, match="lead astray"):
            use()
    store.close()
    assert (path / "data.mdb").read_bytes() == data, "nothing was written"
    (path / "data.mdb").write_bytes(before)
    store.append(arrays(4))
    assert store.verify() == range(5)
    store.close()


def test_no_bit_of_a_transaction_number_hides_a_round(tmp_path: Path) -> None:
    """LMDB goes by the larger of two numbers: an older one that grows would take back a round."""
    path = record(tmp_path, 4).path
    before = (path / "data.mdb").read_bytes()
    for meta in (0, PAGE):
        for bit in range(64):
            data = bytearray(before)
            data[meta + 144 + bit // 8] ^= 1 << bit % 8
            (path / "data.mdb").write_bytes(data)
            store = LMDBHistory(path)
            with pytest.raises(HistoryCorruptedError, match="lead astray"):
                store.rounds()
            store.close()
    (path / "data.mdb").write_bytes(before)
    assert LMDBHistory(path).verify() == range(4)


def test_pages_are_looked_at_while_another_process_writes(tmp_path: Path) -> None:
    """What a reader's transaction sees stays as it is, however often it changes meanwhile."""
    path = record(tmp_path, 1).path
    child = os.fork()
    if child == 0:
        store = LMDBHistory(path)
        for t in range(1, 40):
            store.append(arrays(t))
        store.close()
        os._exit(0)
    seen = 0
    while seen < 40:
        store = LMDBHistory(path)  # opened anew, so that its pages are followed
        seen = len(store.rounds())
        assert same(store.read(seen - 1), arrays(seen - 1))
        store.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_history_without_rounds_and_one_with_many(tmp_path: Path) -> None:
    """Trees with no page, with one, and of several levels."""
    for rounds in (0, 1, 60):
        path = record(tmp_path / str(rounds), rounds).path
        store = LMDBHistory(path)
        assert store.verify() == range(rounds)
        store.close()
    with lmdb.open(str(path), max_dbs=8, readonly=True, lock=False) as env, env.begin() as txn:
        db = env.open_db(b"updates", txn, create=False)
        assert txn.stat(db)["depth"] > 1
