"""Every recipe in the repository is free of mistakes, says what STYLE asks for, and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrec.recipe import load_recipe, run

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "recipes").rglob("*.yaml"))
_TRIAL = "loop.fast_dev_run=true"
NAMES = [str(path.relative_to(ROOT)) for path in FILES]


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
        words = line.partition(":")[2].split()
        assert words[:2] == ["fedrec", "run"]
        load_recipe(ROOT / words[2], words[3:])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with noise in the files of MNIST: what runs with it runs with the real one."""
    root = tmp_path_factory.mktemp("data")
    (root / "mnist").mkdir()
    draw = np.random.default_rng(0)
    for part, count in (("train", 4000), ("t10k", 100)):
        header = b"\0\0\x08\x03" + np.array([count, 28, 28], ">u4").tobytes()
        pixels = draw.integers(256, size=count * 784, dtype=np.uint8).tobytes()
        (root / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes()
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        (root / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(header + labels)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDREC_DATA", str(images))
    large = "mnist" in name
    overrides = ["loop.fast_dev_run=1", "federation.batch_size=4"] if large else [_TRIAL]
    recipe = load_recipe(ROOT / name, [*overrides, "loop.accelerator=cpu"])
    results = run(recipe, output_dir=tmp_path, progress=False)
    labels = [method["name"] for method in results["methods"]]
    assert len(labels) == len(recipe.config["recoverers"])
    rounds = 1 if large else 3
    assert results["history"]["rounds"] == rounds
    scratch = results["methods"][labels.index("TrainFromScratch")]
    assert scratch["exact_rounds_by_reason"]["scratch"] == rounds
    assert 0.0 <= scratch["ter"] <= 1.0
