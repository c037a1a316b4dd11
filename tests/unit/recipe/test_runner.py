"""Running recipes: what is kept, what is done again, and what the results say."""

from __future__ import annotations

import functools
import html
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fedrec.cli.main import main
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError, FedrecError, MethodsFailedError, RecipeError
from fedrec.history import LMDBHistory, merge_history, new_key, repair, shard_history
from fedrec.loop import FederatedLoop
from fedrec.models import MLP
from fedrec.recipe import Recipe, load_recipe, run
from fedrec.recipe.folder import RunFolder, existing, recording_part
from fedrec.recipe.results import collect_results
from fedrec.recipe.runner import is_done
from fedrec.recipe.schema import build_parts, folder_name
from fedrec.recipe.step_results import CONVERGENCE

_RECIPE = """
extends: small.yaml
name: small
recoverers:
  - class_path: FedRecover
    label: FedRecover w/o correction
    init_args: {warmup_rounds: 3, correction_period: null, final_rounds: 1, tolerance_rate: null}
  - TrainFromScratch
  - HistoricalOnly
"""

_OWN = """
from fedrec.callbacks import Callback

class StopAt(Callback):
    "Ends a run like Ctrl-C does, once, in a round of a phase."
    armed = True
    def __init__(self, round: int, phase: str):
        self.round, self.phase = round, phase
    def on_round_end(self, loop, ctx, metrics):
        if StopAt.armed and ctx.round == self.round and ctx.phase == self.phase:
            StopAt.armed = False
            raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def recipe_file(recipe_file: Path) -> Path:
    path = recipe_file.with_name("three.yaml")
    path.write_text(_RECIPE)
    return path


@pytest.fixture(scope="module")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with everything done; copy it before changing it."""
    output = tmp_path_factory.mktemp("runs")
    run(load_recipe(recipe_file), output_dir=output, progress=False)
    return output / "small"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "small"))


@pytest.fixture
def stop_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_stopping.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_stopping"
    sys.modules.pop("own_stopping", None)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in a run folder, but for the history and what says whose the files are."""
    files = (f for f in folder.rglob("*") if f.is_file() and "history" not in f.parts)
    files = (f for f in files if f.name != "derived.jsonl")
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def figures(results: dict[str, Any]) -> Any:
    methods = [
        {k: v for k, v in m.items() if k not in ("seconds", "client_seconds")}
        for m in results["methods"]
    ]
    return [results["poisoned"], results["detection"], methods]


def test_run_folder_and_results(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert list(results) == [
        "recipe", "synthetic_data", "poisoned", "detection", "methods", "warnings", "failures",
        "recording", "history", "execution", "versions",
    ]  # fmt: skip
    measured = ["distance", "relative_distance", "metrics"]
    assert list(results["poisoned"]) == ["ter", "asr", *measured]
    assert list(results["detection"]) == ["malicious", "fnr", "fpr", "round"]
    assert results["detection"]["fnr"] == 0.0
    assert len(results["detection"]["malicious"]) == 1
    assert list(results["methods"][0]) == [
        "name", "ter", "asr", "acp", "cp_min", "cp_max", "exact_rounds_by_reason", "client_bytes",
        "seconds", "client_seconds", *CONVERGENCE, *measured, "excluded",
    ]  # fmt: skip
    assert results["history"]["rounds"] == 8
    assert results["history"]["clients"] == 5
    assert results["history"]["bytes"] > 8 * 5 * 4 * 300
    names = {f.name for f in (finished / "recover" / "FedRecover-w-o-correction").iterdir()}
    assert {"metrics.csv", "ledger.csv", "model.ckpt", "result.json"} <= names
    assert {f.name for f in finished.iterdir()} >= {
        "recipe.yaml", "history", "record", "detection.json", "recover", "results.json",
        "report.html",
    }  # fmt: skip


def test_costs_are_those_of_the_schedule(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    some, scratch, replay = results["methods"]
    # 3 warm-up rounds and 1 of final tuning out of 8; L-BFGS may fall back to asking.
    reasons = some["exact_rounds_by_reason"]
    assert (some["name"], reasons["warmup"], reasons["final"]) == (
        "FedRecover w/o correction",
        3,
        1,
    )
    assert some["acp"] == pytest.approx(1 - (4 + reasons["fallback"]) / 8)
    assert (scratch["acp"], scratch["cp_min"], scratch["cp_max"]) == (0, 0, 0)
    assert scratch["exact_rounds_by_reason"]["scratch"] == 8
    assert replay["acp"] == 1


def test_the_stored_recipe_is_resolved_and_runs_again(finished: Path) -> None:
    stored = OmegaConf.to_container(OmegaConf.load(finished / "recipe.yaml"))
    assert isinstance(stored, dict)
    assert stored["name"] == "small"
    assert load_recipe(finished / "recipe.yaml").config == stored


def test_running_again_changes_nothing(recipe_file: Path, copied: Path) -> None:
    recipe = load_recipe(recipe_file)
    run(recipe, output_dir=copied.parent, progress=False)  # the report names the folder
    before = contents(copied)
    run(recipe, output_dir=copied.parent, progress=False)
    assert contents(copied) == before


def test_missing_steps_are_done_again_and_come_out_the_same(
    recipe_file: Path, copied: Path
) -> None:
    before = json.loads((copied / "results.json").read_text())
    shutil.rmtree(copied / "recover" / "HistoricalOnly")
    (copied / "detection.json").unlink()
    kept = (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes()
    after = run(load_recipe(recipe_file), output_dir=copied.parent, progress=False)
    assert figures(after) == figures(before)
    assert (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes() == kept


def test_another_recording_is_refused_with_the_ways_out(recipe_file: Path, copied: Path) -> None:
    recipe = load_recipe(recipe_file, ["record.server_lr=0.25", "attack=null"])
    with pytest.raises(ConfigurationError) as caught:
        run(recipe, output_dir=copied.parent, progress=False)
    message = str(caught.value)
    assert "record.server_lr: 0.5 there, 0.25 here" in message
    assert "attack: None there, None here" not in message
    assert "attack" in message
    assert "max_rounds" not in message
    assert "`name=another-name`" in message
    assert "`--overwrite`" in message


def test_the_master_key_may_be_moved(recipe_file: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "old.key")

    def recipe(key: Path | None) -> Recipe:
        source = "null" if key is None else f"'file:{key}'"
        history = f"history={{class_path: LMDBHistory, init_args: {{master_key: {source}}}}}"
        return load_recipe(recipe_file, [history, "recoverers=[HistoricalOnly]"])

    run(recipe(tmp_path / "old.key"), output_dir=tmp_path, steps=["record"], progress=False)
    (tmp_path / "old.key").rename(tmp_path / "new.key")
    folder = RunFolder(tmp_path / "small")
    stored = folder.read("record/result.json") or {}
    assert str(tmp_path) not in json.dumps(stored["spec"])
    # As earlier recordings have it.
    init_args = {"master_key": f"file:{tmp_path}/old.key"}
    stored["spec"]["history"] = {"class_path": "LMDBHistory", "init_args": init_args}
    folder.write("record/result.json", stored)
    results = run(recipe(tmp_path / "new.key"), output_dir=tmp_path, progress=False)
    assert [m["name"] for m in results["methods"]] == ["HistoricalOnly"]
    with pytest.raises(ConfigurationError, match="recording of another recipe"):
        run(recipe(None), output_dir=tmp_path, progress=False)


def test_rounds_that_a_repair_dropped_are_told_and_recorded_again(
    recipe_file: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = weights_in(copied, "TrainFromScratch")
    replay = weights_in(copied, "HistoricalOnly")
    history = copied / "history" / "data.mdb"
    with LMDBHistory(history.parent) as store:
        damaged = store.read_round(5, ()).global_weights.numpy().tobytes()
    content = history.read_bytes()
    history.write_bytes(content.replace(damaged, b"damage" + damaged[6:]))
    assert repair(copied).rounds == 5
    shutil.rmtree(copied / "recover" / "HistoricalOnly")
    for words in (["recover", str(copied), "--no-progress"], ["report", str(copied)]):
        assert main(words) == 0
        said = capsys.readouterr().err
        assert "the recorded model: 8" in said
        assert "TrainFromScratch: 8, HistoricalOnly: 5. HINT: `fedrec record" in said
        assert f"remove `{copied / 'recover' / 'HistoricalOnly'}`, and" in said
        (warning,) = json.loads((copied / "results.json").read_text())["warnings"]
        assert warning in said.replace("\n", " ")
        assert html.escape(warning, quote=False) in (copied / "report.html").read_text()
    run(load_recipe(recipe_file), output_dir=copied.parent, steps=["record"], progress=False)
    shutil.rmtree(copied / "recover" / "HistoricalOnly")
    assert main(["recover", str(copied), "--no-progress"]) == 0
    assert "Warning" not in capsys.readouterr().err
    assert json.loads((copied / "results.json").read_text())["warnings"] == []
    assert np.array_equal(weights_in(copied, "HistoricalOnly"), replay)
    assert np.array_equal(weights_in(copied, "TrainFromScratch"), scratch)


def test_lost_rounds_that_cannot_be_recorded_again_cost_nothing(
    recipe_file: Path, copied: Path
) -> None:
    file = copied / "record" / "result.json"
    stored = json.loads(file.read_text())
    stored["result"]["history"]["rounds"] = 9
    stored["spec"]["loop"]["num_shards"] = 4
    file.write_text(json.dumps(stored))
    recipe = load_recipe(recipe_file, ["loop.num_shards=3"])
    with pytest.raises(ConfigurationError, match="num_shards"):
        run(recipe, output_dir=copied.parent, progress=False)
    assert json.loads(file.read_text())["result"] == stored["result"]


@pytest.mark.parametrize("words", [[], ["history=ShardedHistory"]], ids=str)
def test_a_finished_recording_may_be_made_into_shards_and_back(
    words: list[str], recipe_file: Path, copied: Path, tmp_path: Path
) -> None:
    recording = (copied / "record" / "result.json").read_bytes()
    few = ["recoverers=[TrainFromScratch]", "loop.num_shards=4"]
    models = []
    for history in ("one file", "shards", "one file"):
        if history == "shards":
            shard_history(copied, tmp_path / "new", num_shards=4)
        elif models:
            merge_history(copied, tmp_path / "new")
        if models:
            shutil.rmtree(copied / "history")
            (tmp_path / "new").rename(copied / "history")
        shutil.rmtree(copied / "recover")
        run(load_recipe(recipe_file, [*few, *words]), output_dir=copied.parent, progress=False)
        models.append(weights_in(copied, "TrainFromScratch").tobytes())
    assert len(set(models)) == 1
    assert (copied / "record" / "result.json").read_bytes() == recording
    with pytest.raises(ConfigurationError, match="recording of another recipe"):
        run(load_recipe(recipe_file, ["seed=1"]), output_dir=copied.parent, progress=False)


def test_of_a_group_that_was_empty_its_new_keys_are_told(recipe_file: Path, tmp_path: Path) -> None:
    folder, recipe = RunFolder(tmp_path / "run"), load_recipe(recipe_file)
    (folder.path / "record").mkdir(parents=True)
    folder.write("record/result.json", {"spec": {"loop": {}}})
    with pytest.raises(ConfigurationError) as caught:
        folder.open(recipe, {"loop": {"num_shards": 8}}, overwrite=False)
    told = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert told == ["  - loop.num_shards: None there, 8 here"]


@pytest.mark.parametrize(
    "mistake",
    [
        "history={class_path: LMDBHistory, init_args: {master_key: 'file:there/is/none'}}",
        "aggregator={class_path: Krum, init_args: {num_byzantine: 2}}",
    ],
)
def test_a_recording_without_a_round_does_not_stand_in_the_way_of_the_corrected_recipe(
    mistake: str, recipe_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(FedrecError):
        run(load_recipe(recipe_file, [mistake]), output_dir=tmp_path, progress=False)
    assert not (tmp_path / "small" / "history").exists()
    recipe = load_recipe(recipe_file, ["record.max_rounds=4"])
    results = run(recipe, output_dir=tmp_path, steps=["record"], progress=False)
    assert results["history"]["rounds"] == 4


def test_overwrite_starts_over(recipe_file: Path, copied: Path) -> None:
    recipe = load_recipe(recipe_file, ["record.max_rounds=4", "recoverers=[HistoricalOnly]"])
    results = run(recipe, output_dir=copied.parent, overwrite=True, progress=False)
    assert results["history"]["rounds"] == 4
    assert [m["name"] for m in results["methods"]] == ["HistoricalOnly"]
    assert not (copied / "recover" / "TrainFromScratch").exists()


def test_one_process_at_a_time(recipe_file: Path, copied: Path) -> None:
    recipe = load_recipe(recipe_file)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with RunFolder(copied).alone():
        for overwrite in (False, True):
            with pytest.raises(ConfigurationError, match="Another process works on the run"):
                run(recipe, output_dir=copied.parent, overwrite=overwrite, progress=False)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    run(recipe, output_dir=copied.parent, progress=False)
    with RunFolder(copied).alone():
        pass


def test_overwrite_removes_run_folders_only(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match="it holds other files"):
        run(load_recipe(recipe_file), output_dir=tmp_path, overwrite=True, progress=False)
    assert (tmp_path / "small" / "thesis.tex").exists()


def test_a_run_that_was_ended_in_its_first_write_can_be_run(
    recipe_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "recipe.yaml.tmp").write_text("data: {class_")
    recipe = load_recipe(recipe_file, ["record.max_rounds=4"])
    run(recipe, output_dir=tmp_path, steps=["record"], progress=False)
    assert not (tmp_path / "small" / "recipe.yaml.tmp").exists()


def test_other_recoverers_reuse_the_recording(recipe_file: Path, copied: Path) -> None:
    recording = (copied / "record" / "result.json").read_bytes()
    scratch = (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes()
    override = (
        "recoverers=[TrainFromScratch, {class_path: FedRecover, label: FedRecover w/o correction, "
        "init_args: {warmup_rounds: 4, final_rounds: 0, estimator: none}}]"
    )
    results = run(load_recipe(recipe_file, [override]), output_dir=copied.parent, progress=False)
    assert [m["name"] for m in results["methods"]] == [
        "TrainFromScratch",
        "FedRecover w/o correction",
    ]
    assert results["methods"][1]["exact_rounds_by_reason"]["warmup"] == 4
    assert (copied / "record" / "result.json").read_bytes() == recording
    assert (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes() == scratch


@pytest.mark.parametrize("override", ["recover.max_rounds=7", "recover={server_lr: 0.1}"])
def test_a_mistake_found_late_costs_no_finished_recovery(
    recipe_file: Path, copied: Path, faulty: str, override: str
) -> None:
    before = contents(copied)
    alone = "recoverers=[{class_path: Refusing, label: HistoricalOnly}]"
    recipe = load_recipe(recipe_file, [override, alone], [faulty])
    with pytest.raises(ConfigurationError, match="needs <more>"):
        run(recipe, output_dir=copied.parent, progress=False)
    assert contents(copied) == before


def test_a_method_that_refuses_to_start_costs_no_finished_recovery(
    recipe_file: Path, copied: Path, faulty: str
) -> None:
    recipe = load_recipe(recipe_file)
    run(recipe, output_dir=copied.parent, progress=False)  # the report names the folder
    before, label = contents(copied), "FedRecover-w-o-correction"
    weights = weights_in(copied, label)
    late = load_recipe(recipe_file, ["recoverers.0.class_path=Refusing"], [faulty])
    with pytest.raises(MethodsFailedError, match="needs <more>"):
        run(late, output_dir=copied.parent, progress=False)
    shutil.rmtree(copied / "history")  # nothing is computed again
    run(recipe, output_dir=copied.parent, progress=False)
    assert (weights_in(copied, label) == weights).all()
    model = f"recover/{label}/model.ckpt"  # a zip file, which may hold times
    assert {**contents(copied), model: b""} == {**before, model: b""}


def test_another_verdict_makes_other_recoveries(recipe_file: Path, copied: Path) -> None:
    detector = "detector={class_path: KnownMalicious, init_args: {ids: [client-0, client-1]}}"
    recipe = load_recipe(recipe_file, [detector])
    results = run(recipe, output_dir=copied.parent, steps=["detect"], progress=False)
    assert results["detection"]["malicious"] == ["client-0", "client-1"]
    assert results["methods"] == []  # those there are left out other clients
    results = run(recipe, output_dir=copied.parent, progress=False)
    assert len(results["methods"]) == 3
    lines = (copied / "recover" / "TrainFromScratch" / "ledger.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 8  # 3 clients in 8 rounds


def test_where_nobody_is_flagged_nothing_is_recovered_unless_asked_for(
    recipe_file: Path, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [
        "detector={class_path: KnownMalicious, init_args: {ids: []}}",
        "recoverers=[{class_path: TrainFromScratch, label: everybody}]",
    ]
    recipe = load_recipe(recipe_file, overrides)
    for said in ("so there is nothing to recover from", "Everything in `"):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="fedrec"):
            results = run(recipe, output_dir=copied.parent, progress=False)
        assert said in caplog.text
        assert results["methods"] == []
        assert results["detection"]["malicious"] == []
        assert results["detection"]["fnr"] == 1.0
    assert not (copied / "recover" / "everybody").exists()

    listed = load_recipe(recipe_file, [*overrides, "recover.exclude=[]"])
    results = run(listed, output_dir=copied.parent, progress=False)
    assert results["methods"][0]["excluded"] == []
    # Training from scratch with everybody, the attacker too, is the recording once more.
    assert results["methods"][0]["ter"] == results["poisoned"]["ter"]
    assert results["methods"][0]["asr"] == results["poisoned"]["asr"]


def test_listed_clients_need_no_detector(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        ["detector=null", "recover.exclude=[client-3]", "recoverers=[HistoricalOnly]"],
    )
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert results["detection"] is None
    assert [m["name"] for m in results["methods"]] == ["HistoricalOnly"]
    with pytest.raises(ConfigurationError, match="Expected a `detector`"):
        run(recipe, output_dir=tmp_path, steps=["detect"], progress=False)


def test_listed_clients_make_detection_needless(recipe_file: Path, copied: Path) -> None:
    (copied / "detection.json").unlink()
    recipe = load_recipe(recipe_file, ["recover.exclude=[client-3]", "recoverers=[HistoricalOnly]"])
    results = run(recipe, output_dir=copied.parent, progress=False)
    assert results["detection"] is None
    assert results["methods"][0]["excluded"] == ["client-3"]
    detected = run(recipe, output_dir=copied.parent, steps=["detect"], progress=False)
    assert len(detected["detection"]["malicious"]) == 1


def test_detection_needs_no_data(
    recipe_file: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Digits) -> None:
        raise ConfigurationError("not on this machine")

    monkeypatch.setattr(Digits, "load", load)
    overrides = ["detector={class_path: KnownMalicious, init_args: {ids: [client-0]}}"]
    recipe = load_recipe(recipe_file, overrides)
    results = run(recipe, output_dir=copied.parent, steps=["detect"], progress=False)
    assert results["detection"]["malicious"] == ["client-0"]


@pytest.mark.parametrize("phase", ["record", "recover"])
def test_interrupted_runs_go_on_and_end_the_same(
    recipe_file: Path,
    finished: Path,
    tmp_path: Path,
    stop_at: str,
    phase: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = f"[{{class_path: StopAt, init_args: {{round: 2, phase: {phase}}}}}]"
    overrides = [f"loop.callbacks={node}", "loop.checkpoint_every=0"]
    recipe = load_recipe(recipe_file, overrides, [stop_at])
    with pytest.raises(KeyboardInterrupt):
        run(recipe, output_dir=tmp_path, progress=False)
    with LMDBHistory(tmp_path / "small" / "history") as history:
        assert len(history.rounds()) == (3 if phase == "record" else 8)
    # A default that is written out makes no other recovery, so that it does not start over.
    recipe = load_recipe(recipe_file, [*overrides, "recover.batch_policy=replay"], [stop_at])
    with caplog.at_level(logging.INFO, logger="fedrec"):
        results = run(recipe, output_dir=tmp_path, progress=False)
    resumed = "FedRecover-w-o-correction: going on at round 2 of 8."
    assert (resumed in caplog.text) == (phase == "recover")
    assert figures(results) == figures(json.loads((finished / "results.json").read_text()))


def test_a_detector_that_stops_is_part_of_the_recording(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_hasty.py").write_text(
        "from fedrec.detectors import Detector\n"
        "from fedrec.types import Detection\n"
        "class Hasty(Detector):\n"
        "    def __init__(self, rounds: int = 3):\n"
        "        self.rounds, self.seen = rounds, None\n"
        "    def reset(self, truth=()):\n"
        "        self.seen = None\n"
        "    def observe(self, record):\n"
        "        self.seen = record\n"
        "    def result(self):\n"
        "        if self.seen is None or self.seen.round + 1 < self.rounds:\n"
        "            return Detection(malicious=(), seen=())\n"
        "        ids = self.seen.client_ids\n"
        "        return Detection(malicious=ids[:1], seen=ids, round=self.seen.round)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [
        "detector=Hasty",
        "record.stop_on_detection=true",
        "recoverers=[TrainFromScratch]",
    ]
    recipe = load_recipe(recipe_file, overrides, ["own_hasty"])
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert results["history"]["rounds"] == 3
    assert results["detection"]["round"] == 2
    assert results["detection"]["malicious"] == ["client-0"]
    assert results["methods"][0]["exact_rounds_by_reason"]["scratch"] == 3
    with pytest.raises(ConfigurationError, match="detector"):
        run(load_recipe(recipe_file), output_dir=tmp_path, progress=False)


def test_a_memory_history_serves_within_one_run(recipe_file: Path, tmp_path: Path) -> None:
    overrides = ["history=MemoryHistory", "recoverers=[HistoricalOnly]"]
    recipe = load_recipe(recipe_file, overrides)
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert results["history"]["rounds"] == 8
    assert not (tmp_path / "small" / "history").exists()
    assert figures(run(recipe, output_dir=tmp_path, progress=False)) == figures(results)


def test_a_finished_run_does_without_its_history(recipe_file: Path, copied: Path) -> None:
    before = json.loads((copied / "results.json").read_text())
    shutil.rmtree(copied / "history")
    recipe = load_recipe(recipe_file)
    assert run(recipe, output_dir=copied.parent, progress=False) == before
    assert not (copied / "history").exists()


def test_a_recording_that_is_gone_costs_no_finished_recovery(
    recipe_file: Path, copied: Path
) -> None:
    shutil.rmtree(copied / "history")
    shutil.rmtree(copied / "recover" / "HistoricalOnly")
    before, recipe = contents(copied), load_recipe(recipe_file)
    for steps in (("record", "detect", "recover"), ("recover",)):
        with pytest.raises(ConfigurationError, match="history of the finished recording") as caught:
            run(recipe, output_dir=copied.parent, steps=steps, progress=False)
        message = str(caught.value)
        assert f"HINT: bring `{copied / 'history'}` back, or record again: `fedrec run`" in message
        assert "`name=another-name`" in message
        assert "`--overwrite`" in message
        assert contents(copied) == before
        assert not (copied / "history").exists()


def test_deleted_files_of_a_recovery_are_made_again(
    recipe_file: Path, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(recipe_file)
    run(recipe, output_dir=copied.parent, progress=False)  # the report names the folder
    before, label = contents(copied), "FedRecover-w-o-correction"
    weights = weights_in(copied, label)
    shutil.rmtree(copied / "history")  # the checkpoint has all there is to it
    for name in ("ledger.csv", "model.ckpt"):
        (copied / "recover" / label / name).unlink()
    with caplog.at_level(logging.INFO, logger="fedrec"):
        run(recipe, output_dir=copied.parent, progress=False)
    said = "FedRecover w/o correction: ledger.csv and model.ckpt missing, made again from the"
    assert said in caplog.text
    after = contents(copied)
    assert (weights_in(copied, label) == weights).all()
    model = f"recover/{label}/model.ckpt"  # a zip file, which may hold times
    assert {**after, model: b""} == {**before, model: b""}


def test_a_recovery_without_files_and_checkpoint_is_made_again_or_named(
    recipe_file: Path, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where, recipe = copied / "recover" / "HistoricalOnly", load_recipe(recipe_file)
    ledger = (where / "ledger.csv").read_bytes()
    for name in ("ledger.csv", "checkpoint.npz"):
        (where / name).unlink()
    run(recipe, output_dir=copied.parent, progress=False)
    assert (where / "ledger.csv").read_bytes() == ledger
    assert "HistoricalOnly: ledger.csv missing, without a checkpoint" in caplog.text

    for name in ("model.ckpt", "checkpoint.npz"):
        (where / name).unlink()
    shutil.rmtree(copied / "history")
    before = contents(copied)
    run(recipe, output_dir=copied.parent, progress=False)
    assert f"HistoricalOnly: model.ckpt missing in `{where}`, with neither" in caplog.text
    assert contents(copied) == before


def test_a_recipe_that_was_deleted_is_written_again(recipe_file: Path, copied: Path) -> None:
    recipe = load_recipe(recipe_file)
    run(recipe, output_dir=copied.parent, progress=False)  # the report names the folder
    before = contents(copied)
    (copied / "recipe.yaml").unlink()
    hint = "its recipe.yaml was deleted; `fedrec run` with the recipe of this run, `name=small`"
    with pytest.raises(ConfigurationError) as caught:
        existing(copied)
    assert hint in str(caught.value)
    other = load_recipe(recipe_file, ["record.server_lr=0.25"])
    with pytest.raises(ConfigurationError, match=r"record.server_lr: 0.5 there, 0.25 here"):
        run(other, output_dir=copied.parent, progress=False)
    run(recipe, output_dir=copied.parent, progress=False)
    assert contents(copied) == before


def test_arguments_at_their_defaults_make_no_other_recovery(
    recipe_file: Path, copied: Path
) -> None:
    written = (
        "recoverers=[{class_path: fedrec.recoverers.FedRecover, label: FedRecover w/o correction, "
        "init_args: {warmup_rounds: 3, correction_period: null, final_rounds: 1, "
        "tolerance_rate: null, estimator: anchored}}, "
        "{class_path: TrainFromScratch, init_args: {}}]"
    )
    before = {path: path.read_bytes() for path in copied.rglob("result.json")}
    overrides = [written, "recover={exclude: detected, batch_policy: replay, max_rounds: null}"]
    results = run(load_recipe(recipe_file, overrides), output_dir=copied.parent, progress=False)
    assert len(results["methods"]) == 2
    assert {path: path.read_bytes() for path in copied.rglob("result.json")} == before
    other = load_recipe(recipe_file, [written.replace("anchored", "paper")])
    RunFolder(copied).open(other, recording_part(other, build_parts(other)), overwrite=False)
    assert not is_done(other, copied)


_FEATURES = (
    "model.init_args.in_features: Expected `in_features` to be 64 for these data, but got 65. MLP "
    "cannot take samples of shape (1, 8, 8) (mat1 and mat2 shapes cannot be multiplied (2x64 and "
    "65x4)). HINT: `model.init_args.in_features=64` fits."
)
_CLASSES = (
    "model.init_args.num_classes: Expected `num_classes` to be at least 10, the number of classes "
    "of the data, but got 7. HINT: `model.init_args.num_classes=10` fits."
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.init_args.in_features=65"], _FEATURES),
        (["model.init_args.num_classes=7"], _CLASSES),
        (["model=CNN"], "HINT: `model.init_args.image_size=8` fits."),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_found_before_the_recording(
    recipe_file: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(load_recipe(recipe_file, overrides), output_dir=tmp_path, progress=False)
    assert message in str(caught.value)
    assert not (tmp_path / "small" / "history").exists()
    recipe = load_recipe(recipe_file, ["record.max_rounds=1", "model.init_args.num_classes=11"])
    run(recipe, output_dir=tmp_path, steps=["record"], progress=False)


def test_a_trial_run_leaves_nothing_behind(recipe_file: Path, tmp_path: Path) -> None:
    # Few rounds are not enough for many a detector; the methods are tried all the same.
    nobody = "detector={class_path: KnownMalicious, init_args: {ids: []}}"
    recipe = load_recipe(recipe_file, ["loop.fast_dev_run=2", nobody])
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert results["history"]["rounds"] == 2
    assert len(results["methods"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_steps_need_the_ones_before(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file)
    with pytest.raises(ConfigurationError, match="has no finished recording") as caught:
        run(recipe, output_dir=tmp_path, steps=["recover"], progress=False)
    assert f"recipe.yaml --output-dir {tmp_path}` makes one." in str(caught.value)
    with pytest.raises(ConfigurationError, match="Did you mean `record`"):
        run(recipe, output_dir=tmp_path, steps=["recrod"], progress=False)


def test_a_damaged_result_is_named(recipe_file: Path, copied: Path) -> None:
    (copied / "detection.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"detection\.json` cannot be read"):
        run(load_recipe(recipe_file), output_dir=copied.parent, progress=False)


def weights_in(folder: Path, label: str) -> np.ndarray:
    """Return a recovered model as its checkpoint for Lightning has it."""
    state = torch.load(folder / "recover" / label / "model.ckpt", weights_only=True)["state_dict"]
    return np.concatenate([value.double().numpy().ravel() for value in state.values()])


def test_distances_to_training_from_scratch(finished: Path, recipe_file: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    scratch = weights_in(finished, "TrainFromScratch")
    with LMDBHistory(finished / "history") as history:
        last = history.read_round(7)
        recorded = last.global_weights.numpy() - np.float32(0.5) * last.aggregate.numpy()
    models = [recorded.astype(np.float64)]
    models += [weights_in(finished, folder_name(m["name"])) for m in results["methods"]]
    for weights, found in zip(models, [results["poisoned"], *results["methods"]], strict=True):
        distance = np.sqrt(((weights - scratch) ** 2).sum())
        assert found["distance"] == pytest.approx(distance, rel=1e-6, abs=0)
        assert found["relative_distance"] == pytest.approx(
            distance / np.sqrt((scratch**2).sum()), rel=1e-6, abs=0
        )
    assert results["methods"][1]["distance"] == 0
    assert results["methods"][0]["distance"] > 0.01


def test_no_distance_without_training_from_scratch_or_to_one_without_others(
    recipe_file: Path, copied: Path
) -> None:
    recipe = load_recipe(recipe_file, ["recoverers=[HistoricalOnly]"])
    alone = run(recipe, output_dir=copied.parent, progress=False)
    assert alone["methods"][0]["distance"] is alone["poisoned"]["distance"] is None
    other = ["recover.exclude=[client-0, client-1]", "recoverers=[HistoricalOnly]"]
    run(load_recipe(recipe_file, other), output_dir=copied.parent, progress=False)
    # TrainFromScratch in the folder left out somebody else.
    both = load_recipe(recipe_file, [other[0], "recoverers=[HistoricalOnly, TrainFromScratch]"])
    assert collect_results(RunFolder(copied))["methods"][0]["distance"] is None
    after = run(both, output_dir=copied.parent, progress=False)
    assert after["methods"][0]["distance"] > 0.01
    assert after["methods"][1]["distance"] == 0


_METRIC = """
import torch
from torchmetrics import Metric

class MemberGap(Metric):
    "Mean logit of members minus that of others."
    def __init__(self):
        super().__init__()
        for name in ("inside", "outside"):
            self.add_state(name, torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
    def update(self, preds, target, member):
        for state, rows in ((self.inside, preds[member]), (self.outside, preds[~member])):
            state += torch.tensor([rows.double().sum(), rows.numel()])
    def compute(self):
        return self.inside[0] / self.inside[1] - self.outside[0] / self.outside[1]
"""


def test_metrics_of_the_recipe(
    recipe_file: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metric.py").write_text(_METRIC)
    monkeypatch.syspath_prepend(tmp_path)

    @functools.wraps(FederatedLoop.recover)
    def again(*args: Any, **more: Any) -> Any:
        raise AssertionError("what is done is done again")

    monkeypatch.setattr(FederatedLoop, "recover", again)
    f1 = "{class_path: torchmetrics.classification.MulticlassAccuracy, label: right, "
    f1 += "init_args: {num_classes: 10, average: micro}}"
    metrics = f"metrics=[MembershipInferenceAUC, MemberGap, {f1}]"
    recipe = load_recipe(recipe_file, [metrics], ["own_metric"])
    results = run(recipe, output_dir=copied.parent, progress=False)
    data = Digits(num_clients=5)
    (left_out,) = results["methods"][0]["excluded"]
    sets = data.client_datasets()[left_out], data.test_dataset
    (xs, ys), (xt, yt) = (
        [torch.stack([torch.as_tensor(s[i]) for s in d]) for i in (0, 1)] for d in sets
    )
    for method in results["methods"]:
        path = copied / "recover" / folder_name(method["name"]) / "model.ckpt"
        model = MLP.load_from_checkpoint(path)
        with torch.no_grad():
            inside, outside = (model(x).double().numpy() for x in (xs, xt))

        def losses(logits: np.ndarray, labels: torch.Tensor) -> np.ndarray:
            return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), labels.numpy()]

        a, b = losses(inside, ys)[:, None], losses(outside, yt)[None]
        found = method["metrics"]
        auc = (a < b).mean() + (a == b).mean() / 2
        assert found["MembershipInferenceAUC"] == pytest.approx(auc, abs=1e-6)
        assert found["MemberGap"] == pytest.approx(inside.mean() - outside.mean(), abs=1e-5)
        assert found["right"] == pytest.approx(1 - method["ter"], abs=1e-6)
    poisoned = results["poisoned"]
    assert poisoned["metrics"]["right"] == pytest.approx(1 - poisoned["ter"], abs=1e-6)
    assert set(poisoned["metrics"]) == {"MembershipInferenceAUC", "MemberGap", "right"}
    sys.modules.pop("own_metric")


def test_a_metric_that_does_not_fit_is_found_out_before_any_recovery(
    recipe_file: Path, tmp_path: Path
) -> None:
    node = "{class_path: torchmetrics.classification.BinaryAccuracy, label: halves}"
    recipe = load_recipe(recipe_file, [f"metrics=[{node}]"])
    with pytest.raises(ConfigurationError, match="The metric `halves` does not fit"):
        run(recipe, output_dir=tmp_path, progress=False)
    assert list((tmp_path / "small").glob("recover/*")) == []


def test_a_method_that_fails_leaves_the_others_alone(
    recipe_file: Path, tmp_path: Path, faulty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(recipe_file, ["recoverers=[Faulty, Refusing, HistoricalOnly]"], [faulty])
    with pytest.raises(MethodsFailedError) as caught:
        run(recipe, output_dir=tmp_path, progress=False)
    failures = caught.value.failures
    assert list(failures) == ["Faulty", "Refusing"]
    file = tmp_path / "small" / "recover" / "Faulty" / "failure.txt"
    assert failures["Faulty"] == f"ZeroDivisionError: by nothing (traceback in {file})"
    assert failures["Refusing"] == "Refusing needs <more>."
    assert "2 methods failed; the others are kept:\n  - Faulty: Zero" in str(caught.value)
    assert "in step\n" in file.read_text()
    results = json.loads((tmp_path / "small" / "results.json").read_text())
    assert [method["name"] for method in results["methods"]] == ["HistoricalOnly"]
    assert results["failures"] == failures
    assert caught.value.results == results == collect_results(RunFolder(tmp_path / "small"))
    page = (tmp_path / "small" / "report.html").read_text()
    assert "Refusing failed: Refusing needs &lt;more&gt;." in page

    monkeypatch.setenv("FAULTLESS", "1")
    done = (tmp_path / "small" / "recover" / "HistoricalOnly" / "result.json").read_bytes()
    with pytest.raises(MethodsFailedError, match="1 method failed") as caught:
        run(recipe, output_dir=tmp_path, progress=False)
    assert list(caught.value.failures) == ["Refusing"]
    results = json.loads((tmp_path / "small" / "results.json").read_text())
    assert [method["name"] for method in results["methods"]] == ["Faulty", "HistoricalOnly"]
    assert results["methods"][0]["ter"] == results["methods"][1]["ter"]
    assert results["failures"] == {"Refusing": "Refusing needs <more>."}
    assert not file.exists()
    after = (tmp_path / "small" / "recover" / "HistoricalOnly" / "result.json").read_bytes()
    assert after == done
    other = load_recipe(recipe_file, ["recoverers=[HistoricalOnly]"])
    assert run(other, output_dir=tmp_path, progress=False)["failures"] == {}
