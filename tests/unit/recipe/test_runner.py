"""Running recipes: what is kept, what is done again, and what the results say."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedrec.exceptions import ConfigurationError, FedrecError
from fedrec.history import LMDBHistory
from fedrec.recipe import load_recipe, run

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
attack: {class_path: BackdoorAttack, init_args: {scale: 2.0}}
detector: KnownMalicious
record: {max_rounds: 8, server_lr: 0.5}
loop: {eval_every: 4, accelerator: cpu}
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
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "small.yaml"
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
    files = (f for f in folder.rglob("*") if f.is_file() and "history" not in f.parts)
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
        "recipe", "synthetic_data", "poisoned", "detection", "methods", "recording", "history",
        "execution", "versions",
    ]  # fmt: skip
    assert list(results["poisoned"]) == ["ter", "asr"]
    assert list(results["detection"]) == ["malicious", "fnr", "fpr", "round"]
    assert results["detection"]["fnr"] == 0.0
    assert len(results["detection"]["malicious"]) == 1
    assert list(results["methods"][0]) == [
        "name", "ter", "asr", "acp", "cp_min", "cp_max", "exact_rounds_by_reason", "client_bytes",
        "seconds", "client_seconds", "excluded",
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
    assert some["acp"] == pytest.approx(100 * (1 - (4 + reasons["fallback"]) / 8))
    assert (scratch["acp"], scratch["cp_min"], scratch["cp_max"]) == (0, 0, 0)
    assert scratch["exact_rounds_by_reason"]["scratch"] == 8
    assert replay["acp"] == 100


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


def test_overwrite_removes_run_folders_only(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match="it holds other files"):
        run(load_recipe(recipe_file), output_dir=tmp_path, overwrite=True, progress=False)
    assert (tmp_path / "small" / "thesis.tex").exists()


def test_other_recoverers_reuse_the_recording(recipe_file: Path, copied: Path) -> None:
    recording = (copied / "record" / "result.json").read_bytes()
    scratch = (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes()
    override = (
        "recoverers=[TrainFromScratch, {class_path: FedRecover, label: FedRecover w/o correction, "
        "init_args: {warmup_rounds: 4, final_rounds: 0, estimate: null}}]"
    )
    results = run(load_recipe(recipe_file, [override]), output_dir=copied.parent, progress=False)
    assert [m["name"] for m in results["methods"]] == [
        "TrainFromScratch",
        "FedRecover w/o correction",
    ]
    assert results["methods"][1]["exact_rounds_by_reason"]["warmup"] == 4
    assert (copied / "record" / "result.json").read_bytes() == recording
    assert (copied / "recover" / "TrainFromScratch" / "result.json").read_bytes() == scratch


@pytest.mark.parametrize("override", ["recover.max_rounds=9", "recover={exclude: [client-9]}"])
def test_a_mistake_found_late_costs_no_finished_recovery(
    recipe_file: Path, copied: Path, override: str
) -> None:
    before = contents(copied)
    recipe = load_recipe(recipe_file, [override])
    with pytest.raises(ConfigurationError, match=r"max_rounds|exclude"):
        run(recipe, output_dir=copied.parent, progress=False)
    after = contents(copied)
    kept = [name for name in before if not name.endswith("checkpoint.npz")]
    assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}


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


def test_nobody_flagged_is_said_and_nobody_excluded(
    recipe_file: Path, copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [
        "detector={class_path: KnownMalicious, init_args: {ids: []}}",
        "recoverers=[TrainFromScratch]",
    ]
    with caplog.at_level(logging.WARNING, logger="fedrec"):
        results = run(load_recipe(recipe_file, overrides), output_dir=copied.parent, progress=False)
    assert "KnownMalicious flagged nobody, so recoveries leave nobody out." in caplog.text
    assert results["detection"]["malicious"] == []
    assert results["detection"]["fnr"] == 1.0
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


@pytest.mark.parametrize("phase", ["record", "recover"])
def test_interrupted_runs_go_on_and_end_the_same(
    recipe_file: Path, finished: Path, tmp_path: Path, stop_at: str, phase: str
) -> None:
    node = f"[{{class_path: StopAt, init_args: {{round: 2, phase: {phase}}}}}]"
    overrides = [f"loop.callbacks={node}", "loop.checkpoint_every=0"]
    recipe = load_recipe(recipe_file, overrides, [stop_at])
    with pytest.raises(KeyboardInterrupt):
        run(recipe, output_dir=tmp_path, progress=False)
    with LMDBHistory(tmp_path / "small" / "history") as history:
        assert len(history.rounds()) == (3 if phase == "record" else 8)
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert figures(results) == figures(json.loads((finished / "results.json").read_text()))


def test_a_detector_that_stops_is_part_of_the_recording(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_hasty.py").write_text(
        "from fedrec.detectors import Detector\n"
        "from fedrec.types import Detection\n"
        "class Hasty(Detector):\n"
        "    action = 'stop'\n"
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
    overrides = ["detector=Hasty", "recoverers=[TrainFromScratch]"]
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


def test_a_recording_that_is_gone_is_made_again_with_all_that_follows(
    recipe_file: Path, copied: Path
) -> None:
    before = json.loads((copied / "results.json").read_text())
    model = copied / "recover" / "TrainFromScratch" / "model.ckpt"
    written = model.stat().st_mtime_ns
    shutil.rmtree(copied / "history")
    shutil.rmtree(copied / "recover" / "HistoricalOnly")
    after = run(load_recipe(recipe_file), output_dir=copied.parent, progress=False)
    assert figures(after) == figures(before)
    assert model.stat().st_mtime_ns > written


def test_a_trial_run_leaves_nothing_behind(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["loop.fast_dev_run=2"])
    results = run(recipe, output_dir=tmp_path, progress=False)
    assert results["history"]["rounds"] == 2
    assert len(results["methods"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_steps_need_the_ones_before(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file)
    with pytest.raises(ConfigurationError, match="has no finished recording"):
        run(recipe, output_dir=tmp_path, steps=["recover"], progress=False)
    with pytest.raises(ConfigurationError, match="Did you mean `record`"):
        run(recipe, output_dir=tmp_path, steps=["recrod"], progress=False)


def test_a_damaged_result_is_named(recipe_file: Path, copied: Path) -> None:
    (copied / "detection.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"detection\.json` cannot be read"):
        run(load_recipe(recipe_file), output_dir=copied.parent, progress=False)
