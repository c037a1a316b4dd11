from __future__ import annotations

import copy
import math
import os
import random
from pathlib import Path

import pytest
import torch

from fedrec.exceptions import ConfigurationError
from fedrec.metrics import REASONS, CostLedger


def example() -> CostLedger:
    ledger = CostLedger({"a": 10, "b": 4, "c": 8, "late": 0})
    ledger.add("a", 0, "warmup", num_bytes=100)
    ledger.add("b", 0, "warmup", local_steps=3, num_bytes=100)
    ledger.add("a", 5, "abnormality", num_bytes=7)
    ledger.add("a", 5, "fallback", num_bytes=5)
    ledger.add("a", 6, "final")
    return ledger


def test_cp_is_by_the_clients_own_rounds() -> None:
    # a: 3 rounds of 10, since round 5 counts once; b: 1 of 4; c: none of 8.
    assert example().cp() == pytest.approx({"a": 0.7, "b": 0.75, "c": 1.0})


def test_acp_is_the_mean_over_clients_not_over_rounds() -> None:
    assert example().acp() == pytest.approx((0.7 + 0.75 + 1) / 3)


def test_clients_without_rounds_are_left_out_even_if_asked() -> None:
    ledger = example()
    ledger.add("late", 3, "other")
    assert "late" not in ledger.cp()
    assert ledger.acp() == pytest.approx((0.7 + 0.75 + 1) / 3)
    assert ledger.exact_rounds_by_reason()["other"] == 0


def test_rounds_by_reason_add_up_to_the_rounds_that_count() -> None:
    found = example().exact_rounds_by_reason()
    assert tuple(found) == REASONS
    assert {r: v for r, v in found.items() if v} == pytest.approx(
        {"warmup": 2 / 3, "abnormality": 1 / 3, "final": 1 / 3}
    )
    assert sum(found.values()) == pytest.approx((3 + 1 + 0) / 3)


def test_the_first_reason_counts_in_whatever_order_rounds_come() -> None:
    ledger = CostLedger({"a": 10})
    for t, reason in [(9, "final"), (2, "fallback"), (2, "abnormality"), (9, "other")]:
        ledger.add("a", t, reason)
    found = ledger.exact_rounds_by_reason()
    assert {r: v for r, v in found.items() if v} == {"final": 1.0, "fallback": 1.0}


@pytest.mark.parametrize(
    ("num_rounds", "num_exact", "ceiling"), [(2000, 222, 88.9), (1000, 122, 87.8)]
)
def test_the_papers_schedule_and_its_ceiling(
    num_rounds: int, num_exact: int, ceiling: float
) -> None:
    clients = [f"c{i}" for i in range(4)]
    ledger = CostLedger(dict.fromkeys(clients, num_rounds))
    for t in range(num_rounds):
        if t < 20:
            reason = "warmup"
        elif t >= num_rounds - 5:
            reason = "final"
        elif (t - 20 + 1) % 10 == 0:
            reason = "correction"
        else:
            continue
        for client_id in clients:
            ledger.add(client_id, t, reason)
    assert len(ledger) == 4 * num_exact
    assert round(100 * ledger.acp(), 1) == ceiling
    assert ledger.acp() == pytest.approx((num_rounds - num_exact) / num_rounds)
    found = ledger.exact_rounds_by_reason()
    assert (found["warmup"], found["final"]) == (20, 5)
    assert found["correction"] == num_exact - 25


def test_training_from_scratch_saves_nothing() -> None:
    ledger = CostLedger({"a": 3, "b": 3})
    for t in range(3):
        for client_id in ("a", "b"):
            ledger.add(client_id, t, "scratch")
    assert ledger.cp() == {"a": 0.0, "b": 0.0}
    assert ledger.acp() == 0.0


def test_asking_nobody_saves_everything() -> None:
    ledger = CostLedger({"a": 3})
    assert ledger.acp() == 1.0
    assert set(ledger.exact_rounds_by_reason().values()) == {0.0}
    assert ledger.total_bytes() == 0
    assert ledger.entries == ()


@pytest.mark.parametrize("num_rounds", [{}, {"a": 0}])
def test_acp_without_clients_is_nan(num_rounds: dict[str, int]) -> None:
    assert math.isnan(CostLedger(num_rounds).acp())
    assert set(CostLedger(num_rounds).exact_rounds_by_reason().values()) == {0.0}


def test_entries_keep_order_and_values() -> None:
    ledger = example()
    assert ledger.entries[1] == ("b", 0, "warmup", 3, 100, 0.0)
    assert ledger.entries[2].reason == "abnormality"
    assert [entry.round for entry in ledger.entries] == [0, 0, 5, 5, 6]
    assert len(ledger) == 5
    assert ledger.total_bytes() == 212
    assert repr(ledger) == "CostLedger(4 clients, 5 entries)"


def test_terabytes_are_counted_exactly() -> None:
    ledger = CostLedger({"a": 1})
    ledger.add("a", 0, "other", num_bytes=2**53 + 1)
    assert ledger.total_bytes() == 2**53 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("d", 0, "warmup"), "client of this ledger.*Known: a, b"),
        (("a", 0, "warm-up"), r"known reason.*Did you mean `warmup`\?"),
        (("a", -1, "warmup"), "round"),
        (("a", 0.0, "warmup"), "round"),
        (("a", 0, "warmup", -1), "local_steps"),
        (("a", 0, "warmup", 1, -1), "num_bytes"),
    ],
)
def test_add_checks_its_arguments(arguments: tuple[object, ...], message: str) -> None:
    ledger = CostLedger({"a": 10, "b": 10})
    with pytest.raises(ConfigurationError, match=message):
        ledger.add(*arguments)  # type: ignore[arg-type]
    assert len(ledger) == 0


@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_numbers_of_rounds_are_checked(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"num_rounds\[a\]"):
        CostLedger({"a": value})  # type: ignore[dict-item]


def test_csv_round_trip(tmp_path: Path) -> None:
    ledger = CostLedger({"a": 5, 'comma, "quote"': 5})
    ledger.add("a", 1, "warmup", local_steps=2, num_bytes=3, seconds=0.25)
    ledger.add('comma, "quote"', 4, "final")
    path = tmp_path / "ledger.csv"
    ledger.to_csv(path)
    assert path.read_text() == (
        "client_id,round,reason,local_steps,num_bytes,seconds\n"
        "a,1,warmup,2,3,0.25\n"
        '"comma, ""quote""",4,final,1,0,0.0\n'
    )
    read = CostLedger.from_csv(path, ledger.num_rounds)
    assert read.entries == ledger.entries
    assert read.cp() == ledger.cp()
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.csv"]


def test_csv_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "ledger.csv"
    CostLedger({"a": 5}).to_csv(path)
    old, synced, fsync = path.read_text(), [], os.fsync

    def note(handle: int) -> None:
        fsync(handle)
        synced.append(path.read_text())

    monkeypatch.setattr(os, "fsync", note)
    ledger = CostLedger({"a": 5})
    ledger.add("a", 1, "warmup")
    ledger.to_csv(path)
    assert synced == [old, old + "a,1,warmup,1,0,0.0\n"]  # the file, then the folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "start with the columns client_id, round"),
        ("a,1,warmup,2,3\n", "start with the columns"),
        (
            "client_id,round,reason,local_steps,num_bytes,seconds\na,1,warmup,2,3,0\na,x,warmup,2,3,0\n",
            "line 3",
        ),
        ("client_id,round,reason,local_steps,num_bytes,seconds\na,1,warmup\n", "line 2"),
        (
            "client_id,round,reason,local_steps,num_bytes,seconds\nz,1,warmup,1,1,0\n",
            "line 2.*client",
        ),
    ],
)
def test_a_csv_that_is_not_ours(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ledger.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"{path}.*{message}"):
        CostLedger.from_csv(path, {"a": 5})


def test_state_dict_round_trip_through_a_file(tmp_path: Path) -> None:
    ledger = example()
    torch.save(ledger.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    restored = CostLedger(ledger.num_rounds)
    restored.load_state_dict(state)
    assert restored.entries == ledger.entries
    restored.add("c", 7, "final")
    assert len(restored) == 6
    assert len(ledger) == 5


def test_an_empty_ledger_has_a_state_too() -> None:
    ledger = example()
    ledger.load_state_dict(CostLedger(ledger.num_rounds).state_dict())
    assert ledger.entries == ()


def test_a_state_is_a_snapshot() -> None:
    ledger = example()
    state = ledger.state_dict()
    ledger.add("c", 1, "other")
    ledger.load_state_dict(state)
    assert len(ledger) == 5


def test_reasons_are_restored_by_name() -> None:
    state = copy.deepcopy(example().state_dict())
    order = list(range(len(REASONS)))
    random.Random(3).shuffle(order)
    state["reasons"] = [REASONS[i] for i in order]
    state["rows"][:, 2] = torch.tensor([order.index(int(i)) for i in state["rows"][:, 2]])
    restored = CostLedger(example().num_rounds)
    restored.load_state_dict(state)
    assert restored.entries == example().entries


@pytest.mark.parametrize("num_rounds", [{"a": 10, "b": 4}, {"b": 4, "a": 10, "c": 8, "late": 0}])
def test_a_state_of_other_clients_is_refused(num_rounds: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="same clients"):
        CostLedger(num_rounds).load_state_dict(example().state_dict())


def test_requests_bytes_and_seconds_by_client() -> None:
    ledger = CostLedger({"a": 4, "b": 4, "c": 4})
    ledger.add("a", 0, "warmup", num_bytes=100, seconds=0.5)
    ledger.add("a", 1, "warmup", num_bytes=50, seconds=0.25)
    ledger.add("b", 1, "warmup", num_bytes=7, seconds=1.0)
    assert ledger.by_client() == {"a": (2, 150, 0.75), "b": (1, 7, 1.0), "c": (0, 0, 0.0)}
    assert ledger.total_seconds() == 1.75
    with pytest.raises(ConfigurationError, match="Expected `seconds` to be"):
        ledger.add("a", 2, "warmup", seconds=-1.0)
