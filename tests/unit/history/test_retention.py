"""What a history keeps of client updates, and how those who read it cope with the rest."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.detectors import FLDetector, KnownMalicious
from fedrec.exceptions import ConfigurationError, HistoryFormatError, RoundNotFoundError
from fedrec.history import LMDBHistory, Manifest, MemoryHistory, compact, info, repair
from fedrec.history.conversion import to_record
from fedrec.history.retention import Retention
from fedrec.history.rounds import RoundArrays
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe
from fedrec.recoverers import FedRecover, HistoricalOnly, TrainFromScratch
from fedrec.testing.problems import quadratic_federation

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000
ROUNDS = 12
POLICIES: list[dict[str, Any]] = [
    {"every": 3},
    {"last": 4},
    {"clients": 2},
    {"clients": 0.5},
    {"every": 2, "last": 5, "clients": 3},
    {"last": 50},
]


def in_time(t: int, num_rounds: int, keep: dict[str, Any]) -> bool:
    return t % keep.get("every", 1) == 0 and num_rounds - t <= keep.get("last", num_rounds)


# -- the policy -----------------------------------------------------------------------------------


def test_clients_are_drawn_once_from_the_seed() -> None:
    ids = [f"c{i}" for i in range(40)]
    drawn = Retention(clients=0.25).sample(ids, seed=1)
    assert len(drawn) == 10
    assert drawn < set(ids)
    assert drawn == Retention(clients=10).sample(ids[::-1], seed=1)
    assert drawn != Retention(clients=10).sample(ids, seed=2)
    assert drawn < Retention(clients=11).sample(ids, seed=1)
    assert Retention(clients=0.001).count(40) == 1
    assert Retention(clients=1.0).sample(ids, seed=1) == set(ids)
    # No client is favoured: of 400 draws of 10 from 40, each is in about 100.
    draws = [Retention(clients=10).sample(ids, seed=s) for s in range(400)]
    often = [sum(c in drawn for drawn in draws) for c in ids]
    assert sum(often) == 4000
    assert 60 < min(often) <= max(often) < 140


@pytest.mark.parametrize(
    "keep",
    [
        {"every": 0},
        {"every": 2.0},
        {"last": 0},
        {"last": True},
        {"clients": 0},
        {"clients": 0.0},
        {"clients": 1.5},
        {"clients": "2"},
        {"clients": float("nan")},
        {"first": 3},
        "last",
        3,
        [("last", 3)],
    ],
)
def test_what_is_no_policy_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected `keep"):
        LMDBHistory(tmp_path, keep=keep)
    with pytest.raises(ConfigurationError, match="Expected `keep"):
        MemoryHistory(keep=keep)


def test_more_clients_than_there_are(tmp_path: Path, manifest: Manifest) -> None:
    for history in (LMDBHistory(tmp_path, keep={"clients": 6}), MemoryHistory(keep={"clients": 6})):
        with pytest.raises(ConfigurationError, match="at most the 5 clients"):
            history.begin(manifest)
        assert history.is_empty


def test_a_recipe_says_it_by_the_same_name() -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    store = "history={class_path: LMDBHistory, init_args: {keep: {last: 5, clients: 0.2}}}"
    assert load_recipe(recipe, [store]).config["history"]["init_args"]["keep"]["last"] == 5


# -- the stores -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "transaction_bytes"),
    [*((keep, 2**28) for keep in POLICIES), ({"last": 4}, 1)],
    ids=str,
)
def test_what_is_kept_is_there_and_nothing_else(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    keep: dict[str, Any],
    transaction_bytes: int,
) -> None:
    on_disk, in_memory = LMDBHistory(tmp_path, keep=keep), MemoryHistory(keep=keep)
    on_disk.transaction_bytes = transaction_bytes
    refused = {IDS[4]: "silent"}
    for history in (on_disk, in_memory):
        history.begin(manifest)
        for t in range(ROUNDS):
            if t == 6:
                history.close()  # what is written later goes on as before
            history.write_round(to_record(arrays(t, IDS[:4], cohort=IDS, refused=refused)))
    assert on_disk.manifest.keep == in_memory.manifest.keep == keep
    sample = Retention.of(keep).sample(IDS, seed=0)
    num_kept = 0
    for t in range(ROUNDS):
        kept = tuple(c for c in IDS[:4] if c in sample and in_time(t, ROUNDS, keep))
        num_kept += len(kept)
        wanted = arrays(t, kept)
        for history in (on_disk, in_memory):
            assert history.index(t).present == IDS[:4]
            assert history.index(t).kept == kept
            found = history.read_round(t, kept)
            np.testing.assert_array_equal(found.updates.numpy(), wanted.updates)
            np.testing.assert_array_equal(found.global_weights, wanted.global_weights)
            np.testing.assert_array_equal(found.aggregate, wanted.aggregate)
            assert found.present == IDS[:4]
            assert found.refused == refused
            bounds = dict(zip(kept, np.abs(wanted.updates).max(axis=1).tolist(), strict=True))
            assert history.index(t).bounds == bounds
            if len(kept) < 4:
                lost = next(c for c in IDS[:4] if c not in kept)
                with pytest.raises(RoundNotFoundError, match=rf"`index\({t}\)\.kept`"):
                    history.read_round(t)
                with pytest.raises(RoundNotFoundError, match=lost):
                    history.read_round(t, [lost])
    assert on_disk.verify() == range(ROUNDS)
    on_disk.close()
    told = info(tmp_path)
    assert told.num_updates == num_kept
    assert told.keep == keep
    compact(tmp_path)
    with LMDBHistory(tmp_path) as history:  # as recorded
        assert history.verify() == range(ROUNDS)
        assert history.manifest.keep == keep
        assert sum(len(history.index(t).kept) for t in range(ROUNDS)) == num_kept
    with (
        LMDBHistory(tmp_path, keep={"last": 49}) as history,
        pytest.raises(HistoryFormatError, match="leave `keep` out"),
    ):
        history.rounds()
    with LMDBHistory(tmp_path, keep=keep) as history:
        assert history.rounds() == range(ROUNDS)


def test_deleting_as_it_goes_makes_the_file_no_larger(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    """A vector takes 2 pages of 4,096 bytes; what is free is used again the round after next."""
    store = LMDBHistory(tmp_path, keep={"last": 3})
    store.begin(manifest)
    sizes = []
    for t in range(80):
        store.append(arrays(t))
        sizes.append(store.num_bytes())
    assert store.verify() == range(80)
    store.close()
    two_vectors = 4 * 4096  # global weights and aggregate; their keys and round records: below
    assert sizes[79] - sizes[9] <= 70 * (two_vectors + 2 * 4096)
    pages_of_updates = (3 + 2) * 5 * 2
    slack = 2**20  # what the file is lengthened by before anything is deleted
    assert sizes[79] <= 4096 * (pages_of_updates + 80 * 6 + 20) + slack


def test_killed_in_a_round_nothing_is_missing(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    """What expires with a round is deleted in the transaction that commits it."""
    store = LMDBHistory(tmp_path, keep={"last": 2})
    store.transaction_bytes = 1  # every value in a transaction of its own
    store.begin(manifest)
    for t in range(4):
        store.append(arrays(t))
    calls = 0
    environment = store._open()[1]
    write = environment.write

    def dies(num_bytes: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:  # of 5 updates and 2 vectors of the model
            raise KeyboardInterrupt
        return write(num_bytes)

    environment.write = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.append(arrays(4))
    environment.write = write  # type: ignore[method-assign]
    store.close()
    store = LMDBHistory(tmp_path)
    assert store.verify() == range(4)
    np.testing.assert_array_equal(store.read(2).updates, arrays(2).updates)
    store.append(arrays(4))
    assert [bool(store.index(t).bounds) for t in range(5)] == [False, False, False, True, True]
    store.close()


def damage(path: Path, database: bytes, t: int, index: int) -> None:
    with lmdb.open(str(path), max_dbs=8, map_size=2**30) as env:
        db = env.open_db(database, create=False)
        with env.begin(write=True) as txn:
            record = bytearray(txn.get(struct.pack(">II", t, index), db=db) or b"")
            record[60] ^= 1
            txn.put(struct.pack(">II", t, index), bytes(record), db=db)


def test_repair_brings_back_nothing_that_was_not_kept(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path, keep={"last": 4})
    store.begin(manifest)
    for t in range(10):
        store.append(arrays(t))
    store.close()
    damage(tmp_path, b"updates", 7, 1)
    damage(tmp_path, b"models", 8, 2**32 - 4)
    done = repair(tmp_path)
    assert (done.rounds, done.dropped) == (8, ((7, "client-1"),))
    with LMDBHistory(tmp_path) as history:
        # Of the last four of eight rounds, 4 and 5 had expired when there were ten.
        assert history.verify() == range(8)
        assert [len(history.index(t).kept) for t in range(8)] == [0, 0, 0, 0, 0, 0, 5, 4]
        assert history.index(7).present == ("client-0", "client-2", "client-3", "client-4")
        history.write_round(to_record(arrays(8)))
        history.write_round(to_record(arrays(9)))
        assert [len(history.index(t).kept) for t in range(10)] == [0, 0, 0, 0, 0, 0, 5, 4, 5, 5]
        history.write_round(to_record(arrays(10)))
        assert [len(history.index(t).kept) for t in range(5, 11)] == [0, 0, 4, 5, 5, 5]
        assert history.verify() == range(11)


# -- recovery -------------------------------------------------------------------------------------


def loop(folder: Path | None = None, *callbacks: Callback) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu",
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )


def recorded_with(keep: dict[str, Any]) -> tuple[Any, MemoryHistory]:
    federation, history = quadratic_federation(), MemoryHistory(keep=keep)
    loop().record(federation, FedAvg(), history, max_rounds=30, server_lr=0.3)
    return federation, history


def simulate(
    federation: Any, keep: dict[str, Any], *, ask: bool, exact: set[int]
) -> tuple[np.ndarray, int]:
    """Recover by hand in float64: kept updates as they were sent, the others asked for or left out.

    The update of a client is A (w - c); the recording is plain gradient descent by all clients.
    """
    clients = federation.clients
    a = [c.hessian.double().numpy() for c in clients]
    c = [c.centre.double().numpy() for c in clients]
    size = np.array([c.num_samples for c in clients], float)
    sample = Retention.of(keep).sample(federation.client_ids, seed=0)
    w = old = np.zeros(4)
    asked = 0
    for t in range(30):
        sent = [a[i] @ (old - c[i]) for i in range(5)]
        rows = []
        for i in range(4):  # the fifth is malicious
            kept = clients[i].client_id in sample and in_time(t, 30, keep)
            if t in exact or (ask and not kept):
                asked += 1
                rows.append((size[i], a[i] @ (w - c[i])))
            elif kept:
                rows.append((size[i], sent[i]))
        total = sum(n for n, _ in rows)
        w = w - 0.3 * sum((n / total * g for n, g in rows), np.zeros(4))
        old = old - 0.3 * sum(n / size.sum() * g for n, g in zip(size, sent, strict=True))
    return w, asked


KEEPS = [{"every": 3}, {"last": 8}, {"clients": 3}, {"every": 2, "clients": 2}]


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_a_client_whose_update_was_not_kept_is_asked(
    keep: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    federation, history = recorded_with(keep)
    method = FedRecover(
        warmup_rounds=4, correction_period=None, final_rounds=2, estimator="history",
        tolerance_rate=None,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "fedrec"):
        result = loop().recover(federation, history, method, ["q4"])
    exact = {0, 1, 2, 3, 28, 29}
    weights, asked = simulate(federation, keep, ask=True, exact=exact)
    np.testing.assert_allclose(result.global_weights.numpy(), weights, rtol=1e-5, atol=1e-6)
    reasons = [entry.reason for entry in result.ledger.entries]
    assert len(reasons) == asked
    assert reasons.count("fallback") == asked - 4 * 6
    assert f"did not keep {asked - 24} of the 96 updates" in caplog.text
    assert result.diagnostics["estimated_updates"] == 120 - asked


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_history_alone_uses_what_was_kept(keep: dict[str, Any]) -> None:
    federation, history = recorded_with(keep)
    result = loop().recover(federation, history, HistoricalOnly(), ["q4"])
    weights, _ = simulate(federation, keep, ask=False, exact=set())
    np.testing.assert_allclose(result.global_weights.numpy(), weights, rtol=1e-5, atol=1e-6)
    assert len(result.ledger.entries) == 0


@pytest.mark.parametrize("keep", [{"last": 1}, *KEEPS], ids=str)
def test_training_again_needs_no_update(keep: dict[str, Any]) -> None:
    federation, history = recorded_with(keep)
    result = loop().recover(federation, history, TrainFromScratch(), ["q4"])
    other = loop().recover(*recorded_with({}), TrainFromScratch(), ["q4"])
    assert torch.equal(result.global_weights, other.global_weights)


def test_pairs_come_from_rounds_that_were_kept(tmp_path: Path) -> None:
    """One of two clients is estimated from its own pairs, as if the other's had been kept, too."""
    federation = quadratic_federation()
    sample = Retention(clients=3).sample(federation.client_ids, seed=0)
    kept = [c for c in ("q0", "q1", "q2", "q3") if c in sample]
    assert 0 < len(kept) < 4
    method = FedRecover(warmup_rounds=6, correction_period=5, final_rounds=3, tolerance_rate=None)
    seen: dict[str, list[Any]] = {}
    for name, keep in (("all", {}), ("some", {"clients": 3})):
        with LMDBHistory(tmp_path / name, keep=keep) as history:
            loop().record(federation, FedAvg(), history, max_rounds=30, server_lr=0.3)
            result = loop().recover(federation, history, method, ["q4"])
        seen[name] = [(e.client_id, e.round) for e in result.ledger.entries]
        slots = method.estimator._pairs.stamp[[c in kept for c in ("q0", "q1", "q2", "q3")]]
        assert slots.max() == 25  # the last correction
        lost = method.estimator._pairs.stamp[[c not in kept for c in ("q0", "q1", "q2", "q3")]]
        assert lost.max() == (25 if name == "all" else -1)
    exact = [t for t in range(30) if method.exact_reason(t, 30) is not None]
    assert [t for c, t in seen["all"] if c in kept] == [t for t in exact for _ in kept]
    assert [p for p in seen["some"] if p[0] in kept] == [p for p in seen["all"] if p[0] in kept]
    for client_id in {"q0", "q1", "q2", "q3"} - set(kept):
        assert [t for c, t in seen["some"] if c == client_id] == list(range(30))


def test_recoveries_that_would_be_another_method_are_refused() -> None:
    federation, history = recorded_with({"last": 5})
    for method, told in (
        (FedRecover(warmup_rounds=4, final_rounds=5), "ask for all 76 of them"),
        (FedRecover(warmup_rounds=4, estimator="paper"), "needs all 120 updates .* keeps 20"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            loop().recover(federation, history, method, ["q4"])
    federation, history = recorded_with({"clients": 1})
    (only,) = Retention(clients=1).sample(federation.client_ids, seed=0)
    with pytest.raises(ConfigurationError, match="HistoricalOnly needs updates"):
        loop().recover(federation, history, HistoricalOnly(), [only])


# -- detection and resuming -----------------------------------------------------------------------


class _StopAfter(Callback):
    def on_round_end(self, loop: FederatedLoop, ctx: Any, metrics: object) -> None:
        if ctx.round == 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize("keep", [{"last": 2}, {"every": 5}, {"clients": 2}], ids=str)
def test_an_interrupted_recording_goes_on(tmp_path: Path, keep: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {"max_rounds": 12, "server_lr": 0.3}
    with LMDBHistory(tmp_path / "whole", keep=keep) as whole:
        expected = loop().record(quadratic_federation(), FedAvg(), whole, **kinds)
        with (
            LMDBHistory(tmp_path / "parts", keep=keep) as parts,
            pytest.raises(KeyboardInterrupt),
        ):
            loop(None, _StopAfter()).record(quadratic_federation(), FedAvg(), parts, **kinds)
        with LMDBHistory(tmp_path / "parts") as parts:
            oracle = {"detector": KnownMalicious()}
            result = loop().record(
                quadratic_federation(), FedAvg(), parts, resume=True, **oracle, **kinds
            )
            assert torch.equal(result.global_weights, expected.global_weights)
            assert result.detection.malicious == ("q4",)
            for t in range(12):
                assert parts.index(t).kept == whole.index(t).kept
                a, b = (h.read_round(t, whole.index(t).kept) for h in (whole, parts))
                assert torch.equal(a.updates, b.updates)
                assert torch.equal(a.global_weights, b.global_weights)
            assert parts.verify() == range(12)


def test_a_detector_that_needs_updates_says_which_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation, history = quadratic_federation(), MemoryHistory(keep={"last": 5})
    with caplog.at_level(logging.WARNING, "fedrec"), pytest.raises(KeyboardInterrupt):
        loop(None, _StopAfter()).record(
            federation, FedAvg(), history, max_rounds=12, server_lr=0.3, detector=FLDetector()
        )
    assert "may not be resumable" in caplog.text
    with pytest.raises(ConfigurationError, match=r"Cannot resume.* of round 0 again"):
        loop().record(
            federation, FedAvg(), history, max_rounds=12, server_lr=0.3, detector=FLDetector(),
            resume=True,
        )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"FLDetector needs .* all of round 0"):
        FLDetector().detect(history)
    assert KnownMalicious().detect(history).malicious == ("q4",)
