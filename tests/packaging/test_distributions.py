"""What is published: the wheel and the sdist, installed where nothing else of fedrec is.

Nothing is fetched. The virtual environments are empty but for fedrec; its dependencies are those of
the environment that runs the tests, reached by a `.pth` file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import fedrec

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Of the files in git, those that a packager has no use for.
LEFT_OUT = {".pre-commit-config.yaml"}
# Options of pip.
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="hatchling, which builds wheels, is not installed",
)


def python(*words: str | Path, path: Path = Path(sys.executable), cwd: Path | None = None) -> str:
    """Run an interpreter that finds no fedrec but the one installed; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [path, *words], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    python("-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=REPOSITORY)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="session")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"fedrec-{fedrec.__version__}"


@pytest.fixture(scope="session")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip makes it, out of the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    (path,) = folder.iterdir()
    return path


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def checksums(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def files(folder: Path, pattern: str = "*") -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    info = f"fedrec-{fedrec.__version__}.dist-info"
    expected = {f"fedrec/{name}" for name in files(REPOSITORY / "fedrec")}
    expected |= {f"fedrec/recipes/{name}" for name in files(REPOSITORY / "recipes")}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    expected |= {f"{info}/licenses/LICENSE"}
    assert names(wheel) == expected
    assert "fedrec/py.typed" in expected


@pytest.mark.slow
def test_the_sdist_holds_what_is_in_git(unpacked: Path) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no clone")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split("\0") if (REPOSITORY / name).is_file()}
    assert files(unpacked) == tracked - LEFT_OUT | {"PKG-INFO"}


def test_metadata_are_valid_and_say_what_pyproject_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"fedrec-{fedrec.__version__}.dist-info/METADATA").decode()
    metadata = Metadata.from_email(text, validate=True)  # raises for every mistake in a field
    assert metadata.name == "fedrec"
    assert str(metadata.version) == fedrec.__version__
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert message_from_string(text).get_payload() == description(PROJECT.get("urls", {}))
    needed = {Requirement(text) for text in PROJECT["dependencies"]}
    assert {r for r in metadata.requires_dist or () if r.marker is None} == needed
    assert set(metadata.provides_extra or ()) == set(PROJECT["optional-dependencies"])


def description(urls: dict[str, str]) -> str:
    """Return the description as the build makes it of the README."""
    path = REPOSITORY / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    metadata = {"urls": urls, "version": "1.2.3"}
    module.DescriptionHook(str(REPOSITORY), {}).update(metadata)
    text: str = metadata["readme"]["text"]
    return text


def test_links_of_the_description_lead_to_the_files_of_its_release() -> None:
    before = (REPOSITORY / "README.md").read_text()
    text = description({"Repository": "https://example.org/fedrec"})
    links = re.findall(r"\]\(([^()]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(", before)) > 30
    assert [link for link in links if not link.startswith("https://")] == []
    start = "https://example.org/fedrec"
    assert f"]({start}/blob/v1.2.3/docs/estimates.md#by-seed)" in text
    assert f"]({start}/raw/v1.2.3/docs/assets/quickstart.svg)" in text
    own = re.sub(rf"{start}/\w+/v1\.2\.3/", "", text)
    assert own == before


def test_without_an_address_the_description_has_words_in_place_of_links() -> None:
    text = description({})
    assert re.findall(r"\]\((?!https://)", text) == []
    assert "- Results: the tables above for several seeds" in text
    assert "![" not in text


def test_classifiers_name_every_python_since_the_oldest() -> None:
    oldest = int(re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])[1])  # type: ignore[index]
    named = [re.fullmatch(r".* :: 3\.(\d+)", text) for text in PROJECT["classifiers"]]
    minors = [int(match[1]) for match in named if match]
    assert minors == list(range(oldest, oldest + len(minors)))


@pytest.mark.slow
def test_pip_makes_the_same_wheel_of_the_sdist(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    python("-m", "pip", "wheel", *OFFLINE, "--wheel-dir", tmp_path, sdist)
    (made,) = tmp_path.iterdir()
    assert checksums(made) == checksums(wheel)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_installed_alone_it_runs_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    python("-m", "venv", "--without-pip", tmp_path / "venv")
    installed = tmp_path / "venv" / "bin" / "python"
    site = python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", path=installed)
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python("-m", "pip", "--python", installed, "install", *OFFLINE, wheel)
    where = tmp_path / "elsewhere"
    where.mkdir()
    assert python("-c", "import fedrec; print(fedrec.__file__)", path=installed, cwd=where) == (
        f"{Path(site.strip()) / 'fedrec' / '__init__.py'}\n"
    )
    words = ["run", "quickstart", "--no-progress", "loop.accelerator=cpu", "record.max_rounds=60"]
    python("-m", "fedrec", *words, path=installed, cwd=where)
    run = where / "runs" / "quickstart"
    acp = {
        row["name"]: row["acp"] for row in json.loads((run / "results.json").read_text())["methods"]
    }
    # Clients are asked in the first 20 rounds, in 29, 39 and 49, and in the last 5.
    assert acp["FedRecover"] == pytest.approx((60 - 28) / 60)
    assert (acp["TrainFromScratch"], acp["HistoricalOnly"]) == (0, 1)
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_tests_of_the_sdist_find_what_they_read(unpacked: Path) -> None:
    """Those that read pages and benchmarks."""
    reading = ["tests/unit/test_imports.py", "tests/docs/test_formulas.py"]
    python("-m", "pytest", "-qq", "-p", "no:cacheprovider", *reading, cwd=unpacked)
