"""Citation, workflows and issue forms agree with pyproject.toml and with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedrec

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
FORMS = [REPOSITORY / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = load(path)["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


def test_the_citation_is_of_this_version() -> None:
    citation = load(REPOSITORY / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # all that are required
    assert citation["version"] == fedrec.__version__
    assert citation["license"] == PROJECT["license"]
    assert [reference["doi"] for reference in citation["references"]] == [
        "10.1109/SP46215.2023.10179336"
    ]


def test_every_python_of_the_classifiers_is_tested_by_what_a_change_has_to_pass() -> None:
    job = load(REPOSITORY / ".github" / "workflows" / "test.yml")["jobs"]["everything"]
    named = [re.fullmatch(r".* :: (3\.\d+)", text) for text in PROJECT["classifiers"]]
    assert job["strategy"]["matrix"]["python"] == [match[1] for match in named if match]
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_has_to(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    workflow = load(path)
    assert set(workflow["permissions"].values()) <= {"read", "write"}
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())
    assert "secrets." not in text
    # What somebody else chose (a branch's name) is no part of a shell script.
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets


def test_a_release_waits_for_the_tests_and_has_no_password() -> None:
    jobs = load(REPOSITORY / ".github" / "workflows" / "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert all("with" not in s or "password" not in s["with"] for s in jobs["publish"]["steps"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_with_labels_and_ids_of_their_own(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked)
    assert len({field["attributes"]["label"] for field in asked}) == len(asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_links_of_the_pages_at_the_root_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        linked = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", text)
        assert [link for link in linked if not (REPOSITORY / link).exists()] == [], name
