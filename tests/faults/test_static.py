"""S3: what fedrec never does, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedrec

ROOT = Path(fedrec.__file__).parent
# The contracts check that components survive pickling, with bytes they made a line above.
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT / "testing"]
MODULES = {"cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(tree: ast.AST) -> Iterator[str]:
    """Yield what could run code that somebody else wrote."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            yield from (f"{line}: import {name}" for name in names & MODULES)
        # Writing pickles is fine; it tells whether Lightning can save hyperparameters.
        if dotted(node).startswith("pickle.") and dotted(node) not in (
            "pickle.dumps",
            "pickle.PicklingError",
            "pickle.UnpicklingError",
        ):
            yield f"{line}: {dotted(node)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES | {
            "pickle"
        }:
            yield f"{line}: from {node.module}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in CALLS:
            yield f"{line}: {name}"
        if name.endswith(("yaml.load", "unsafe_load", "full_load")):
            yield f"{line}: {name}"
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield f"{line}: torch.load without weights_only=True"
        if "weights_only" in keywords and keywords["weights_only"] != "True":
            yield f"{line}: weights_only={keywords['weights_only']}"
        if keywords.get("allow_pickle", "False") != "False":
            yield f"{line}: allow_pickle={keywords['allow_pickle']}"
        if keywords.get("shell", "False") != "False":
            yield f"{line}: shell={keywords['shell']}"


@pytest.mark.parametrize(
    "code",
    [
        "import dill",
        "pickle.loads(b)",
        "pickle.Unpickler(f)",
        "from pickle import loads",
        "eval('1')",
        "yaml.load(f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
        "module.load(f, weights_only=flag)",
    ],
)
def test_each_of_them_would_be_found(code: str) -> None:
    assert list(findings(ast.parse(code)))


def test_nothing_that_runs_what_it_reads() -> None:
    assert len(SOURCES) > 100
    found = {
        f"{path.name}:{finding}"
        for path in SOURCES
        for finding in findings(ast.parse(path.read_text()))
    }
    assert found == set()
