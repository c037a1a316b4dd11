"""What scripts and narrow terminals get: JSON alone, no escape codes, whole words, completion."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import pytorch_lightning  # noqa: F401 - sets up its logger when it is first imported

from fedrec.cli.families import FAMILIES
from fedrec.cli.listing import find
from fedrec.cli.main import main
from fedrec.cli.parser import command_line
from fedrec.recipe.shipped import shipped_recipes

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 4}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
detector: KnownMalicious
record: {max_rounds: 4, server_lr: 0.5}
recoverers: [HistoricalOnly]
"""


def commands(group: click.Group | None = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that call it."""
    group = group or command_line(lambda options: 0)
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


COMMANDS = dict(commands())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(_RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    return tmp_path


def printed(capture: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Return the one JSON document that a command prints."""
    assert main([*words, "--json"]) == code
    return json.loads(capture.readouterr().out)


@pytest.mark.parametrize("name", ["", "history", *COMMANDS])
def test_help_has_an_example_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 60
    if name in COMMANDS:
        examples = out.partition("\nExample")[2].partition(":\n")[2].splitlines()
        assert any(f"fedrec {name}" in example for example in examples)
    assert main([*name.split(), "-h"]) == 0
    assert capsys.readouterr().out == out


def test_the_list_of_commands_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, command in COMMANDS.items():
        if " " not in name:
            first, _, _ = command.help.rstrip(".").partition(". ")
            assert f" {name} {first} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_right(name: str) -> None:
    for example in COMMANDS[name].examples:
        words = example.replace("\\\n", "").partition("#")[0].split()
        if words[0] == "eval" or "|" in words:
            continue
        assert words[0] == "fedrec"
        asked: list[Any] = []
        command_line(lambda options, asked=asked: asked.append(options) or 0).main(
            words[1:], standalone_mode=False
        )
        (options,) = asked
        assert " ".join([options.command, getattr(options, "action", "")]).strip() == name


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    codes = capsys.readouterr().out.partition("Exit codes:\n")[2]
    assert [line.split()[0] for line in codes.splitlines() if line[2] != " "] == [
        "0",
        "1",
        "2",
        "130",
        "143",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["history", "verfy", "x"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["run", "small.yaml", "--overwrit", "a=1"], "No such option '--overwrit'. Did you mean"),
        (["plot", "x", "--kind", "cost-of"], "'cost-of' is not one of 'values', 'cost', 'cp'."),
        (["report"], "Missing argument 'RUN ...'."),
    ],
)
def test_a_mistyped_command_or_option(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_every_command_prints_one_document(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["small.yaml", "name=one", "--no-progress"]
    plan = printed(capfd, "validate", *asked[:2])
    clients = [f"client-{i}" for i in range(4)]
    assert plan["recipe"] == "small.yaml"
    assert plan["clients"] == clients
    assert (plan["recorded"], plan["recoveries"], plan["recoveries_there"]) == (False, 1, 0)
    recorded = printed(capfd, "record", *asked)
    assert (recorded["history"]["rounds"], recorded["methods"]) == (4, [])
    plan = printed(capfd, "validate", *asked[:2])
    assert (plan["recorded"], plan["folder"]) == (True, "runs/one")
    (flagged,) = printed(capfd, "detect", "runs/one")["detection"]["malicious"]
    assert flagged in clients
    compared = printed(capfd, "detect", "runs/one", "--detector", "NormOutlier")
    assert compared["truth"] == [flagged]
    results = printed(capfd, "recover", "runs/one")
    assert [method["name"] for method in results["methods"]] == ["HistoricalOnly"]
    assert printed(capfd, "run", *asked) == results
    assert json.loads((here / "runs" / "one" / "results.json").read_text()) == results
    report = printed(capfd, "report", "runs/one")
    assert report == {"page": "runs/one/report.html", "runs": [results]}
    assert printed(capfd, "plot", "runs/one") == {"file": "runs/one/cp.svg"}
    info = printed(capfd, "history", "info", "runs/one")
    assert info["num_rounds"] == 4
    words = ["sweep", "small.yaml", "name=both", "aggregator=Median,FedAvg"]
    points = printed(capfd, *words, "--dry-run")["points"]
    assert [(point["name"], point["done"]) for point in points] == [
        ("aggregator=Median", False),
        ("aggregator=FedAvg", False),
    ]
    swept = printed(capfd, *words, "-q")
    assert swept["files"] == ["runs/both/results.csv", "runs/both/summary.csv"]
    assert swept["failures"] == {}
    assert {row["method"] for row in swept["summary"]} == {"Poisoned", "HistoricalOnly"}
    assert [entry["name"] for entry in printed(capfd, "ls", "filters")] == ["UpdateFilter"]
    assert printed(capfd, "show", "Krum")["family"] == "aggregators"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["validate", "small.yaml", "sede=1"], "RecipeError"),
        (["run", "nothing"], "ConfigurationError"),
        (["show", "Nothing"], "ConfigurationError"),
        (["cp", "nothing", "."], "ConfigurationError"),
        (["history", "info", "nothing"], "HistoryError"),
    ],
)
def test_an_error_is_a_document_too(
    words: list[str], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert error["type"].endswith("Error")
    if kind != "HistoryError":
        assert error["type"] == kind
    assert err == f"Error: {error['message']}\n"
    assert len(error.get("mistakes", [])) == (kind == "RecipeError")


def test_quiet_and_verbose(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "small.yaml", "-q"]) == 0
    out, err = capsys.readouterr()
    assert "HistoricalOnly" in out
    assert err == ""
    assert main(["run", "small.yaml"]) == 0
    assert capsys.readouterr().err == "Everything in `runs/small` is done already.\n"

    def level() -> int:
        return logging.getLogger("pytorch_lightning").level

    seen = {}
    for flag in ("-v", "--no-progress"):
        before = level()
        with pytest.MonkeyPatch.context() as patch:
            from fedrec.cli.commands import COMMANDS as FUNCTIONS

            patch.setitem(FUNCTIONS, "run", lambda args, flag=flag: seen.update({flag: level()}))
            assert main(["run", "small.yaml", flag]) == 0
        assert level() == before
    # What Lightning remarks is hidden, unless it is asked for.
    assert seen == {"-v": level(), "--no-progress": logging.ERROR}


def test_output_is_plain_and_narrow(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No escape codes, no bars; words of the text are whole, where they are short enough."""
    for words in (
        ["ls", "recipes"],
        ["ls"],
        ["validate", "small.yaml"],
        ["run", "small.yaml"],
        ["detect", "runs/small", "--detector", "NormOutlier"],
        ["sweep", "small.yaml", "name=both", "aggregator=Median,FedAvg"],
        ["show", "Bucketing"],
        ["report", "runs/small"],
    ):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "\r" not in out + err
        assert "…" not in out
        lines = [line for line in out.splitlines() if "model.ckpt" not in line]  # to be copied
        assert all(len(line) <= 60 or " " not in line.strip() for line in lines), words
    assert main(["ls", "recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[0] != " "] == list(shipped_recipes())
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)


def completed(line: str, shell: str = "bash") -> list[str]:
    """Return what a shell is told when TAB is pressed after a line."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    if shell == "fish":
        asked["COMP_CWORD"] = words[-1]
    done = subprocess.run(
        [sys.executable, "-m", "fedrec"],
        env={**os.environ, **asked, "_FEDREC_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_what_can_be_named() -> None:
    assert completed("fedrec re") == ["plain,record", "plain,recover", "plain,report"]
    assert completed("fedrec run quickstart_") == ["file,quickstart_", "plain,quickstart_backdoor"]
    assert completed("fedrec run sm") == ["file,sm", "plain,small.yaml"]
    assert completed("fedrec ls agg") == ["plain,aggregators"]
    assert completed("fedrec show Trimmed") == ["plain,TrimmedMean"]
    assert completed("fedrec detect runs/x --detector FLD") == ["plain,FLDetector"]
    assert "plain,mnist/base" in completed("fedrec cp mnist/")
    assert completed("fedrec run quickstart --over") == ["plain,--overwrite"]
    names = {cls.__name__ for classes in find().values() for cls in classes}
    assert {line.removeprefix("plain,") for line in completed("fedrec show ")} == names
    assert {f"plain,{name}" for name in [*FAMILIES, "recipes"]} == set(completed("fedrec ls "))


@pytest.fixture
def shells(here: Path) -> dict[str, str]:
    """What a shell needs to find `fedrec`, and nothing of its user's own."""
    command = here / "fedrec"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fedrec "$@"\n')
    command.chmod(0o755)
    own = {"HOME": str(here), "ZDOTDIR": str(here), "TERM": "xterm"}
    return {**os.environ, **own, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}


def test_bash_offers_recipes(shells: dict[str, str]) -> None:
    """The script that bash gets, in bash."""
    script = (
        "source <(fedrec completion bash); compopt() { :; }; COMP_WORDS=(fedrec run mnist/cof); "
        'COMP_CWORD=2; _fedrec_completion fedrec; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], env=shells, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["mnist/coffee_break_backdoor", "mnist/coffee_break_trim"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish is installed")
def test_fish_offers_recipes(shells: dict[str, str]) -> None:
    script = 'fedrec completion fish | source; complete -C "fedrec run mnist/cof"'
    command = ["fish", "--no-config", "-c", script]
    done = subprocess.run(command, env=shells, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mnist/coffee_break_backdoor", "mnist/coffee_break_trim"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh is installed")
def test_zsh_completes_a_recipe(shells: dict[str, str], here: Path) -> None:
    """In a terminal, by TAB; then, what stands in the line is written to a file."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=its, stdout=its, stderr=its, env=shells, start_new_session=True
    )
    os.close(its)
    screen = b""

    def until(text: bytes) -> None:
        nonlocal screen
        while text not in screen:
            screen += os.read(ours, 4096)

    setup = 'autoload -Uz compinit; compinit -D -u; eval "$(fedrec completion zsh)"'
    os.write(ours, f"{setup}; print rea''dy\n".encode())
    until(b"ready")
    os.write(ours, b"fedrec run mnist/coffee_break_b\t")
    until(b"backdoor")
    os.write(ours, b"\x01print -r -- \x05>line; exit\n")  # at the start of the line; at its end
    with contextlib.suppress(OSError):  # the terminal is gone
        while os.read(ours, 4096):
            pass
    assert process.wait() == 0
    os.close(ours)
    assert (here / "line").read_text() == "fedrec run mnist/coffee_break_backdoor\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_FEDREC_COMPLETE={shell}_complete" in capsys.readouterr().out
