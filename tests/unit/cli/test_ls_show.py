"""`fedrec ls` and `fedrec show`."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import pytorch_lightning  # noqa: F401 - sets up its logger when it is first imported
import yaml

from fedrec.cli.families import FAMILIES
from fedrec.cli.listing import describe, find, sections, short_reference
from fedrec.cli.main import main
from fedrec.detectors import FLDetector


@pytest.fixture(scope="module")
def everything() -> dict[str, list[type]]:
    return find()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_ls_lists_what_a_package_exports(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ls", "partitioners", "--json")
    assert code == 0
    listed = json.loads(out)
    import fedrec.data

    exported = {getattr(fedrec.data, name) for name in fedrec.data.__all__}
    concrete = {
        c.__name__
        for c in exported
        if issubclass(c, fedrec.data.Partitioner) and not inspect.isabstract(c)
    }
    assert {entry["name"] for entry in listed} == concrete
    shards = next(entry for entry in listed if entry["name"] == "Shards")
    assert shards["class_path"] == "fedrec.data.partitioners.shards.Shards"
    (paper,) = shards["references"]
    assert paper.startswith(
        "McMahan et al., Communication-Efficient Learning of Deep Networks from"
    )


def test_ls_without_a_family_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ls", "--json")
    assert code == 0
    assert list(dict.fromkeys(entry["family"] for entry in json.loads(out))) == list(FAMILIES)


def test_ls_is_a_list_with_papers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ls", "aggregators")
    assert code == 0
    row = next(line for line in out.splitlines() if line.strip().startswith("TrimmedMean"))
    assert row.endswith(" (Yin et al., ICML 2018)")


def test_show_says_what_the_class_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "FLDetector", "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["family"] == "detectors"
    assert shown["docstring"] == inspect.getdoc(FLDetector)
    assert shown["arguments"][1] == {
        "name": "buffer_size",
        "type": "int",
        "default": "10",
        "description": "L-BFGS pairs.",
    }
    parameters = inspect.signature(FLDetector).parameters
    assert [a["name"] for a in shown["arguments"]] == list(parameters)


def test_show_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "Shards")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "Shards (partitioners, fedrec.data.partitioners.shards.Shards)"
    assert lines[2] == "Shards(shards_per_client: int = 2)"
    assert yaml.safe_load(out.partition("Recipe:\n")[2]) == {
        "data": {
            "init_args": {
                "partitioner": {"class_path": "Shards", "init_args": {"shards_per_client": 2}}
            }
        }
    }


def test_show_fills_the_lines_of_a_paragraph(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(capsys, "show", "FedRecover")
    assert code == 0
    _, signature, summary, body = out.split("\n\n")[:4]
    assert signature.splitlines()[-1] == ")"
    assert summary == "\n".join(textwrap.wrap(" ".join(summary.split()), 60))
    assert body == "\n".join(textwrap.wrap(" ".join(body.split()), 60, break_on_hyphens=False))
    lines = out.splitlines()
    args = lines[lines.index("Args:") + 1 : lines.index("Raises:") - 1]
    assert {len(line) - len(line.lstrip()) for line in args} == {4, 8}


def test_show_what_is_an_argument_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "UpdateFilter")
    assert code == 0
    assert out.startswith("UpdateFilter (filters, fedrec.recoverers.update_filter.UpdateFilter)\n")
    node = {"class_path": "UpdateFilter", "init_args": {"max_distance": 2.0, "min_cosine": 0.0}}
    recipe = yaml.safe_load(out.partition("Recipe:\n")[2])
    assert recipe == {"recoverers": [{"init_args": {"update_filter": node}}]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "atacks"], "Did you mean `attacks`?"),
        (["show", "trimedMean"], "Did you mean `TrimmedMean`?"),
        (["show", "Aggregator"], "Expected `NAME` to be a component"),
        (["show", "Shards", "--allow", "no_such_module"], "`no_such_module` cannot"),
    ],
)
def test_mistakes_are_answered(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert said in err


def test_classes_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_listing.py").write_text(
        "from fedrec.data import Partitioner\n"
        "class Slices(Partitioner):\n"
        "    '''Neighbours stay together.'''\n"
        "    def split(self, labels, num_clients, generator):\n"
        "        raise NotImplementedError\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, _ = run(capsys, "show", "Slices", "--allow", "own_listing", "--json")
    sys.modules.pop("own_listing")
    assert code == 0
    assert json.loads(out)["class_path"] == "own_listing.Slices"


def test_every_component_documents_itself(everything: dict[str, list[type]]) -> None:
    for family, classes in everything.items():
        for cls in classes:
            entry = describe(cls, family)
            assert entry["summary"].endswith((".", ":")), cls
            undocumented = [a["name"] for a in entry["arguments"] if not a["description"]]
            assert undocumented == [], cls
            assert yaml.safe_load(entry["recipe"]), cls


def test_sections_of_a_docstring() -> None:
    arguments = "    x: A number\n        that counts.\n    y: Another.\n"
    text = f"Does it.\n\nMore.\n\nArgs:\n{arguments}\nReferences:\n    - A."
    assert sections(text) == {
        "": "Does it.\n\nMore.",
        "Args": "x: A number\n    that counts.\ny: Another.",
        "References": "- A.",
    }


def test_a_paper_in_short() -> None:
    assert short_reference("Cao et al., FedRecover, IEEE S&P 2023, Algorithm 1.") == (
        "Cao et al., IEEE S&P 2023"
    )
    assert short_reference("Knuth.") == "Knuth"


@pytest.mark.parametrize("command", ["ls", "show", "detect"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from fedrec.cli.main import main\n"
        f"assert main(['{command}', '--help']) == 0\n"
        "heavy = {'torch', 'rich', 'numpy', 'omegaconf', 'pytorch_lightning'}\n"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
