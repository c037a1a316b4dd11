"""Sweeps: what is made once, what is kept, and that the figures are those of single runs."""

from __future__ import annotations

import csv
import functools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec.exceptions import ConfigurationError
from fedrec.history import forecast
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe, run, sweep
from fedrec.recipe.folder import num_shards
from fedrec.recipe.grid import grid_points, parse_grid
from fedrec.recipe.planning import forecast_history, plan_sweep
from fedrec.recipe.points import sweep_points
from fedrec.recipe.tables import COLUMNS, POISONED, read_table, summarize

_WARMUP = "recoverers.0.init_args.warmup_rounds"
_GRID = {"record.server_lr": [0.5, 0.25], _WARMUP: [3, 4]}
_TIMES = ("seconds", "history_bytes", "folder")  # the recipe in the history has other words

_OWN = """
import os
from fedrec.callbacks import Callback

class Die(Callback):
    "Ends the process at once in a round of a recovery."
    def on_round_end(self, loop, ctx, metrics):
        if ctx.phase == "recover" and os.environ.get("DIE") == os.path.basename(os.getcwd()):
            os._exit(9)
"""


@pytest.fixture(scope="module")
def swept(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Counter[str]]:
    """Two recordings with two recoveries each, and how often the loop was asked for what."""
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        output = tmp_path_factory.mktemp("runs")
        return sweep(recipe_file, _GRID, output_dir=output, progress=False), calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return counted(monkeypatch)


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    record, recover = FederatedLoop.record, FederatedLoop.recover

    @functools.wraps(record)
    def counting_record(*args: Any, **more: Any) -> Any:
        calls["record"] += 1
        return record(*args, **more)

    @functools.wraps(recover)
    def counting_recover(*args: Any, **more: Any) -> Any:
        calls[type(args[3]).__name__] += 1
        return recover(*args, **more)

    patch.setattr(FederatedLoop, "record", counting_record)
    patch.setattr(FederatedLoop, "recover", counting_recover)
    return calls


def weights(folder: Path, method: str) -> dict[str, torch.Tensor]:
    path = folder / "recover" / method / "model.ckpt"
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_recordings_and_equal_recoveries_are_made_once(swept: tuple[Any, Counter[str]]) -> None:
    done, calls = swept
    # Training from scratch does not depend on the warm-up: once for each recording.
    assert calls == {"record": 2, "FedRecover": 4, "TrainFromScratch": 2}
    assert len(list(done.folder.glob("recordings/*/history/data.mdb"))) == 2
    assert len(list(done.folder.glob("recordings/*/points/*/results.json"))) == 4
    assert done.failures == {}


def test_the_figures_are_those_of_single_runs(
    swept: tuple[Any, Counter[str]], recipe_file: Path, tmp_path: Path
) -> None:
    done, _ = swept
    for lr, warmup in ((0.5, 4), (0.25, 3)):
        overrides = [f"record.server_lr={lr}", f"{_WARMUP}={warmup}"]
        alone = run(load_recipe(recipe_file, overrides), folder=tmp_path / f"{lr}", progress=False)
        rows = [
            r for r in done.rows if (r["record.server_lr"], r[_WARMUP]) == (str(lr), str(warmup))
        ]
        assert [row["method"] for row in rows] == [POISONED, "FedRecover", "TrainFromScratch"]
        assert (rows[0]["ter"], rows[0]["asr"]) == (
            alone["poisoned"]["ter"],
            alone["poisoned"]["asr"],
        )
        assert rows[0]["acp"] is None
        for row, method in zip(rows[1:], alone["methods"], strict=True):
            names = ("ter", "asr", "acp", "cp_min", "cp_max", "client_bytes")
            assert [row[name] for name in names] == [method[name] for name in names]
            own = weights(tmp_path / f"{lr}", row["method"])
            swept_weights = weights(done.folder / row["folder"], row["method"])
            assert own.keys() == swept_weights.keys()
            assert all(torch.equal(own[key], swept_weights[key]) for key in own)
        assert rows[1]["exact_warmup"] == warmup
        assert rows[2]["exact_scratch"] == rows[2]["exact_rounds"] == 8
        assert rows[2]["num_excluded"] == 1


def test_the_table_is_tidy(swept: tuple[Any, Counter[str]]) -> None:
    done, _ = swept
    with (done.folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == ("record.server_lr", _WARMUP, *COLUMNS)
    assert [(line["record.server_lr"], line[_WARMUP]) for line in lines[::3]] == [
        ("0.5", "3"), ("0.5", "4"), ("0.25", "3"), ("0.25", "4"),
    ]  # fmt: skip
    rows, keys = read_table(done.folder)
    assert keys == ["record.server_lr", _WARMUP]
    assert [row["ter"] for row in rows] == [row["ter"] for row in done.rows]
    assert summarize(rows, keys) == summarize(done.rows, keys) == done.summary
    assert done.summary[0]["ter_std"] is None


def test_again_computes_nothing_and_more_values_compute_those(
    swept: tuple[Any, Counter[str]], recipe_file: Path, calls: Counter[str]
) -> None:
    done, _ = swept
    output = done.folder.parent
    assert sweep(recipe_file, _GRID, output_dir=output, progress=False).rows == done.rows
    assert calls == {}
    more = {"record.server_lr": [0.5, 0.25], _WARMUP: [3, 4, 5]}
    after = sweep(recipe_file, more, output_dir=output, progress=False)
    assert calls == {"FedRecover": 2}
    assert len(after.rows) == 2 * 3 * 3
    # The same recordings under other words for the same: nothing new.
    calls.clear()
    same = ["aggregator={class_path: fedrec.aggregators.Median, init_args: {}}"]
    sweep(recipe_file, more, overrides=same, output_dir=output, progress=False)
    assert calls == {}


def test_what_a_recording_does_not_depend_on_makes_no_other(recipe_file: Path) -> None:
    def recording(*overrides: str) -> str:
        return sweep_points(recipe_file, {}, repeats=2, overrides=overrides)[0].recording

    same = recording()
    for override in (
        "name=other",
        "metrics=[TestErrorRate]",
        "recoverers=[TrainFromScratch]",
        "detector=FLDetector",
        "recover.exclude=[client-0]",
        "loop.eval_every=1",
        "loop.num_threads=1",
        "loop.checkpoint_every=5",
        "loop.executor=auto",
        "federation.local_steps=1",
        "federation.buffers=refuse",
        "record.sampler=null",
        "record.on_bad_update=raise",
        "record.stop_on_detection=false",
        "history={class_path: LMDBHistory, init_args: {map_size: 10000000, sync_every: 2}}",
    ):
        assert recording(override) == same, override
    # The seed of the data is that of the recipe, unless it says otherwise.
    assert recording("seed=3", "data.init_args.seed=3") == recording("seed=3")
    assert recording("seed=3", "data.init_args.seed=0") != recording("seed=3")
    others = [
        "federation.local_steps=2",
        "federation.seed=1",
        "record.on_bad_update=drop",
        "loop.executor=sequential",
        "history={class_path: LMDBHistory, init_args: {codec: int8}}",
        "record.stop_on_detection=true",
    ]
    assert len({same, *map(recording, others)}) == 1 + len(others)
    # A detector that ends the recording is part of it.
    stopped = recording("record.stop_on_detection=true")
    assert recording("record.stop_on_detection=true", "detector=FLDetector") != stopped


def test_a_killed_sweep_goes_on_with_what_is_missing(
    recipe_file: Path,
    swept: tuple[Any, Counter[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: Counter[str],
) -> None:
    (tmp_path / "own_dying.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "overrides": ["loop.callbacks=[Die]", "detector={class_path: KnownMalicious}"],
        "allow": ["own_dying"],
        "output_dir": tmp_path,
        "progress": False,
    }
    first = {"record.server_lr": [0.5], _WARMUP: [3, 4]}
    sweep(recipe_file, first, **settings)
    assert calls == {"record": 1, "FedRecover": 2, "TrainFromScratch": 1}
    child = os.fork()
    if child == 0:  # dies in the first recovery of the second recording
        try:
            os.environ["DIE"] = tmp_path.name
            sweep(recipe_file, _GRID, **settings)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    calls.clear()
    done = sweep(recipe_file, _GRID, **settings)
    assert calls == {"FedRecover": 2, "TrainFromScratch": 1}
    expected = [{k: v for k, v in row.items() if k not in _TIMES} for row in swept[0].rows]
    assert [{k: v for k, v in row.items() if k not in _TIMES} for row in done.rows] == expected
    sys.modules.pop("own_dying")


def test_a_failing_point_leaves_the_others_alone(
    recipe_file: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    krum = {"class_path": "Krum", "init_args": {"num_byzantine": 2}}  # too many for 5 clients
    grid = {"aggregator": [krum, "Median"], "recover.aggregator": [krum, "Median"]}
    done = sweep(recipe_file, grid, output_dir=tmp_path, progress=False)
    assert list(done.failures) == [
        "aggregator=Krum(num_byzantine=2), recover.aggregator=Krum(num_byzantine=2)",
        "aggregator=Krum(num_byzantine=2), recover.aggregator=Median",
        "aggregator=Median, recover.aggregator=Krum(num_byzantine=2)",
    ]
    reasons = list(done.failures.values())
    assert reasons[0].startswith("Recording: ")
    assert reasons[2].startswith(
        "2 methods failed; the others are kept:\n  - FedRecover: Krum needs"
    )
    both = [row["method"] for row in done.rows[-3:]]
    assert both == [POISONED, "FedRecover", "TrainFromScratch"]
    assert not any(row["failure"] for row in done.rows[-3:])
    # Of the third, the poisoned model is known.
    methods = ["FedRecover", "TrainFromScratch"]
    assert [row["method"] for row in done.rows] == [*methods * 2, POISONED, *methods, *both]
    failed = [row["method"] for row in done.rows if row["failure"]]
    assert failed == methods * 3
    assert done.rows[0]["failure"].startswith("Recording: Krum needs")
    assert done.rows[0]["ter"] is None
    assert done.rows[-4]["failure"].startswith("Krum needs")
    assert [line["failures"] for line in done.summary] == [1] * 4 + [0, 1, 1, 0, 0, 0]
    rows, _ = read_table(done.folder)
    assert [row["failure"] for row in rows] == [row["failure"] or "" for row in done.rows]
    state = json.loads((done.folder / "sweep.json").read_text())
    assert [point["done"] for point in state["points"]] == [False, False, False, True]
    calls.clear()
    again = sweep(recipe_file, grid, output_dir=tmp_path, progress=False)
    assert again.failures.keys() == done.failures.keys()
    # What failed is tried again, and no more.
    assert calls == {"record": 1, "FedRecover": 1, "TrainFromScratch": 1}


def test_a_failing_method_leaves_the_others_of_its_point_alone(
    recipe_file: Path,
    tmp_path: Path,
    faulty: str,
    monkeypatch: pytest.MonkeyPatch,
    calls: Counter[str],
) -> None:
    settings: dict[str, Any] = {
        "overrides": ["recoverers=[Faulty, HistoricalOnly, TrainFromScratch]"],
        "allow": [faulty],
        "output_dir": tmp_path,
        "progress": False,
    }
    grid = {"recover.server_lr": [0.5, 0.25]}
    done = sweep(recipe_file, grid, **settings)
    assert calls == {"record": 1, "Faulty": 2, "HistoricalOnly": 2, "TrainFromScratch": 2}
    methods = [POISONED, "Faulty", "HistoricalOnly", "TrainFromScratch"]
    assert [row["method"] for row in done.rows] == methods * 2
    assert [bool(row["failure"]) for row in done.rows] == [False, True, False, False] * 2
    assert done.rows[1]["failure"].startswith("ZeroDivisionError: by nothing (traceback in ")
    assert list(done.failures) == ["server_lr=0.5", "server_lr=0.25"]
    assert "Faulty: ZeroDivisionError" in done.failures["server_lr=0.5"]
    with (done.folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["failure"] != "" for line in lines] == [False, True, False, False] * 2
    calls.clear()
    monkeypatch.setenv("FAULTLESS", "1")
    again = sweep(recipe_file, grid, **settings)
    assert again.failures == {}
    assert calls == {"Faulty": 2}
    assert [row["method"] for row in again.rows] == methods * 2
    sys.modules.pop(faulty)


def test_distances_and_metrics_are_columns(
    swept: tuple[Any, Counter[str]], recipe_file: Path, calls: Counter[str], tmp_path: Path
) -> None:
    done, _ = swept
    for row in done.rows:
        if row["method"] == "TrainFromScratch":
            assert row["distance"] == 0
            continue
        assert row["distance"] > row["relative_distance"] > 0
    folder = Path(shutil.copytree(done.folder, tmp_path / "small", symlinks=True))
    words = ["metrics=[MembershipInferenceAUC]"]
    more = sweep(recipe_file, _GRID, overrides=words, output_dir=tmp_path, progress=False)
    assert calls == {}  # measured from the weights that are there
    with (folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0])[-2:] == ["folder", "metrics.MembershipInferenceAUC"]
    assert all(0 < float(line["metrics.MembershipInferenceAUC"]) < 1 for line in lines)
    rows, _ = read_table(folder)
    assert summarize(rows, more.keys) == more.summary
    assert more.summary[0]["metrics.MembershipInferenceAUC_mean"] == float(
        lines[0]["metrics.MembershipInferenceAUC"]
    )
    assert [row["distance"] for row in more.rows] == [row["distance"] for row in done.rows]


def test_a_plan_tells_what_there_is_to_do(
    swept: tuple[Any, Counter[str]], recipe_file: Path, tmp_path: Path
) -> None:
    where = tmp_path / "recordings"
    shutil.copytree(swept[0].folder / "recordings", where, symlinks=True)
    grid = {"record.server_lr": [0.5, 0.25, 0.125], _WARMUP: [3, 4, 6]}
    points = sweep_points(recipe_file, grid)
    plan = plan_sweep(points, where)
    assert plan.done == (True, True, False, True, True, False, False, False, False)
    # Of the nine FedRecover four are there, of the three trainings from scratch two.
    assert (plan.recoveries, plan.recoveries_there) == (12, 6)
    assert (plan.recordings, plan.recordings_there) == (3, 2)
    # Five clients, eight rounds, 64 * 4 + 4 + 4 * 10 + 10 weights of four bytes.
    assert plan.sizes == (forecast(num_clients=5, num_parameters=310, max_rounds=8).num_bytes,)
    assert not plan.assumed
    shutil.rmtree(where / points[0].recording / "history")
    again = plan_sweep(points, where)
    assert (again.recordings_there, len(again.sizes)) == (1, 2)  # one point needs it
    assert plan_sweep(points[:2], where).recordings_there == 1  # these do not


@pytest.mark.parametrize(
    ("words", "shards"), [([], 1), (["loop.num_shards=3"], 3), (["loop.num_shards=8"], 5)], ids=str
)
def test_a_history_in_shards_is_forecast_as_such(
    recipe_file: Path, words: list[str], shards: int
) -> None:
    """There are five clients, and at most as many shards."""
    size = {"num_clients": 5, "num_parameters": 310, "max_rounds": 8}
    assert forecast_history(load_recipe(recipe_file, words)) == forecast(**size, num_shards=shards)


def test_two_devices_have_eight_shards_in_a_forecast() -> None:
    assert num_shards({"devices": 2}) == 8
    assert num_shards({"num_nodes": 2, "num_shards": 4}) == 4


def test_where_nobody_is_flagged_the_methods_have_no_figures_and_it_shows(
    recipe_file: Path, tmp_path: Path
) -> None:
    nobody = {"class_path": "KnownMalicious", "init_args": {"ids": []}}
    grid = {"detector": ["KnownMalicious", nobody]}
    settings: dict[str, Any] = {"overrides": ["recoverers=[HistoricalOnly]"], "progress": False}
    for _ in range(2):
        done = sweep(recipe_file, grid, output_dir=tmp_path, **settings)
        assert done.failures == {}
        assert [row["method"] for row in done.rows] == [POISONED, "HistoricalOnly"] * 2
        assert [bool(row["failure"]) for row in done.rows] == [False, False, False, True]
        assert (
            done.rows[-1]["failure"] == "Nobody was flagged, so there is nothing to recover from."
        )
        assert [(line["failures"], line["repeats"]) for line in done.summary][2:] == [
            (0, 1),
            (1, 0),
        ]


def test_repeats_have_seeds_of_their_own_and_a_deviation(recipe_file: Path, tmp_path: Path) -> None:
    done = sweep(
        recipe_file,
        {},
        repeats=3,
        overrides=["seed=4", "recoverers=[TrainFromScratch]"],
        output_dir=tmp_path,
        progress=False,
    )
    assert [row["seed"] for row in done.rows] == [4, 4, 5, 5, 6, 6]
    a, b, c = (row["ter"] for row in done.rows if row["method"] == "TrainFromScratch")
    assert len({a, b, c}) > 1
    line = done.summary[1]
    mean = (a + b + c) / 3
    assert (line["method"], line["repeats"]) == ("TrainFromScratch", 3)
    assert line["ter_mean"] == pytest.approx(mean)
    variance = ((a - mean) ** 2 + (b - mean) ** 2 + (c - mean) ** 2) / 2
    assert line["ter_std"] == pytest.approx(variance**0.5)
    seeded = load_recipe(recipe_file, ["seed=5", "recoverers=[TrainFromScratch]"])
    assert run(seeded, output_dir=tmp_path / "alone", progress=False)["methods"][0]["ter"] == b


def test_histories_can_go_and_are_made_again_when_needed(
    recipe_file: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "delete_histories": True, "progress": False}
    done = sweep(recipe_file, {_WARMUP: [3, 4]}, **settings)
    assert list(done.folder.glob("recordings/*/history")) == []
    calls.clear()
    assert sweep(recipe_file, {_WARMUP: [3, 4]}, **settings).rows == done.rows
    assert calls == {}
    more = sweep(recipe_file, {_WARMUP: [3, 4, 5]}, **settings)
    assert calls == {"record": 1, "FedRecover": 1}
    assert more.rows[:6] == done.rows
    assert list(done.folder.glob("recordings/*/history")) == []


def test_sweeps_may_share_recordings(
    recipe_file: Path, tmp_path: Path, calls: Counter[str]
) -> None:
    shared: dict[str, Any] = {"output_dir": tmp_path, "recordings": tmp_path / "recordings"}
    sweep(recipe_file, {_WARMUP: [3, 4]}, overrides=["name=a"], **shared, progress=False)
    calls.clear()
    final = {"recoverers.0.init_args.final_rounds": [1, 2]}
    done = sweep(recipe_file, final, overrides=["name=b"], **shared, progress=False)
    assert calls == {"FedRecover": 1}  # with one round of final tuning it is that of `a`
    assert done.folder == tmp_path / "b"
    assert (done.folder / done.rows[0]["folder"] / "results.json").is_file()


def test_a_folder_in_use_is_left_alone(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    @functools.wraps(FederatedLoop.record)
    def second(*args: Any, **more: Any) -> Any:
        with pytest.raises(ConfigurationError, match="in use by another sweep") as caught:
            sweep(recipe_file, {_WARMUP: [3, 4]}, output_dir=tmp_path, progress=False)
        refused.append(str(caught.value))
        raise KeyboardInterrupt

    monkeypatch.setattr(FederatedLoop, "record", second)
    with pytest.raises(KeyboardInterrupt):
        sweep(recipe_file, {_WARMUP: [3, 4]}, output_dir=tmp_path, progress=False)
    assert len(refused) == 1


def test_the_folder_of_a_run_is_not_that_of_a_sweep(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "recipe.yaml").write_text(recipe_file.read_text())
    with pytest.raises(ConfigurationError, match="name=another-name"):
        sweep(recipe_file, {_WARMUP: [3, 4]}, output_dir=tmp_path, progress=False)


def test_mistakes_are_found_before_anything_runs(recipe_file: Path, tmp_path: Path) -> None:
    def message(grid: dict[str, Any], **more: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            sweep(recipe_file, grid, output_dir=tmp_path / "none", progress=False, **more)
        return str(caught.value)

    assert "Did you mean `aggregator`" in message({"agregator": ["Median", "FedAvg"]})
    assert "Did you mean `warmup_rounds`" in message(
        {"recoverers.0.init_args.warmup_round": [3, 4]}
    )
    text = message({"aggregator": ["Medain", "FedAvg"], _WARMUP: [3, -1]})
    assert "Did you mean `Median`" in text
    assert text.count("Medain") == 1  # once, although two points have it
    assert "-1" in text
    assert "more than one point" in message({})
    assert "`--repeats 3`" in message({"seed": [1, 2]})
    assert "come out the same" in message({"loop.eval_every": [1, 2]})
    assert "fast_dev_run" in message({_WARMUP: [3, 4]}, overrides=["loop.fast_dev_run=1"])
    assert "on disk" in message({_WARMUP: [3, 4]}, overrides=["history=MemoryHistory"])
    assert not (tmp_path / "none").exists()


def test_grids_are_read_from_words() -> None:
    grid, rest = parse_grid(["a=1,null,[1, 2],'x, y'", "b.c={k: [1,2], l: 3},X", "record.rounds=5"])
    assert grid == {"a": [1, None, [1, 2], "x, y"], "b.c": [{"k": [1, 2], "l": 3}, "X"]}
    assert rest == ["record.rounds=5"]
    assert grid_points({"a": [1, 2], "b": [3, 4]}) == [
        {"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a=1,,2"], "`a` to be values with a comma between"),
        (["a="], "`a` to be values with a comma between"),
        (["a"], "key=value,value"),
        (["a=1", "a=2,3"], "comes twice"),
        (["a=1,{b: {,2"], "a YAML value"),
    ],
)
def test_words_that_are_no_grid(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_grid(words)


@pytest.mark.parametrize("values", [[], "Median", [1, 1], None])
def test_values_that_make_no_points(values: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"one or more values|values that differ"):
        grid_points({"key": values})


@pytest.fixture(autouse=True)
def _no_modules_left() -> Iterator[None]:
    yield
    sys.modules.pop("own_dying", None)
