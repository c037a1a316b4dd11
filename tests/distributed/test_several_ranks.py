"""Several processes come to what one does, bit for bit, and end together when one of them fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedrec.history import ShardedHistory
from fedrec.loop.checkpoint import load_state

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[1]
_SECONDS = 500

# A dozen processes import torch, one after the other on a busy machine.
pytestmark = pytest.mark.timeout(900)


def _start(*words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])
    started = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in started}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=environment | {"PYTHONPATH": path},
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str], code: int | None = 0) -> str:
    """Wait for a command; return what it has written. No process of it may be left."""
    try:
        output, _ = process.communicate(timeout=_SECONDS)
        if code is None:
            assert process.returncode != 0, output
        else:
            assert process.returncode == code, output
        _wait_for_group(process.pid)
        return output
    finally:
        if process.poll() is None or _group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(group: int) -> None:
    until = time.monotonic() + 60
    while _group_lives(group):
        assert time.monotonic() < until, "a process was left behind"
        time.sleep(0.1)


def _run(*words: object, code: int | None = 0) -> str:
    return _finish(_start(*words), code)


@pytest.mark.slow
def test_one_and_three_ranks_come_to_the_same_with_every_component(tmp_path):
    files = {devices: tmp_path / f"{devices}.json" for devices in (1, 3)}
    script = _HERE / "ranks_outcomes.py"
    for devices, file in files.items():
        _run(script, devices, file)
    one, three = (json.loads(files[devices].read_text()) for devices in (1, 3))
    assert len(one) > 100
    assert one == three
    # Most are results, not refusals.
    hashes = [value for value in one.values() if len(value) == 64 and " " not in value]
    assert len(hashes) > 0.9 * len(one)


@pytest.mark.slow
def test_recoveries_come_to_the_same_and_no_rank_gets_the_rows_of_others(tmp_path):
    for devices in (1, 3):
        _run(_HERE / "ranks_fedrecover.py", devices, tmp_path)
    one, three = (json.loads((tmp_path / f"{devices}.json").read_text()) for devices in (1, 3))
    assert one == three
    for name in ("abnormal", "estimate"):  # some estimates are used, and some are not
        assert one[name]["estimated_updates"] > 0
        assert one[name]["asked"]["abnormality"] > 0
    assert one["outgrown"]["asked"]["abnormality"] > 8 * 4  # most of them, in most rounds
    assert one["filter"]["filtered_updates"] > 0
    # Half of the eight clients have no estimate in the eight estimated rounds.
    assert one["own"]["asked"] == {
        "warmup": 4 * 8, "fallback": 8 * 4, "correction": 8, "final": 8,
    }  # fmt: skip
    assert one["own"]["mean_of_equals"] == 0.1
    recordings = {name: found for name, found in one.items() if name.startswith("recording, ")}
    assert len(recordings) == 12
    assert all(found["scored"] >= 5 for found in recordings.values())  # of seven rounds
    loud = [found["flagged"] for name, found in recordings.items() if "NormOutlier" in name]
    assert loud == 4 * [["client-0", "client-9"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a recording and a recovery come to in one process, and the history."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _run(_HERE / "ranks_run.py", 1, folder, "record,recover")
    found = {step: (folder / f"{step}.txt").read_text() for step in ("record", "recover")}
    return found | {"history": folder / "history"}


def _why(folder: Path, rank: int) -> str:
    return (folder / "run" / f"rank-{rank}.log").read_text()


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_other_numbers_of_ranks_go_on_to_the_same_bits(
    tmp_path, undisturbed
):
    script = _HERE / "ranks_run.py"
    said = "Rank 1 has failed (killed by signal 9), which ends all others"
    assert said in _run(script, 2, tmp_path, "record", "kill", 1, 5, code=None)
    assert said in _why(tmp_path, 0)
    with ShardedHistory(tmp_path / "history") as history:
        assert len(history.verify()) <= 5  # the last ones may not have been written yet
    # Three go on with the recording, and are stopped in the recovery.
    assert said in _run(script, 3, tmp_path, "record,recover", "kill", 1, 7, code=None)
    assert (tmp_path / "record.txt").read_text() == undisturbed["record"]
    _run(script, 1, tmp_path, "recover")
    assert (tmp_path / "recover.txt").read_text() == undisturbed["recover"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["write", "remove"])
def test_a_checkpoint_that_was_interrupted_leaves_one_that_any_number_of_ranks_goes_on_from(
    tmp_path, undisturbed, fault
):
    script = _HERE / "ranks_run.py"
    shutil.copytree(undisturbed["history"], tmp_path / "history")
    _run(script, 2, tmp_path, "recover", fault, 1, 7, code=None)
    folder = tmp_path / "run" / "recover" / "FedRecover"
    state = load_state(folder / "checkpoint.npz")
    turn = state["shard_files"]
    # The last one that is whole: of round 6 where a part of that of round 7 is missing.
    assert state["next"] == (6 if fault == "write" else 7)
    parts = [load_state(folder / f"checkpoint-shard-00{v}-{turn}.npz") for v in range(4)]
    assert [part["next"] for part in parts] == [state["next"]] * 4
    others = [load_state(p) for p in folder.glob(f"checkpoint-shard-*-{1 - turn}.npz")]
    assert len(others) < 4
    _run(script, 1, tmp_path, "recover")
    assert (tmp_path / "recover.txt").read_text() == undisturbed["recover"]
    assert not list(folder.glob("checkpoint-shard-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (("hang", 1, 5), "Rank 1 died, or did not answer in time, which ends all others"),
        (("raise", 1, 5), "Rank 1 has failed (ValueError: the data are gone)"),
    ],
    ids=["hang", "raise"],
)
def test_a_rank_that_hangs_or_fails_is_named(tmp_path, fault, said):
    output = _run(_HERE / "ranks_run.py", 2, tmp_path, "record", *fault, code=None)
    assert said in output
    assert said in _why(tmp_path, 0)
    with ShardedHistory(tmp_path / "history") as history:
        assert len(history.verify()) <= 5  # the last ones may not have been written yet


@pytest.mark.slow
def test_the_first_rank_is_killed(tmp_path, undisturbed):
    script = _HERE / "ranks_run.py"
    _run(script, 2, tmp_path, "record", "kill", 0, 5, code=-signal.SIGKILL)
    assert "Rank 0 died, or did not answer in time" in _why(tmp_path, 1)
    _run(script, 1, tmp_path, "record")
    assert (tmp_path / "record.txt").read_text() == undisturbed["record"]


@pytest.mark.slow
def test_torchrun_starts_ranks_of_which_each_reads_the_data_of_its_own_clients_alone(
    tmp_path, undisturbed
):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    _run(*torchrun, _HERE / "ranks_run.py", 2, tmp_path, "record,recover", "guard")
    for step in ("record", "recover"):
        assert (tmp_path / f"{step}.txt").read_text() == undisturbed[step]


def test_a_recipe_on_two_devices_comes_to_the_same_and_says_it_once(tmp_path):
    small = ["record.max_rounds=24", "data.init_args.num_clients=8", "name=small"]
    small += ["recover.exclude=[client-0]", "recoverers=[FedRecover,TrainFromScratch]"]
    outputs = {}
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        words = [*small, f"loop.devices={devices}", "loop.num_shards=4", "federation.malicious=1"]
        process = _start("-m", "fedrec", "run", "quickstart", *words, cwd=folder)
        outputs[devices] = _finish(process)
    assert outputs[2].count("Recording 24 rounds") == 1
    results = [
        json.loads((tmp_path / str(d) / "runs/small/results.json").read_text()) for d in (1, 2)
    ]
    for result in results:
        assert len(result["methods"]) == 2
    one, two = ({m["name"]: m["ter"] for m in result["methods"]} for result in results)
    assert one == two
    assert sorted((tmp_path / "2/runs/small/history").iterdir()) == [
        tmp_path / f"2/runs/small/history/shard-00{v}" for v in range(4)
    ]


def test_two_devices_recover_from_what_one_recorded(tmp_path):
    small = ["record.max_rounds=12", "data.init_args.num_clients=8", "name=small"]
    small += ["recover.exclude=[client-0]", "recoverers=[FedRecover]", "federation.malicious=1"]
    _finish(_start("-m", "fedrec", "record", "quickstart", *small, cwd=tmp_path))
    models = []
    for devices in (1, 2):
        folder = Path(shutil.copytree(tmp_path / "runs/small", tmp_path / f"runs/{devices}"))
        words = [folder, f"loop.devices={devices}", "loop.num_shards=8"]
        _finish(_start("-m", "fedrec", "recover", *words, cwd=tmp_path))
        state = load_state(folder / "recover/FedRecover/checkpoint.npz")
        models.append(state["weights"].numpy().tobytes())
    assert models[0] == models[1]
