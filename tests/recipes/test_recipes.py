"""Every recipe in the repository is free of mistakes, says what STYLE asks for, and runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedrec.recipe import load_recipe, run
from fedrec.recipe.grid import parse_grid

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "recipes").rglob("*.yaml"))
_TRIAL = "loop.fast_dev_run=true"
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
# Those of the paper differ from the others in what is swept and compared alone.
TRIED = [name for name in NAMES if not name.startswith("recipes/paper/")]
# What makes a recipe at the paper's scale small: the data files below are.
_ONE_ROUND = ["loop.fast_dev_run=1", "federation.batch_size=4"]
_SMALL = {
    "mnist": [*_ONE_ROUND, "data.init_args.num_clients=20", "federation.malicious=4"],
    "har": _ONE_ROUND,
    "purchase": [
        *_ONE_ROUND,
        *("data.init_args.num_records=90", "data.init_args.num_train=80"),
        *("data.init_args.num_clients=10", "federation.malicious=2"),
    ],
}


def test_there_are_recipes() -> None:
    assert {"recipes/quickstart.yaml", "recipes/mnist/base.yaml"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_validates(name: str) -> None:
    recipe = load_recipe(ROOT / name)
    assert recipe.config["recoverers"]


@pytest.mark.parametrize("name", NAMES)
def test_header_says_how_to_run_and_change_it(name: str) -> None:
    header = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("#")]
    (command,) = [line for line in header if line.startswith("# Run:")]
    (change,) = [line for line in header if line.startswith("# Change:")]
    assert any(line.startswith("# Before:") for line in header)
    for line in (command, change):
        words = shlex.split(line.partition(":")[2])
        assert words[0] == "fedrec"
        grid, overrides = parse_grid([word for word in words[3:] if "=" in word])
        assert words[1] == ("sweep" if grid or "--repeats" in words else "run")
        # Every value once: all combinations would take long, and mistakes are in values.
        for key, values in grid.items():
            for value in values:
                load_recipe(ROOT / words[2], [*overrides, f"{key}={json.dumps(value)}"])
        load_recipe(ROOT / words[2], overrides)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with noise in its files: what runs with it runs with the real one."""
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    for part in ("train", "test"):
        folder = root / "har" / part
        folder.mkdir(parents=True)
        (folder / f"X_{part}.txt").write_text(("0.25 " * 561 + "\n") * 90)
        (folder / f"y_{part}.txt").write_text("".join(f"{i % 6 + 1}\n" for i in range(90)))
        people = "".join(f"{i % 30 + 1}\n" for i in range(90))
        (folder / f"subject_{part}.txt").write_text(people)
    draw = np.random.default_rng(0)
    for part, count in (("train", 4000), ("t10k", 100)):
        header = b"\0\0\x08\x03" + np.array([count, 28, 28], ">u4").tobytes()
        pixels = draw.integers(256, size=count * 784, dtype=np.uint8).tobytes()
        (root / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes()
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        (root / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(header + labels)
    return root


@pytest.mark.parametrize("name", TRIED)
def test_runs(name: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDREC_DATA", str(data))
    small = _SMALL.get(Path(name).parent.name)
    overrides = [_TRIAL] if small is None else small
    recipe = load_recipe(ROOT / name, [*overrides, "loop.accelerator=cpu"])
    results = run(recipe, output_dir=tmp_path, progress=False)
    labels = [method["name"] for method in results["methods"]]
    assert len(labels) == len(recipe.config["recoverers"])
    rounds = 3 if small is None else 1
    assert results["history"]["rounds"] == rounds
    scratch = results["methods"][labels.index("TrainFromScratch")]
    assert scratch["exact_rounds_by_reason"]["scratch"] == rounds
    assert 0.0 <= scratch["ter"] <= 1.0
