"""Projects to begin with, copies of recipes, and their list."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrec.cli.main import main
from fedrec.recipe.shipped import SCHEMA, shipped_recipes

# What belongs to the process, and so to the run that is going on.
_OUTSIDE = ["cacheprovider", "faulthandler", "hypothesispytest", "timeout", "xdist"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("plants", "test_plants"):
        sys.modules.pop(name, None)


def test_a_new_project_runs_and_passes_its_tests(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new", "plants"]) == 0
    out = capsys.readouterr().out
    files = [*out.partition("\n\n")[0].splitlines()]
    assert sorted(files) == sorted(str(p.relative_to(here)) for p in (here / "plants").iterdir())
    assert {"plants/plants.py", "plants/plants.yaml", "plants/test_plants.py"} < set(files)
    assert out.endswith("Next:\n  cd plants\n  fedrec run plants.yaml --allow plants\n  pytest\n")
    texts = [(here / file).read_text() for file in files]
    assert not any("my_project" in text for text in texts)

    monkeypatch.chdir(here / "plants")
    assert main(["run", "plants", "--allow", "plants", "--no-progress", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["detection"]["fnr"] == 0
    recovered, scratch = results["methods"]
    assert recovered["acp"] > 0.5
    assert scratch["ter"] < 0.1 < results["poisoned"]["ter"]
    # In this process: a new one would spend its time importing torch.
    without = [word for name in _OUTSIDE for word in ("-p", f"no:{name}")]
    assert pytest.main(["-q", *without, "-W", "error"]) == pytest.ExitCode.OK
    assert " passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-rules", "(letters, digits and _), but got 'my-rules'. HINT: `fedrec new my_rules`."),
        ("1st", "but got '1st'. HINT: begin with a letter."),
        ("class", "that Python can import"),
        ("torch", "that no installed module has, but got 'torch'"),
        ("full", "a new folder, or an empty one, but got 'full'"),
        ("deep/full", "a new folder, or an empty one, but got 'deep/full'"),
    ],
)
def test_a_project_needs_a_name_and_room(
    here: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("full", "deep/full"):
        (here / folder).mkdir(parents=True)
        (here / folder / "mine.txt").write_text("mine")
    before = sorted(here.rglob("*"))
    assert main(["new", name]) == 2
    assert said in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_an_empty_folder_can_become_a_project(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "deep" / "plants").mkdir(parents=True)
    assert main(["new", "deep/plants", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["folder"] == "deep/plants"
    assert "deep/plants/test_plants.py" in made["files"]


def test_a_project_with_flower(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own tests, which start processes, are played in tests/flower."""
    assert main(["new", "app_of_mine", "--flower"]) == 0
    out = capsys.readouterr().out
    run = "fedrec run app_of_mine.yaml\n  python start.py"
    assert out.endswith(f"Next:\n  cd app_of_mine\n  {run}\n  pytest\n")
    made = here / "app_of_mine"
    assert {"app_of_mine_client.py", "app_of_mine_server.py", "start.py"} < {
        path.name for path in made.iterdir()
    }
    for path in made.iterdir():
        assert "my_project" not in path.read_text()
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")
    assert main(["run", "app_of_mine/app_of_mine.yaml", "--no-progress", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    recovered, scratch = results["methods"]
    assert results["detection"]["malicious"] == ["client-3"]
    # Of 30 rounds, those asked are the first 4, every 10th after them and the last.
    assert recovered["acp"] == pytest.approx(1 - 7 / 30)
    assert recovered["ter"] <= scratch["ter"] + 0.05 < results["poisoned"]["ter"]


def test_copying_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "mnist/coffee_break_trim", "."]) == 0
    copied = capsys.readouterr().out.splitlines()
    bases = ["mnist/trimmed_mean_trim.yaml", "mnist/base.yaml"]
    assert copied == ["mnist/coffee_break_trim.yaml", *bases, SCHEMA]
    assert main(["cp", "mnist/coffee_break_trim", "."]) == 0
    assert capsys.readouterr().out == "All of its files are there already.\n"
    assert main(["cp", "quickstart", "copies", "--json"]) == 0
    recipe = {"recipe": "copies/quickstart.yaml"}
    files = ["copies/quickstart.yaml", f"copies/{SCHEMA}"]
    assert json.loads(capsys.readouterr().out) == {**recipe, "files": files}
    assert main(["cp", "quickstrat", "."]) == 2
    assert "Did you mean `quickstart`" in capsys.readouterr().err


def test_listing_recipes_without_torch() -> None:
    code = (
        "import sys; from fedrec.cli.main import main\n"
        "assert main(['ls', 'recipes', '--json']) == 0\n"
        "assert main(['cp', 'quickstart', '.', '-q']) == 0\n"
        "assert not {'torch', 'pytorch_lightning', 'rich', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed, _, _ = done.stdout.partition("\n]\n")
    names = [entry["name"] for entry in json.loads(f"{listed}]")]
    assert names == list(shipped_recipes())
