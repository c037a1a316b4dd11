"""Run what the README and the docs show, as a reader would, and keep a log of it.

`make docs-test` calls this in a fresh clone that has an environment of its own. All pages are
played in the clone, one after the other, so that a page finds the runs that an earlier one made:
files that a page titles are written first, its Python is one program, which runs where the first of
it stands, and its shell commands are run one by one. What takes long is shortened or left out; the
log says so at each command, and its end lists all that was left out, with the reasons.

`python tests/docs/run_commands.py LOG PAGE ...` plays some pages alone, in the folder it lies in.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parent))
from test_code_blocks import REPOSITORY, blocks, commands, pages

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
    "fedrec recover runs/trimmed_mean_trim": "MNIST is not bundled",
    "pip install fedrec[": "extras are installed already",
    "fedrec history new-key /somewhere/else/": "this path stands for one of the reader's own",
}
# The trainings that are run in full, since the docs tell their results.
IN_FULL = ("recipes/quickstart.yaml", "recipes/quickstart_backdoor.yaml")
FEWER = ("record.max_rounds=60", "loop.eval_every=30")
SECONDS = 300


@dataclass(frozen=True)
class Plan:
    """What is run in place of a command, if anything, and why it is not the command itself."""

    words: tuple[str, ...]
    why: str = ""


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
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        return Plan((*words[:2], "--help"), "takes long: that its options exist is looked at")
    if words[0] == "fedrec" and words[1] in ("run", "record", "sweep"):
        repeats = tuple("1" if words[i - 1] == "--repeats" else w for i, w in enumerate(words))
        if words[1] == "run" and words[2] in IN_FULL and len(words) == 3:
            return Plan(words)
        return Plan((*repeats, *FEWER), "shortened")
    if words[0] in ("fedrec", "pytest") or words == ("make", "quickstart"):
        return Plan(words)
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
        output = self.run(f"{where} {shown}", planned.words)
        if planned.words[-1] == "--help":
            options = {word for word in words if word.startswith("--")}
            missing = sorted(options - set(re.findall(r"--[\w-]+", output)))
            if missing:
                self.failed.append(f"{where} {shown}: no option {', '.join(missing)}")

    def run(self, what: str, words: tuple[str, ...]) -> str:
        started = time.monotonic()
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=SECONDS,
            )
            output, end = done.stdout, f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            output, end = "", f"not done in {SECONDS} s"
        except FileNotFoundError:
            output, end = "", f"there is no command {words[0]}"
        self.write(f"  {end}, {time.monotonic() - started:.1f} s")
        self.file.writelines(f"  | {line}\n" for line in output.splitlines()[-60:])
        if end != "exit 0":
            self.failed.append(f"{what}: {end}")
            for line in output.splitlines()[-10:]:
                print(f"  | {line}")  # noqa: T201
        return output


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
            log.run(f"{name}, Python", (sys.executable, "-c", "".join(b.text for b in python)))
        elif block.language == "bash":
            for words in commands(block.text):
                log.command(f"{name}:{block.line}", words)


def main() -> int:
    """Play all pages; return 1 if anything failed."""
    path = Path(sys.argv[1]).resolve()
    os.chdir(REPOSITORY)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # modules that a page titles lie here
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
