"""What the README and the docs show, works.

Each page is played in a folder of its own, from top to bottom: files it titles (`title="x.py"`) are
written, Python is run (all of a page in one namespace, titled modules by importing them), and of
shell commands `fedrec validate` and `pytest` are run; of the others the sub-command has to exist.
"""

from __future__ import annotations

import importlib
import logging
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedrec.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^(?P=indent)```\s*?$",
    re.MULTILINE | re.DOTALL,
)
RUNS = {"python", "yaml", "bash"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int


def blocks(path: Path) -> Iterator[Block]:
    page = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(page):
        title = re.search(r'title="([^"]+)"', match["options"])
        yield Block(
            language=match["language"],
            title=title[1] if title else None,
            text=textwrap.dedent(match["body"]),
            line=page.count("\n", 0, match.start("body")),
        )


def pages() -> list[Path]:
    found = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return [page for page in found if any(b.language in RUNS for b in blocks(page))]


def commands(text: str) -> Iterator[list[str]]:
    """Split a shell block into commands; a line that ends in a backslash goes on."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that is the current one and importable, with the recipes in it."""
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDREC_DATA", raising=False)
    write_mnist(tmp_path / "data" / "mnist")
    monkeypatch.syspath_prepend(tmp_path)
    # The command sets up logging for a terminal; that is for this test alone.
    logger = logging.getLogger("fedrec")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        module_file = getattr(sys.modules[name], "__file__", None)
        if module_file and Path(module_file).is_relative_to(tmp_path):
            del sys.modules[name]


def write_mnist(folder: Path) -> None:
    """Write noisy prototypes in the format of MNIST's files: the pages read `data/mnist`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    prototypes = rng.random((10, 28, 28)) < 0.3
    for part, count in (("train", 1500), ("t10k", 300)):
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = 160 * prototypes[labels] + rng.integers(0, 95, (count, 28, 28))
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4").tobytes()
            body = array.astype(np.uint8).tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + body)


# torch's own export to ONNX uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning")
@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_page_works(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = ModuleType("page")
    monkeypatch.setitem(sys.modules, namespace.__name__, namespace)
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            run_python(block, page, namespace)
        elif block.language == "bash":
            for words in commands(block.text):
                run_command(words)


def run_python(block: Block, page: Path, namespace: ModuleType) -> None:
    if block.title is None:
        # Blank lines in front, so that a traceback names the line of the page.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        exec(code, vars(namespace))
    elif not block.title.startswith("test_"):
        importlib.import_module(block.title.removesuffix(".py"))


class Passed:
    """Counts the tests that passed."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


# What belongs to the process, and so to the run that is going on.
OUTSIDE = ["cacheprovider", "faulthandler", "hypothesispytest", "timeout", "xdist"]


def run_command(words: list[str]) -> None:
    if words[0] == "pytest":
        # In this process: a new one would spend its time importing torch.
        passed = Passed()
        without = [word for name in OUTSIDE for word in ("-p", f"no:{name}")]
        assert pytest.main(["-q", *without, *words[1:]], plugins=[passed]) == pytest.ExitCode.OK
        assert passed.count > 0
    elif words[:2] == ["fedrec", "validate"]:
        assert not main(words[1:])
    elif words[0] == "fedrec" and not words[1].startswith("-"):
        assert main([words[1], "--help"]) == 0


def test_blocks_are_found() -> None:
    """A page whose fences are not understood would pass without running anything."""
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        fences = re.findall(r"^ *```\w", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == len(list(blocks(page))), page
