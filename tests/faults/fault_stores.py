"""What the trials share: small recordings whose numbers follow from the round, and children.

Imports no torch, so that a child starts at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.cli import history as commands
from fedrec.cli.parser import Options, command_line
from fedrec.history import LMDBHistory
from fedrec.history.codecs import CODECS
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundArrays

IDS = tuple("abcdef")
D = 1100  # 4,400 bytes: a value has pages of its own
STORE_ID = "5" * 32

LONGEST = 600  # seconds after which a forgotten child is killed: no trial comes near it

#: Counts of what a trial saw, by name.
Facts = dict[str, int]
#: One trial; it draws all that is random from the generator, and raises if something is wrong.
Trial = Callable[[random.Random, Path], Facts]


def manifest(codec: str = "float32", **changes: Any) -> Manifest:
    """Return the manifest of a recording whose rounds `arrays` makes."""
    fields: dict[str, Any] = {
        "model_fingerprint": "f",
        "num_parameters": D,
        "clients": {c: i + 1 for i, c in enumerate(IDS)},
        "seed": 0,
        "aggregator": {"class_path": "FedAvg", "init_args": {}},
        "server_lr": 0.5,
        "max_rounds": 10,
        "codec": codec,
        "store_id": STORE_ID,
    }
    return Manifest(**{**fields, **changes})


def arrays(t: int, client_ids: tuple[str, ...] = IDS) -> RoundArrays:
    """Return round `t`: the same numbers for the same `t` and client."""
    generator = np.random.default_rng(t)
    updates = generator.standard_normal((len(IDS), D), dtype=np.float32)
    rows = [IDS.index(c) for c in client_ids]
    return RoundArrays(
        round=t,
        global_weights=generator.standard_normal(D, dtype=np.float32),
        client_ids=client_ids,
        updates=updates[rows],
        num_samples=np.array([r + 1 for r in rows], np.int64),
        aggregate=generator.standard_normal(D, dtype=np.float32),
    )


def stored(t: int, codec: str) -> RoundArrays:
    """Return round `t` as a history with this codec gives it back."""
    made = arrays(t)
    for row in made.updates:
        CODECS[codec].decode(memoryview(CODECS[codec].encode(row).payload), row)
    return made


def same(found: RoundArrays, written: RoundArrays) -> bool:
    """Tell whether two rounds are equal, bit by bit."""
    return (
        found.client_ids == written.client_ids
        and found.num_samples.tolist() == written.num_samples.tolist()
        and all(
            getattr(found, name).tobytes() == getattr(written, name).tobytes()
            for name in ("global_weights", "updates", "aggregate")
        )
    )


def record(path: Path, num_rounds: int, codec: str = "float32", **changes: Any) -> LMDBHistory:
    """Record rounds and return the closed store."""
    store = LMDBHistory(path)
    store.begin(manifest(codec, **changes))
    for t in range(num_rounds):
        store.append(arrays(t))
    store.close()
    return store


def require_whole(path: Path, codec: str = "float32", *, command: bool = False) -> int:
    """Check that a history holds what was written and nothing else; return its rounds.

    Args:
        path: Its directory.
        codec: Its codec.
        command: Run `fedrec history verify` as a user does, in a new interpreter.
    """
    store = LMDBHistory(path)
    rounds = store.verify()
    for t in rounds:
        assert same(store.read(t), stored(t, codec)), f"round {t} is not what was written"
    store.close()
    assert verify_command(path, new_process=command) == 0
    return len(rounds)


def _here(options: Options) -> int:
    """Run a command of `fedrec history` in this process."""
    return commands.main(json.dumps(vars(options)))


def verify_command(path: Path, *, new_process: bool = False) -> int:
    """Return the exit code of `fedrec history verify`."""
    if new_process:
        words = [sys.executable, "-m", "fedrec", "history", "verify", str(path), "--json"]
        return subprocess.run(words, capture_output=True, check=False).returncode
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return command_line(_here).main(
            ["history", "verify", str(path), "--json"], standalone_mode=False
        )


@dataclass
class Child:
    """A forked process, what it sends line by line, and how it ended."""

    pid: int
    pipe: int
    code: int | None = None
    lines: list[str] = field(default_factory=list)
    _rest: bytes = b""

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def read(self, lines: int) -> None:
        """Read what it sends until there are this many lines, or it has ended."""
        while len(self.lines) < lines and self._read():
            pass

    def wait(self) -> Child:
        """Read all it sends until it ends; `code` is negative where a signal ended it."""
        while self._read():
            pass
        os.close(self.pipe)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self

    def _read(self) -> bool:
        """Wait for something to be sent; tell whether something was."""
        chunk = os.read(self.pipe, 65536)
        # A last line without its end was not sent yet.
        *complete, self._rest = (self._rest + chunk).split(b"\n")
        self.lines += [line.decode() for line in complete]
        return bool(chunk)

    def result(self) -> Any:
        """Wait, and return what the function returned."""
        self.wait()
        assert self.code == 0, f"the child ended with {self.code}: " + "\n".join(self.lines)
        return json.loads(self.lines[-1])


def fork(function: Callable[[Callable[[object], None]], Any]) -> Child:
    """Run a function in a child; it gets a function that sends a line to the parent.

    Args:
        function: What to run. What it returns is sent last, as JSON.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Child(pid, read)
    code = 1
    try:
        os.close(read)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)

        def send(line: object) -> None:
            os.write(write, f"{line}\n".encode())

        send(json.dumps(function(send)))
        code = 0
    except BaseException:  # noqa: BLE001 - the parent is told
        os.write(write, (traceback.format_exc() + "\n").encode())
    finally:
        os._exit(code)


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Put a directory's files back as they were."""
    copy = path.with_name(path.name + ".kept")
    shutil.copytree(path, copy)
    try:
        yield
    finally:
        shutil.rmtree(path)
        copy.rename(path)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a row's trials.

    Args:
        trials: How many there were.
        failures: Seed and traceback of each that failed.
        facts: What was seen, summed over the trials.
        seconds: Wall time.
    """

    trials: int
    failures: list[tuple[int, str]]
    facts: Facts
    seconds: float


def run_trials(
    trial: Trial, count: int, folder: Path, *, first: int = 0, most_seconds: float | None = None
) -> Outcome:
    """Run trials one after another, each with its own seed and folder.

    Args:
        trial: The trial.
        count: How many.
        folder: Where they may write.
        first: Seed of the first.
        most_seconds: No trial begins after this time.
    """
    began = time.perf_counter()
    failures, facts = [], Facts()
    done = 0
    for seed in range(first, first + count):
        if most_seconds is not None and time.perf_counter() - began > most_seconds:
            break
        place = folder / f"trial-{seed}"
        place.mkdir(parents=True)
        try:
            for name, number in trial(random.Random(seed), place).items():
                facts[name] = facts.get(name, 0) + number
        except Exception:  # noqa: BLE001 - it is a result
            failures.append((seed, traceback.format_exc()))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        done += 1
    return Outcome(trials=done, failures=failures, facts=facts, seconds=time.perf_counter() - began)
