"""Forgetting a client: nothing it sent is left, and the others are as they were."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec._derived import forget_derived
from fedrec.aggregators import TrimmedMean
from fedrec.callbacks import Callback
from fedrec.cli.main import main
from fedrec.data import Digits
from fedrec.exceptions import (
    ConfigurationError,
    ForgottenError,
    HistoryCorruptedError,
    HistoryError,
    HistoryFullError,
    HistoryKeyError,
    HistoryLockedError,
    RoundNotFoundError,
)
from fedrec.federation import ClientSampler
from fedrec.history import (
    LMDBHistory,
    Manifest,
    ShardedHistory,
    compact,
    export_history,
    forget,
    info,
    register_derived,
    repair,
)
from fedrec.history.lmdb.records import FORGOTTEN, StoredManifest
from fedrec.history.rounds import RoundArrays
from fedrec.models import MLP
from fedrec.recipe import load_recipe
from fedrec.recipe import run as run_recipe
from fedrec.recipe.folder import RunFolder
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import quadratic_federation

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000
KEPT = tuple(c for c in IDS if c != "client-2")
HEX = "0f" * 32
CODECS = ["float32", "lz4", "zstd", "float16", "int8", "int8+zstd", "sign"]


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", HEX)
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX)


@pytest.fixture
def run(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> Callable[..., Path]:
    """Return a function that makes a run folder with a history of three rounds."""

    def make(
        codec: str = "float32", encrypted: bool = False, name: str = "run", **changes: Any
    ) -> Path:
        folder = tmp_path / name
        (folder / "record").mkdir(parents=True)
        source = "env:MINE" if encrypted else None
        store = LMDBHistory(folder / "history", codec=codec, master_key=source)
        store.begin(manifest)
        for t in range(3):
            store.append(arrays(t, **changes))
        store.close()
        return folder

    return make


def raw_records(path: Path) -> dict[tuple[str, int, int], bytes]:
    found = {}
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        for name in ("meta", "models", "updates", "rounds"):
            db = env.open_db(name.encode(), create=False)
            with env.begin() as txn:
                for key, value in txn.cursor(db):
                    found[(name, *struct.unpack(">II", key))] = value
    return found


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces of the data, one in every 64 bytes, that nobody else has by chance."""
    for start in range(0, len(data) - 16, 64):
        piece = data[start : start + 16]
        if len(set(piece)) >= 8:
            yield piece


def everything(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


# -- what is gone, and what is not ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "encrypted"),
    [*((codec, False) for codec in CODECS), ("float32", True), ("int8", True)],
)
def test_no_piece_is_left_and_the_others_stay(
    run: Callable[..., Path], arrays: Callable[..., RoundArrays], codec: str, encrypted: bool
) -> None:
    folder = run(codec, encrypted)
    path = folder / "history"
    store = LMDBHistory(path)
    before = [store.read(t) for t in range(3)]
    bounds = [store.index(t).bounds for t in range(3)]
    old_manifest = store.manifest
    store.close()
    records = raw_records(path)
    gone = [records["updates", t, 2][48:] for t in range(3)]
    gone += [arrays(t).updates[2].tobytes() for t in range(3)]
    assert any(piece in everything(folder) for piece in pieces(gone[0]))

    done = forget(folder, ["client-2"])
    assert (done.clients, done.updates, done.aggregates) == (("client-2",), 3, ())
    assert done.keys == (("client-2",) if encrypted else ())
    left = everything(folder)
    for data in gone:
        for piece in pieces(data):
            assert piece not in left
    after = raw_records(path)
    assert {key for key in records if key[0] != "meta"} - set(after) == {
        ("updates", t, 2) for t in range(3)
    }
    assert b'"client-2": null' in left if encrypted else b"keys" not in left

    store = LMDBHistory(path)
    assert store.verify() == range(3)
    assert store.manifest == old_manifest
    for t in range(3):
        record = store.read(t)
        assert record.client_ids == KEPT
        assert record.cohort == IDS
        assert record.refused == {"client-2": "forgotten"}
        rows = [0, 1, 3, 4]
        np.testing.assert_array_equal(record.updates, before[t].updates[rows])
        np.testing.assert_array_equal(record.global_weights, arrays(t).global_weights)
        np.testing.assert_array_equal(record.aggregate, arrays(t).aggregate)
        assert store.index(t).bounds == {c: bounds[t][c] for c in KEPT}
    store.close()


def test_checksums_and_bounds_are_gone(run: Callable[..., Path]) -> None:
    folder = run()
    entries = {
        k: json.loads(v[48:])
        for k, v in raw_records(folder / "history").items()
        if k[0] == "rounds"
    }
    forget(folder, ["client-2"])
    left = everything(folder)
    for entry in entries.values():
        assert entry["updates"][2].encode() not in left
        assert repr(entry["bounds"][2]).encode() not in left
        assert entry["updates"][1].encode() in left


def test_a_forgotten_client_cannot_be_read_or_written(
    run: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    folder = run()
    done = forget(folder, ["client-2"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", done.when)
    with LMDBHistory(folder / "history") as history:
        assert history.forgotten == ("client-2",)
        with pytest.raises(ForgottenError, match=r"`client-2` of history .* was forgotten on 20"):
            history.read_round(1, ["client-1", "client-2"])
        with pytest.raises(RoundNotFoundError):  # a ForgottenError is one
            history.read_round(1, ["client-2"])
    store = LMDBHistory(folder / "history")
    with pytest.raises(ForgottenError, match=r"`client-2`.*exclude=\['client-2'\].*another name"):
        store.append(arrays(3))
    store.append(arrays(3, KEPT))
    assert store.verify() == range(4)
    store.close()


def test_who_was_forgotten_when_is_chained(run: Callable[..., Path], manifest: Manifest) -> None:
    folder = run()
    path = folder / "history"
    whens = [forget(folder, ids).when for ids in (["client-2"], ["client-0", "client-4"])]
    entries = info(folder).forgotten
    assert [(e["client_id"], e["when"], e["updates"]) for e in entries] == [
        ("client-2", whens[0], 3),
        ("client-0", whens[1], 3),
        ("client-4", whens[1], 3),
    ]
    assert entries[0]["previous"] == ""
    for one, other in itertools.pairwise(entries):
        text = json.dumps(one, sort_keys=True, separators=(",", ":"))
        assert other["previous"] == hashlib.sha256(text.encode()).hexdigest()
    forged = [
        [entries[0], {**entries[1], "client_id": "client-1"}, entries[2]],  # found by the third
        [entries[1], entries[2]],
        [entries[0], entries[2]],
        [entries[1], entries[0], entries[2]],
    ]
    for changed, bad in zip(forged, (3, 1, 2, 1), strict=True):
        record, _ = StoredManifest("x", manifest).pack(
            0, FORGOTTEN, json.dumps({"forgotten": changed}).encode()
        )
        with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
            db = env.open_db(b"meta", create=False)
            with env.begin(write=True) as txn:
                txn.put(struct.pack(">II", 0, FORGOTTEN), record, db=db)
        with LMDBHistory(path) as history:
            (damage,) = history.damage()
        assert damage.part == "the list of forgotten clients"
        assert f"entry {bad} does not follow" in damage.reason


@pytest.mark.parametrize("encrypted", [False, True])
def test_repair_and_compact_remember(run: Callable[..., Path], encrypted: bool) -> None:
    folder = run("float16", encrypted)
    path = folder / "history"
    forget(folder, ["client-2"])
    compact(folder)
    place = (path / "data.mdb").read_bytes().rindex(raw_records(path)["updates", 1, 3][:48])
    with (path / "data.mdb").open("r+b") as file:
        file.seek(place + 100)
        file.write(b"damage")
    assert repair(folder).dropped == ((1, "client-3"),)
    assert (path / "data.mdb.damaged").exists()
    done = forget(folder, ["client-0"])
    assert done.removed == (path / "data.mdb.damaged",)
    with LMDBHistory(path) as history:
        assert history.forgotten == ("client-2", "client-0")
        assert history.read_round(1).refused == {
            "client-0": "forgotten",
            "client-2": "forgotten",
            "client-3": "damaged, dropped by a repair",
        }
        assert history.damage() == []
    assert len(info(folder).repairs) == 1


# -- aggregates that are an update ----------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_an_aggregate_that_is_its_update_goes(
    run: Callable[..., Path], arrays: Callable[..., RoundArrays], codec: str
) -> None:
    """As Krum aggregates. The global weights say the same, less exactly."""
    folder = run(codec, name="krum")
    store = LMDBHistory(folder / "history")
    sent = arrays(3)
    chosen = sent.updates[2].copy()
    store.append(arrays(3, aggregate=chosen))
    store.append(arrays(4, ("client-2",), aggregate=arrays(4).aggregate))
    store.close()
    assert forget(folder, ["client-2"]).aggregates == (3, 4)
    store = LMDBHistory(folder / "history")
    found = store.read(3)
    assert found.global_weights.tobytes() == sent.global_weights.tobytes()
    # Half a unit of w_{t+1} and of w_t - w_{t+1}, over server_lr = 0.5, and one unit to differ.
    following = np.abs(sent.global_weights - np.float32(0.5) * chosen)
    errors = np.abs(found.aggregate.astype(np.float64) - chosen)
    assert (errors <= np.spacing(following) + 2 * np.spacing(np.abs(chosen))).all()
    assert not (found.aggregate == chosen).any()
    assert store.read(4).client_ids == ()
    assert store.verify() == range(5)
    store.close()
    assert info(folder).forgotten[0]["aggregates"] == [3, 4]
    left = everything(folder)
    assert all(piece not in left for piece in pieces(chosen.tobytes()))


def test_an_aggregate_of_forgotten_clients_alone_goes(
    run: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    folder = run()
    store = LMDBHistory(folder / "history")
    store.append(arrays(3, ("client-0", "client-2")))
    store.append(arrays(4, ("client-0", "client-1")))
    store.close()
    assert forget(folder, ["client-0", "client-2"]).aggregates == (3,)
    np.testing.assert_array_equal(store.read(4).aggregate, arrays(4).aggregate)
    np.testing.assert_allclose(store.read(3).aggregate, arrays(3).aggregate, atol=1e-6)
    store.close()


@pytest.mark.parametrize("keep", [{"every": 2}, {"last": 1}, {"clients": 0.5}])
def test_of_what_is_kept(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    keep: dict[str, Any],
) -> None:
    store = LMDBHistory(tmp_path, keep=keep)
    store.begin(manifest)
    for t in range(3):
        store.append(arrays(t))
    held = [set(store.index(t).bounds) for t in range(3)]
    store.close()
    done = forget(tmp_path, ["client-2"])
    assert done.updates == sum("client-2" in clients for clients in held)
    for t in range(3):
        assert set(store.index(t).bounds) == held[t] - {"client-2"}
        assert store.index(t).present == KEPT
    assert store.verify() == range(3)
    store.close()


def test_no_room_for_the_new_file(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(encrypted=True)
    free = shutil.disk_usage(folder)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(HistoryFullError, match=r"100000 bytes are free; the new file needs"):
        forget(folder, ["client-2"])
    monkeypatch.undo()
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX)
    with LMDBHistory(folder / "history") as history:
        assert history.damage() == []  # and nothing has begun, not even with its key
        assert history.read_round(0).client_ids == IDS


def test_what_another_client_sent_too_stays(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    """Attackers who send the same vector: it is the other one's, too."""
    store = LMDBHistory(tmp_path)
    store.begin(manifest)
    same = arrays(0).updates.copy()
    same[3] = same[2]
    store.append(arrays(0, updates=same))
    store.close()
    assert forget(tmp_path, ["client-2"]).updates == 1
    np.testing.assert_array_equal(store.read(0, ["client-3"]).updates[0], same[2])
    store.close()


@pytest.mark.parametrize("store", [LMDBHistory, ShardedHistory])
def test_in_the_middle_of_a_recording(tmp_path: Path, store: Any) -> None:
    """It does not go on; what the error and the docs say instead works."""

    class Interrupt(Callback):
        def on_round_end(self, loop: Any, ctx: Any, metrics: Any) -> None:
            if ctx.round == 3:
                raise KeyboardInterrupt

    clients = quadratic_federation()
    gone, *kept = clients.client_ids

    def record(history: Any, *callbacks: Callback, **more: Any) -> Any:
        loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, callbacks=callbacks)
        more = {"max_rounds": 6, "server_lr": 0.1, "resume": True, **more}
        return loop.record(clients, TrimmedMean(trim=1), history, **more)

    with store(tmp_path / "begun") as history, pytest.raises(KeyboardInterrupt):
        record(history, Interrupt())
    forget(tmp_path / "begun", [gone])
    with store(tmp_path / "begun") as history:
        with pytest.raises(ForgottenError, match=rf"loop\.recover\(.*exclude=\['{gone}'\]"):
            record(history)
        assert history.verify() == range(4)
        loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
        result = loop.recover(clients, history, TrainFromScratch(), exclude=[gone])
        assert result.rounds == 4
    with store(tmp_path / "anew") as history:
        record(history, sampler=ClientSampler(leaves={gone: 0}))
        assert {history.read_round(t).cohort for t in range(6)} == {tuple(kept)}


# -- other files of the run -----------------------------------------------------------------------


def test_other_files_of_the_run(run: Callable[..., Path]) -> None:
    """What is registered goes; what holds nothing of the client stays, and so does the rest."""
    folder = run("int8", encrypted=True)
    (folder / "history" / "new").mkdir()
    (folder / "history" / "new" / "data.mdb").write_bytes(b"left by a kill")
    for name, exclude in (("with", ["client-0"]), ("without", ["client-2", "client-0"])):
        recovery = folder / "recover" / name
        for file in ("checkpoint.npz", "diagnostics.csv"):
            register_derived(recovery / file, without=exclude)
            (recovery / file).write_bytes(b"of those that are not excluded")
        (recovery / "checkpoint.npz.tmp").write_bytes(b"half")
        (recovery / "ledger.csv").write_bytes(b"of nobody's update")
    register_derived(folder / "norms.npy")
    (folder / "norms.npy").write_bytes(b"mine")
    scores = {"client-0": 0.5, "client-2": 0.9}
    RunFolder(folder).write_detection(
        {"spec": {}, "result": {"malicious": ["client-2"], "scores": scores}}
    )
    outside = folder.parent / "outside.bin"
    outside.write_bytes(b"not in the run")
    (folder / "link").symlink_to(outside)
    register_derived(folder / "link")

    done = forget(folder, ["client-2"])
    assert {str(p.relative_to(folder)) for p in done.removed} == {
        "recover/with/checkpoint.npz",
        "recover/with/checkpoint.npz.tmp",
        "recover/with/diagnostics.csv",
        "recover/without/checkpoint.npz.tmp",
        "norms.npy",
        "link",
    }
    assert not any(path.exists() for path in done.removed)
    assert not (folder / "history" / "new").exists()
    assert (folder / "recover" / "without" / "checkpoint.npz").exists()
    assert (folder / "recover" / "without" / "diagnostics.csv").exists()
    assert (folder / "recover" / "with" / "ledger.csv").exists()
    assert outside.exists()
    stored = json.loads((folder / "detection.json").read_text())["result"]
    assert stored == {"malicious": ["client-2"], "scores": {"client-0": 0.5}}


RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [8]}}
aggregator: FoolsGold
detector: NormOutlier
loop: {checkpoint_every: 0}
record: {max_rounds: 12, server_lr: 0.05}
recover: {exclude: [client-0]}
recoverers:
  - class_path: FedRecover
    label: method
    init_args: {warmup_rounds: 3, correction_period: 3, final_rounds: 1, diagnose: true}
"""


def test_whoever_writes_something_of_single_clients_registers_it(tmp_path: Path) -> None:
    """A run with a rule that has a memory, a recovery that compares, and a detector."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    folder = tmp_path / "runs" / "all"
    for steps in (["record"], ["detect"], ["recover"]):
        run_recipe(load_recipe(recipe), folder=folder, steps=steps, progress=False)
    assert (folder / "recover" / "method" / "diagnostics.csv").exists()
    export_history(folder, folder / "plain")
    with LMDBHistory(folder / "history") as history:
        sent = [history.read_round(t, ["client-2"]).updates.numpy().tobytes() for t in range(12)]
    done = forget(folder, ["client-2"])
    left = everything(folder)
    assert all(piece not in left for update in sent for piece in pieces(update))
    scores = json.loads((folder / "detection.json").read_text())["result"]["scores"]
    assert set(scores) == {"client-0", "client-1", "client-3", "client-4"}
    assert not set(done.removed) & set(folder.rglob("*"))
    assert {str(p.relative_to(folder)) for p in done.removed if p.parent.name != "plain"} == {
        "record/aggregator.npz",
        "recover/method/checkpoint.npz",
        "recover/method/diagnostics.csv",
        "report.html",
    }


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_exports_of_the_run(
    run: Callable[..., Path], arrays: Callable[..., RoundArrays], codec: str
) -> None:
    folder = run(codec, encrypted=True)
    store = LMDBHistory(folder / "history")
    store.append(arrays(3, KEPT))
    decoded = [store.read(t, ["client-2"]).updates.tobytes() for t in range(3)]
    store.close()
    export_history(folder, folder / "plain")
    names = sorted(path.name for path in (folder / "plain").glob("*.npz"))
    assert len(names) == 4
    done = forget(folder, ["client-2"])
    assert sorted(path.name for path in done.removed) == names[:3]
    left = everything(folder)
    assert all(piece not in left for data in decoded for piece in pieces(data))


@pytest.mark.parametrize("where", ["linked", "linked, by the link", "of another name", "twice"])
def test_a_history_that_is_linked_to_or_has_another_name(
    run: Callable[..., Path], tmp_path: Path, where: str
) -> None:
    """Whatever the path, what the run derived goes; what is beside the link's target stays."""
    folder = run()
    path = folder / "history"
    checkpoint = folder / "recover" / "all" / "checkpoint.npz"
    register_derived(checkpoint)
    checkpoint.write_bytes(b"of all")
    export_history(folder, folder / "plain")
    others = tmp_path / "disk" / "other" / "norms.npy"
    register_derived(others)
    others.write_bytes(b"of another run")
    if where == "of another name":
        target = path = path.rename(folder / "lmdb")
    else:
        target = path.rename(tmp_path / "disk" / "h8")
        path.symlink_to(target, target_is_directory=True)
    gone = [checkpoint, *sorted((folder / "plain").glob("*.npz"))]
    if where == "twice":
        forget(target, ["client-2"])  # which knows of no run
        assert all(file.exists() for file in gone)
    done = forget(folder if where in ("linked", "twice") else path, ["client-2"])
    assert done.removed == tuple(gone)
    assert not any(file.exists() for file in gone)
    assert others.exists()
    with LMDBHistory(target) as history:
        assert history.forgotten == ("client-2",)
        assert history.verify() == range(3)


def test_a_history_alone_is_not_taken_for_a_run(
    tmp_path: Path, recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = recorded()  # tmp_path/history
    beside = tmp_path / "mine.bin"
    beside.write_bytes(arrays(1).updates[2].tobytes())
    assert forget(path, ["client-2"]).removed == ()
    assert beside.exists()


def test_the_last_line_about_a_file_counts(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for exclude in (["a"], ["b"], ["b"]):
        register_derived(one, without=exclude)
    register = tmp_path / "derived.jsonl"
    assert register.read_text().count("one") == 2
    with register.open("a") as file:
        file.write('\n{"file": "other", "wi')  # a power cut
    one.write_text("of a")
    other.write_text("not registered yet")
    assert list(forget_derived(tmp_path, ["b"])) == []
    register_derived(other, keys=["scores"])
    other.write_text("no JSON")
    assert list(forget_derived(tmp_path, ["b"])) == [other]
    assert list(forget_derived(tmp_path, ["a", "b"])) == [one]


# -- mistakes, and others who have it open --------------------------------------------------------


def test_refusals_change_nothing(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(encrypted=True)
    for ids in (["nobody"], []):
        with pytest.raises(ConfigurationError, match=r"ids of recorded clients.*Known: client-0"):
            forget(folder, ids)
    with LMDBHistory(folder / "history") as history:
        history.rounds()
        with pytest.raises(HistoryLockedError, match="is used by another store"):
            forget(folder, ["client-2"])
    monkeypatch.delenv("FEDREC_HISTORY_KEY")
    with pytest.raises(HistoryKeyError, match="is encrypted"):
        forget(folder, ["client-2"])
    data = folder / "history" / "data.mdb"
    place = data.read_bytes().rindex(raw_records(folder / "history")["updates", 1, 3][:48])
    with data.open("r+b") as file:
        file.seek(place + 100)
        file.write(b"damage")
    damaged = everything(folder)
    with pytest.raises(HistoryCorruptedError, match=r"round 1, client `client-3`.*repair"):
        forget(folder, ["client-2"], master_key="env:MINE")
    assert [p.name for p in sorted((folder / "history").iterdir())] == [
        *("data.mdb", "keys.json", "lock.mdb", "writer.lock")
    ]
    assert len(everything(folder)) == len(damaged)
    # Its own damage does not matter: it goes.
    forget(folder, ["client-3"], master_key="env:MINE")
    assert LMDBHistory(folder / "history", master_key="env:MINE").verify() == range(3)


# -- killed ---------------------------------------------------------------------------------------

_KILL = """
import os, signal, sys
from fedrec.history.tools import forget as module
folder, moment = sys.argv[1:]
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
def around(name):
    call = getattr(module, name)
    setattr(module, name, lambda *a, **k: (moment == "after " + name and call(*a, **k), die()))
pid = os.fork()
if pid == 0:
    around(moment.partition(" ")[2])
    module.forget(folder, ["client-2"])
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("moment", "encrypted"),
    [
        ("before write_note", False),
        ("before _remove_others", True),
        ("after destroy", True),
        ("after copy_rounds", False),
        ("after copy_rounds", True),
        ("after put_in_place", False),
    ],
)
def test_killed_and_finished(
    run: Callable[..., Path],
    run_script: Callable[..., str],
    moment: str,
    encrypted: bool,
) -> None:
    folder = run("float16", encrypted)
    path = folder / "history"
    with LMDBHistory(path) as history:
        others = [history.read_round(t, KEPT).updates for t in range(3)]
        decoded = history.read_round(1, ["client-2"]).updates.numpy().tobytes()
    register_derived(folder / "export.bin")
    (folder / "export.bin").write_bytes(decoded)
    gone = [raw_records(path)["updates", t, 2][48:] for t in range(3)] + [decoded]
    assert run_script(_KILL, folder, moment).strip() == "-9"

    with LMDBHistory(path) as history:  # what is there is whole, and says what it is
        if moment == "before write_note":
            assert history.damage() == []
            assert history.read_round(0).client_ids == IDS
        else:
            (damage,) = history.damage()
            assert "forgetting client-2 was interrupted" in str(damage)
            assert f"fedrec history forget {path} --client client-2" in str(damage)
            assert history.forgotten == ("client-2",)
            with pytest.raises(ForgottenError, match="interrupted"):
                history.read_round(0, ["client-2"])
        for t in range(3):
            assert history.read_round(t, KEPT).updates.equal(others[t])
    if moment != "before write_note":
        for tool in (compact, repair):
            with pytest.raises(HistoryError, match="forgetting client-2 was interrupted"):
                tool(folder)

    # Another call finishes what was begun, also if it is about another client.
    asked = "client-2" if moment == "before write_note" else "client-4"
    done = forget(folder, [asked])
    assert set(done.clients) == {"client-2", asked}
    left = everything(folder)
    for data in gone:
        assert all(piece not in left for piece in pieces(data))
    assert not (folder / "export.bin").exists()
    assert sorted(p.name for p in path.iterdir()) == sorted(
        {"data.mdb", "lock.mdb", "writer.lock"} | ({"keys.json"} if encrypted else set())
    )
    with LMDBHistory(path) as history:
        assert history.damage() == []
        assert set(history.forgotten) == {"client-2", asked}
        kept = tuple(c for c in KEPT if c != asked)
        for t in range(3):
            assert history.read_round(t).client_ids == kept
            assert history.read_round(t, kept).updates.equal(others[t][: len(kept)])


def test_a_note_of_another_history_is_none_of_ours(recorded: Callable[..., Path]) -> None:
    path = recorded()
    note = {
        "store_id": "00" * 16,
        "clients": ["client-1"],
        "when": "",
        "aggregates": [],
        "updates": [],
    }
    (path / "forgetting.json").write_text(json.dumps(note))
    assert LMDBHistory(path).verify() == range(3)
    (path / "forgetting.json").write_text("{")
    with pytest.raises(HistoryCorruptedError, match=r"forgetting\.json.*remove it"):
        LMDBHistory(path).read(0)
    (path / "forgetting.json").unlink()
    assert LMDBHistory(path).forgotten == ()


# -- command --------------------------------------------------------------------------------------


def test_command(
    run: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = run(encrypted=True)
    key = folder.parent / "master.key"
    monkeypatch.delenv("FEDREC_HISTORY_KEY")
    words = ["history", "forget", str(folder), "--client", "client-2", "--client", "client-0"]
    assert main(["history", "new-key", str(key)]) == 0
    assert main([*words, "--key-file", str(key)]) == 2
    assert "The master key is not the one" in capfd.readouterr().err
    key.write_text(HEX)
    assert main([*words, "--key-file", str(key), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["clients"] == found["keys"] == ["client-0", "client-2"]
    assert (found["updates"], found["removed"]) == (6, [])
    assert main(["history", "info", str(folder), "--key-file", str(key)]) == 0
    text = capfd.readouterr().out
    assert "encryption  AES-256-GCM" in text
    assert f"forgotten   client-2 on {found['when']}, 3 updates" in text
    assert main(["history", "verify", str(folder)]) == 0
    assert "checksums were compared and no more" in capfd.readouterr().out


# -- recovery -------------------------------------------------------------------------------------


def federation(client_ids: tuple[str, ...] | None = None) -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(8,))
    data = Digits(num_clients=5)
    clients = [
        LightningClient(client_id, module, samples, batch_size=8)
        for client_id, samples in data.client_datasets().items()
        if client_ids is None or client_id in client_ids
    ]
    return Federation(clients, module, test_dataset=data.test_dataset)


def loop() -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, seed=3)


def recoverer() -> FedRecover:
    return FedRecover(warmup_rounds=3, correction_period=3, final_rounds=1, tolerance_rate=1e-3)


def test_recovery_without_the_client_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "history"
    with LMDBHistory(path, codec="int8", master_key="env:MINE") as history:
        loop().record(federation(), TrimmedMean(trim=1), history, max_rounds=9, server_lr=0.2)
        exclude = ["client-2"]
        before = loop().recover(federation(), history, recoverer(), exclude).global_weights
        wider = ["client-0", "client-2"]
        two = loop().recover(federation(), history, recoverer(), wider).global_weights
    forget(path, ["client-2"])
    with LMDBHistory(path) as history:
        with pytest.raises(ConfigurationError, match=r"\['client-2'\] cannot take part: they were"):
            loop().recover(federation(), history, recoverer(), ["client-0"])
        others = federation(("client-0", "client-1", "client-3", "client-4"))
        after = loop().recover(others, history, recoverer(), exclude).global_weights
        assert after.equal(before)
        assert loop().recover(federation(), history, recoverer(), wider).global_weights.equal(two)
        assert not after.equal(two)
