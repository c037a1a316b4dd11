"""S1: recipes from strangers: no code of theirs runs, nothing is written, and it is quick."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrec.exceptions import RecipeError
from fedrec.recipe import load_recipe

GOOD = {
    "data": "{class_path: Digits, init_args: {num_clients: 5}}",
    "model": "{class_path: MLP, init_args: {in_features: 64, hidden: [4]}}",
    "federation": "{malicious: 1}",
    "aggregator": "Median",
    "detector": "KnownMalicious",
    "record": "{max_rounds: 4, server_lr: 0.1}",
    "recoverers": "[HistoricalOnly]",
}
# What code would be run with; `CANARY` becomes a path that must not come into being.
TOUCH = "touch CANARY"

TAGS = [
    f"!!python/object/apply:os.system ['{TOUCH}']",
    "!!python/object/apply:subprocess.check_output [['touch', 'CANARY']]",
    f"!!python/object/new:os.system ['{TOUCH}']",
    "!!python/object/apply:builtins.open ['CANARY', 'w']",
    "!!python/object/apply:builtins.eval [\"open('CANARY', 'w')\"]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object:fedrec.aggregators.Median {}",
    "!!python/tuple [1, 2]",
    "!!binary gASVHAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu",
    "!!java.util.Date {}",
    "!include /etc/passwd",
]
CLASSES = [
    *(f"{{class_path: {path}}}" for path in ("antigravity", "this", "os", "..os", "os.path")),
    f"{{class_path: os.system, init_args: {{command: '{TOUCH}'}}}}",
    "{class_path: builtins.eval, init_args: {source: \"open('CANARY', 'w')\"}}",
    "{class_path: builtins.open, init_args: {file: CANARY, mode: w}}",
    "{class_path: subprocess.Popen, init_args: {args: [touch, CANARY]}}",
    "{class_path: pathlib.Path.touch, init_args: {self: CANARY}}",
    "{class_path: torch.load, init_args: {f: CANARY}}",
    "{class_path: torch.hub.load, init_args: {repo_or_dir: CANARY, model: x}}",
    "{class_path: torch.os.system, init_args: {command: 'touch CANARY'}}",
    "{class_path: torch.serialization.os.system, init_args: {command: 'touch CANARY'}}",
    "{class_path: torch.utils.cpp_extension.load, init_args: {name: x, sources: [CANARY]}}",
    "{class_path: fedrec.cli.history.subprocess.run, init_args: {args: [touch, CANARY]}}",
    "{class_path: fedrec.history.lmdb.environment.os.system, init_args: {command: 'touch CANARY'}}",
    "{class_path: fedrec.loop.checkpoint.pickle.loads, init_args: {data: CANARY}}",
    "{class_path: Median, __class__: os.system}",
    f"{{class_path: Median, init_args: {{__class__: os.system, command: '{TOUCH}'}}}}",
    "{class_path: Median.__init__.__globals__}",
    "{class_path: fedrec.aggregators.Median.__class__}",
    "{class_path: 'Median; import os'}",
    "{_target_: os.system, command: 'touch CANARY'}",
    "{class_path: 1}",
    "{class_path: [os, system]}",
    "{class_path: LMDBHistory, init_args: {path: CANARY}}",
]
VALUES = ["${oc.env:HOME}", "${oc.decode:'1'}", "${oc.create:{}}", "${eval:'1+1'}", "${now:%Y}"]
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
)
FILES = {
    "alias bomb": BOMB,
    "interpolation bomb": "\n".join(
        ["a0: [x, x, x, x, x, x, x, x, x, x]"]
        + [f"a{i}: [{', '.join([f'${{a{i - 1}}}'] * 10)}]" for i in range(1, 10)]
    ),
    "an alias of itself": "a: &a [*a]",
    "deep": "a: " + "[" * 900 + "]" * 900,
    "deep flow": "a: " + "{a: " * 2000,
    "merge keys": "a: &a {b: 1}\nc: {<<: [*a, *a, *a]}",
    "many keys": "\n".join(f"k{i}: 1" for i in range(2000)),
    "a long key": "? " + "k" * 100_000 + "\n: 1",
    "a large integer": "seed: " + "9" * 5000,
    "NUL": "name: 'a\\0b'",
    "another folder": "name: ../../CANARY",
    "an absolute folder": "name: CANARY",
    "extends a device": "extends: /dev/null",
    "extends itself": "extends: evil.yaml",
    "extends elsewhere": "extends: ../../../../../../etc/passwd",
    "extends a folder": "extends: /",
    "extends the net": "extends: http://127.0.0.1/x.yaml",
}


def recipes() -> Iterator[tuple[str, str]]:
    for text in (*TAGS, *CLASSES, *VALUES):
        yield f"aggregator: {text}", _recipe(aggregator=text)
    for text in TAGS[:4]:
        yield f"seed: {text}", _recipe(seed=text)
    for text in CLASSES[5:14]:
        yield f"model: {text}", _recipe(model=text)
    for name, text in FILES.items():
        yield name, _recipe() + text + "\n"


def _recipe(**changes: str) -> str:
    return "".join(f"{key}: {value}\n" for key, value in {**GOOD, **changes}.items())


def files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*")}


CASES = dict(recipes())
HARMLESS = ("extends a device",)


@pytest.mark.parametrize("name", CASES, ids=lambda name: name[:60])
def test_recipe_of_a_stranger(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "deep" / "folder"
    place.mkdir(parents=True)
    canary = tmp_path / "canary"
    (place / "evil.yaml").write_text(CASES[name].replace("CANARY", str(canary)))
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", "/a-secret")
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"ran {command}"))
    before, modules = files(tmp_path), set(sys.modules)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    shown = ""
    try:
        load_recipe(place / "evil.yaml")
    except RecipeError as error:
        shown = str(error)
    assert bool(shown) != (name in HARMLESS)
    assert "/a-secret" not in shown
    assert "root:" not in shown, "the contents of a file that is no recipe"
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024
    assert files(tmp_path) == before
    assert not {"antigravity", "this"} & (set(sys.modules) - modules)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 30
