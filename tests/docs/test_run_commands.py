"""`make docs-test` knows what to do about every command that the README and the docs show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from run_commands import FEWER, LEFT_OUT, Log, blocks, commands, pages, plan


def test_every_command_is_run_by_make_docs_test_or_left_out_for_a_reason() -> None:
    shown = [
        words
        for page in pages()
        for block in blocks(page)
        if block.language == "bash"
        for words in commands(block.text)
    ]
    left_out = [" ".join(words) for words in shown if not plan(words).words]
    assert all(plan(words).why for words in shown if not plan(words).words)
    assert [start for start in LEFT_OUT if not any(c.startswith(start) for c in left_out)] == []


@pytest.mark.parametrize(
    ("shown", "run"),
    [
        ("fedrec run recipes/quickstart.yaml", "fedrec run recipes/quickstart.yaml"),
        ("fedrec run a.yaml seed=1", f"fedrec run a.yaml seed=1 {' '.join(FEWER)}"),
        (
            "fedrec sweep a.yaml --repeats 3 x=1,2",
            f"fedrec sweep a.yaml --repeats 1 x=1,2 {' '.join(FEWER)}",
        ),
        ("OMP_NUM_THREADS=1 python benchmarks/a.py --b 3", "python benchmarks/a.py --help"),
        ("fedrec show Krum", "fedrec show Krum"),
        ("fedrec run quickstart -q > a.json", "fedrec run quickstart -q"),
        (
            "fedrec run quickstart seed=1",
            f"fedrec run quickstart seed=1 name=short-seed-1 {' '.join(FEWER)}",
        ),
    ],
)
def test_what_is_run_in_place_of_a_long_command(shown: str, run: str) -> None:
    assert plan(shown.split()).words == tuple(run.split())


def test_what_a_program_prints_and_how_it_ends_is_in_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        log = Log(file)
        log.run("right", print, ["right"])
        assert log.failed == []
        assert log.run("wrong", lambda: sys.exit("mistaken"), ["wrong"]) == "mistaken\n"
        log.run("two", lambda: 2, ["two"])
    assert log.failed == ["wrong: exit 1", "two: exit 2"]
    assert "\n  | mistaken\n" in (tmp_path / "log").read_text()


def test_a_command_that_no_rule_is_for_is_an_error() -> None:
    with pytest.raises(ValueError, match="for the command `rm -rf runs`"):
        plan(["rm", "-rf", "runs"])
