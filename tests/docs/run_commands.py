"""Run what the README and the docs show, as a reader would, and keep a log of it.

`make docs-test` calls this in a fresh clone that has an environment of its own. All pages are
played in the clone, one after the other, so that a page finds the runs that an earlier one made:
files that a page titles are written first, its Python is one program, which runs where the first of
it stands, and its shell commands are run one by one. What takes long is shortened or left out, and
what ran before is not run again; the log says so at each command, and its end lists all that was
left out, with the reasons. In place of MNIST, which is not bundled, pages find something small in
the same format.

`make` starts processes of its own. All other programs are forked from this process, which has
imported torch once: else most of the time would go into that.

`python tests/docs/run_commands.py LOG PAGE ...` plays some pages alone, in the folder it lies in.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))
from test_code_blocks import REPOSITORY, blocks, commands, pages, write_mnist

# These make the runs that other pages look at.
FIRST = ("README.md", "docs/index.md", "docs/quickstart.md")
# Commands that are left out, by how they begin.
LEFT_OUT = {
    "make flower-demo": "a federation of six processes, which takes minutes",
    "ssh-keygen": "makes a key of the reader's own",
    "flwr ": "needs a SuperLink that runs",
    "flower-": "needs a SuperLink that runs",
    "tensorboard ": "serves pages until it is stopped",
    "mlflow ": "serves pages until it is stopped",
    "make test": "every change has to pass it",
    "fedrec run recipes/mnist/": "MNIST is not bundled",
    "fedrec record recipes/paper/": "MNIST is not bundled",
    "fedrec recover runs/trimmed_mean_trim": "MNIST is not bundled",
    "fedrec recover runs/unlike": "MNIST is not bundled",
    "pip install fedrec[": "extras are installed already",
    "fedrec history new-key /somewhere/else/": "this path stands for one of the reader's own",
}
# The trainings that are run in full, since the docs tell their results.
IN_FULL = ("recipes/quickstart.yaml", "recipes/quickstart_backdoor.yaml", "quickstart")
FEWER = ("record.max_rounds=60", "loop.eval_every=30")
# What every program imports.
IMPORTED = ("fedrec.recipe", "fedrec.cli.commands", "pytest", "sklearn.datasets")
SECONDS = 600  # on a busy machine


@dataclass(frozen=True)
class Plan:
    """What is run in place of a command, if anything, and why it is not the command itself."""

    words: tuple[str, ...]
    why: str = ""
    #: The file that the command's output goes to.
    into: str | None = None


def plan(command: list[str]) -> Plan:
    """Decide what is done about a command, by what it begins with.

    Raises:
        ValueError: If nothing is known about such commands.
    """
    words = tuple(command)
    for start, why in LEFT_OUT.items():
        if " ".join(words).startswith(start):
            return Plan((), why)
    words = tuple(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    into = words[-1] if words[-2:-1] == (">",) else None
    words = words[:-2] if into else words
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        return Plan((*words[:2], "--help"), "takes long: that its options exist is looked at")
    if words[0] == "fedrec" and words[1] in ("run", "record", "sweep"):
        overrides = [word for word in words[3:] if "=" in word]
        own_name = any(word.startswith("name=") for word in overrides)
        if words[1] == "run" and words[2] in IN_FULL and not overrides:
            return Plan(words, into=into)
        repeats = tuple("1" if words[i - 1] == "--repeats" else w for i, w in enumerate(words))
        # Beside the run that is as long as the docs say, and those with other overrides.
        slug = re.sub(r"[^a-z0-9]+", "-", " ".join(overrides).lower())[:40]
        name = (f"name=short-{slug}",) if words[2] in IN_FULL and not own_name else ()
        return Plan((*repeats, *name, *FEWER), "shortened", into)
    if words[0] in ("fedrec", "pytest") or words == ("make", "quickstart"):
        return Plan(words, into=into)
    raise ValueError(
        f"Expected a rule in {Path(__file__).name} for the command `{shlex.join(command)}`, but "
        "there is none. HINT: say in `plan` how it is run, or in `LEFT_OUT` why it is not."
    )


def ordered() -> list[Path]:
    """Return all pages, those that make runs first."""
    first = [REPOSITORY / name for name in FIRST]
    return [*first, *(page for page in pages() if page not in first)]


@dataclass
class Log:
    """Runs commands, and writes down what came of them."""

    file: TextIO
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)

    def write(self, line: str) -> None:
        print(line, flush=True)  # noqa: T201
        self.file.write(line + "\n")
        self.file.flush()

    def command(self, where: str, words: list[str]) -> None:
        planned = plan(words)
        shown = shlex.join(words)
        self.write(f"\n{where}\n$ {shown}")
        if not planned.words:
            self.left_out.append(f"{shown}: {planned.why}")
            self.write(f"  left out: {planned.why}")
            return
        if planned.why:
            self.write(f"  {planned.why}, $ {shlex.join(planned.words)}")
        if planned.words in self.done:
            self.write("  ran before")
            return
        output = self.run(f"{where} {shown}", *started(planned.words))
        # What a page's own files say may be something else on another page.
        if "make" in planned.words[:1] or "recipes/quickstart.yaml" in planned.words[2:3]:
            self.done.add(planned.words)
        if planned.into:
            Path(planned.into).write_text(output, encoding="utf-8")
        if planned.words[-1] == "--help":
            options = {word for word in words if word.startswith("--")}
            missing = sorted(options - set(re.findall(r"--[\w-]+", output)))
            if missing:
                self.failed.append(f"{where} {shown}: no option {', '.join(missing)}")

    def run(self, what: str, program: Callable[[], object], arguments: list[str]) -> str:
        """Run a program in a process of its own, and return what it prints."""
        began, cpu = time.monotonic(), os.times()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
            target = (printed.fileno(), program, arguments)
            process = multiprocessing.get_context("fork").Process(target=_alone, args=target)
            process.start()
            process.join(SECONDS)
            end = f"exit {process.exitcode}"
            if process.is_alive():
                process.kill()
                process.join()
                end = f"not done in {SECONDS} s"
            printed.seek(0)
            output = printed.read()
        now = os.times()
        used = now.children_user + now.children_system - cpu.children_user - cpu.children_system
        self.write(f"  {end}, {time.monotonic() - began:.1f} s, {used:.1f} of them computing")
        self.file.writelines(f"  | {line}\n" for line in output.splitlines()[-60:])
        if end != "exit 0":
            self.failed.append(f"{what}: {end}")
            for line in output.splitlines()[-10:]:
                print(f"  | {line}")  # noqa: T201
        return output


def started(words: tuple[str, ...]) -> tuple[Callable[[], object], list[str]]:
    """Return what a command runs, and what it is to find in `sys.argv`."""
    name, *rest = words
    if name == "fedrec":
        # As the shell would have found it: several processes run the same file again.
        script = str(Path(sys.executable).with_name(name))
        return importlib.import_module("fedrec.cli.main").main, [script, *rest]
    if name == "pytest":
        return importlib.import_module("pytest").main, list(words)
    if name == "python":
        return lambda: runpy.run_path(rest[0], run_name="__main__"), rest
    return lambda: subprocess.run(words, stdin=subprocess.DEVNULL, check=True), list(words)


def _alone(output: int, program: Callable[[], object], arguments: list[str]) -> None:
    """Run a program as if this process had been started for it."""
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        sys.path.insert(0, str(Path(arguments[0]).parent))
    code = program()
    if isinstance(code, int):
        sys.exit(int(code))


def _program(code: CodeType) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(main))


def play(page: Path, log: Log) -> None:
    """Do what a page shows, from top to bottom."""
    name = str(page.relative_to(REPOSITORY))
    shown = list(blocks(page))
    for block in shown:
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
    python = [b for b in shown if b.language == "python" and b.title is None]
    for block in shown:
        if python and block == python[0]:
            log.write(f"\n{name}:{block.line}\n  the page's Python")
            code = compile("".join(b.text for b in python), name, "exec")
            log.run(f"{name}, Python", partial(_program, code), ["-c"])
        elif block.language == "bash":
            for words in commands(block.text):
                log.command(f"{name}:{block.line}", words)


def main() -> int:
    """Play all pages; return 1 if anything failed."""
    path = Path(sys.argv[1]).resolve()
    os.chdir(REPOSITORY)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Modules that a page titles lie here.
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    os.environ["OMP_NUM_THREADS"] = "1"  # models are small; threads wait where others compute
    for module in IMPORTED:
        importlib.import_module(module)
    if not Path("data/mnist").exists():
        write_mnist(Path("data/mnist"))
    with path.open("w", encoding="utf-8") as file:
        log = Log(file)
        chosen = [REPOSITORY / name for name in sys.argv[2:]]
        for page in chosen or ordered():
            play(page, log)
        log.write(f"\nLeft out, {len(log.left_out)}:")
        for line in sorted(set(log.left_out)):
            log.write(f"  {line}")
        log.write(f"\nFailed, {len(log.failed)}:")
        for line in log.failed:
            log.write(f"  {line}")
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main())
