"""`fedrec history`: what each of its commands does. Imports neither torch nor Lightning."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedrec.exceptions import FedrecError, HistoryCorruptedError
from fedrec.history.damage import Damage

__all__ = ["execute"]

_CHILD = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from fedrec.cli.history import main; sys.exit(main(*sys.argv[1:]))"
)


def execute(args: argparse.Namespace) -> int:
    """Run a command in a process of its own, and return its exit code.

    LMDB trusts its pages: one that is damaged can kill the process that follows it.
    """
    flags = [name for name in ("json", "no_progress", "debug") if getattr(args, name)]
    words = [args.action, args.target, ",".join(flags), "\n".join(sys.path)]
    code = subprocess.run([sys.executable, "-P", "-c", _CHILD, *words], check=False).returncode
    if code >= 0:
        return code
    reason = f"reading it ended in {signal.Signals(-code).name}, so that its structure is damaged"
    if args.json and args.action == "verify":
        _write(_verified(args.target, [Damage(part="the file", reason=reason)]))
    hint = "HINT: restore it from a copy."
    sys.stderr.write(f"Error: History `{args.target}`, the file: {reason}. {hint}\n")
    return 1


def main(action: str, target: str, flags: str) -> int:
    """Run a command in this process, and return its exit code."""
    chosen = flags.split(",")
    try:
        with _progress("no_progress" not in chosen) as progress:
            result, text, code = _ACTIONS[action](target, progress)
        if "json" in chosen:
            _write(result)
        else:
            sys.stdout.write(text + "\n")
    except KeyboardInterrupt:
        return 130
    except FedrecError as error:
        if "debug" in chosen:
            raise
        sys.stderr.write(f"Error: {error}\n")
        return 1 if isinstance(error, HistoryCorruptedError) else 2
    return code


Progress = Callable[[int], None]
_Outcome = tuple[dict[str, Any], str, int]


def _info(target: str, progress: Progress) -> _Outcome:
    from fedrec.history.summary import info

    found = info(target)
    unknown = "unknown before the first round"
    per_parameter = found.bytes_per_parameter
    expected = found.expected_bytes
    error = "exact" if found.max_error == 0 else f"entries are off by at most {found.max_error:.3g}"
    lines = [
        f"History {found.path}",
        f"  rounds      {found.num_rounds} of {found.max_rounds}",
        f"  clients     {found.num_clients}",
        f"  updates     {found.num_updates} of {found.num_parameters:,} parameters",
        f"  size        {found.num_bytes:,} bytes, {found.free_bytes:,} of them free",
        "  a parameter "
        + (unknown if per_parameter is None else f"{per_parameter:.3g} bytes in each update"),
        f"  all rounds  {unknown if expected is None else f'about {expected:,} bytes'}",
        f"  codec       {found.codec}, {error}",
        f"  model       {found.model_fingerprint}",
        "  recorded by " + ", ".join(f"{name} {v}" for name, v in found.versions.items()),
    ]
    for one in found.repairs:
        dropped = ", ".join(f"round {t} of {client_id}" for t, client_id in one["dropped"])
        lines.append(
            f"  a repair    kept {one['rounds']} of {one['rounds_before']} rounds, and dropped "
            f"{dropped or 'no update'} from them"
        )
    return found.to_dict(), "\n".join(lines), 0


def _verify(target: str, progress: Progress) -> _Outcome:
    from fedrec.history.store import RoundStore
    from fedrec.history.summary import history_folder

    damage: list[Damage] = []
    rounds = 0
    store = RoundStore(history_folder(target))
    try:
        for left, found in store.damage():
            damage += found
            rounds += 1
            progress(left)
    except HistoryCorruptedError as error:
        damage.append(Damage(part="the file", reason=str(error)))
    finally:
        store.close()
    text = f"All {rounds} rounds of history {store.path} are as they were written."
    if damage:
        text = "\n".join([f"History {store.path} is damaged:", *(f"  - {one}" for one in damage)])
    return _verified(str(store.path), damage), text, int(bool(damage))


def _repair(target: str, progress: Progress) -> _Outcome:
    from fedrec.history.maintenance import repair

    done = repair(target, progress=progress)
    result = {**dataclasses.asdict(done), "damage": _as_dicts(list(done.damage))}
    result["backup"] = None if done.backup is None else str(done.backup)
    if not done.damage:
        return result, "Nothing is damaged, and nothing was changed.", 0
    lines = ["Damaged:", *(f"  - {one}" for one in done.damage)]
    lines += [f"Dropped the update of `{client_id}` in round {t}." for t, client_id in done.dropped]
    if done.rounds < done.rounds_before:
        lines.append(f"Kept the first {done.rounds} of {done.rounds_before} rounds.")
    lines.append(f"The damaged file is kept as {done.backup}; remove it when you need it no more.")
    return result, "\n".join(lines), 0


def _compact(target: str, progress: Progress) -> _Outcome:
    from fedrec.history.maintenance import compact

    done = compact(target, progress=progress)
    text = f"{done.bytes_before:,} bytes before, {done.bytes_after:,} bytes now."
    return dataclasses.asdict(done), text, 0


_ACTIONS: dict[str, Callable[[str, Progress], _Outcome]] = {
    "info": _info,
    "verify": _verify,
    "repair": _repair,
    "compact": _compact,
}


def _verified(path: str, damage: list[Damage]) -> dict[str, Any]:
    return {"path": path, "whole": not damage, "damage": _as_dicts(damage)}


def _as_dicts(damage: list[Damage]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in damage]


def _write(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


@contextmanager
def _progress(wanted: bool) -> Iterator[Progress]:
    """Show a bar of rounds on a terminal; what is returned takes the number that are left."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda left: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Reading", total=None)
        total = 0

        def show(left: int) -> None:
            nonlocal total
            total = max(total, left + 1)
            bar.update(task, total=total, completed=total - left)

        yield show
