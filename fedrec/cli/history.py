"""`fedrec history`: the functions of its commands. Imports neither torch nor Lightning."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fedrec.cli.output import error_as_json, write_json
from fedrec.cli.parser import Options
from fedrec.exceptions import FedrecError, HistoryCorruptedError, HistoryError
from fedrec.history.lmdb.damage import Damage

__all__ = ["execute"]

_CHILD = (
    "import sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    "from fedrec.cli.history import main; sys.exit(main(*sys.argv[1:]))"
)


# By which a process ends that reads damaged pages.
_OF_DAMAGE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


def execute(args: Options) -> int:
    """Run a command in a process of its own, and return its exit code.

    LMDB trusts its pages: reading a damaged page can kill the process.
    """
    words = [json.dumps(vars(args)), "\n".join(sys.path)]
    with (
        _sigterm_exits(),
        subprocess.Popen([sys.executable, "-P", "-c", _CHILD, *words]) as process,
    ):
        try:
            code = process.wait()
        except SystemExit:
            process.terminate()  # what it has begun is not to go on without anybody knowing
            raise
        except BaseException:
            process.kill()
            raise
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    if -code not in _OF_DAMAGE:
        why = f"the process that worked on it was ended by {name}"
        if -code == signal.SIGKILL:
            why += ", as the system does when memory runs out"
        error = HistoryError(f"History `{args.target}`: {why}. HINT: run the command again.")
        if args.json:
            write_json(error_as_json(error))
        sys.stderr.write(f"Error: {error}\n")
        return 128 - code
    reason = f"reading it ended in {name}, so that its structure is damaged"
    if args.json and args.action == "verify":
        write_json(_verified(args.target, [Damage(part="the file", reason=reason)]))
    hint = "HINT: restore it from a copy."
    sys.stderr.write(f"Error: History `{args.target}`, the file: {reason}. {hint}\n")
    return 1


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Turn the first SIGTERM into a `SystemExit` with the customary status, and ignore others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows cleans up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: str) -> int:
    """Run a command in this process, and return its exit code.

    Args:
        arguments: The parsed arguments of the command, as JSON.
    """
    args = Options(**json.loads(arguments))
    try:
        _allow(args.allow)
        with _sigterm_exits(), _progress(not (args.no_progress or args.quiet)) as progress:
            result, text, code = _ACTIONS[args.action](args, progress)
        if args.json:
            write_json(result)
        else:
            sys.stdout.write(text + "\n")
    except KeyboardInterrupt:
        return 130
    except FedrecError as error:
        if args.debug:
            raise
        if args.json:
            write_json(error_as_json(error))
        sys.stderr.write(f"Error: {error}\n")
        return 1 if isinstance(error, HistoryCorruptedError) else 2
    return code


#: Called with the number of rounds that are left.
Progress = Callable[[int], None]
# The result for `--json`, the text otherwise, and the exit code.
_Outcome = tuple[dict[str, Any], str, int]


def _allow(modules: Sequence[str]) -> None:
    """Import modules of the user's, which may register codecs."""
    if modules:
        from fedrec.recipe.classes import ClassFinder

        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - modules that lie here can be allowed
        ClassFinder(modules)


def _info(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.retention import Retention
    from fedrec.history.tools.info import info

    about = info(args.target, master_key=_source(args))
    unknown = "unknown before the first round"
    per_parameter = about.bytes_per_parameter
    error = "exact" if about.max_error == 0 else f"entries are off by at most {about.max_error:.3g}"
    lines = [
        f"History {about.path}",
        f"  rounds      {about.num_rounds} of {about.max_rounds}",
        *([f"  shards      {about.num_shards}"] if about.num_shards > 1 else []),
        f"  clients     {about.num_clients}: {_some(about.clients)}",
        f"  updates     {about.num_updates} of {about.num_parameters:,} parameters",
        f"  size        {about.num_bytes:,} bytes, {about.free_bytes:,} of them free",
        "  a parameter "
        + (unknown if per_parameter is None else f"{per_parameter:.3g} bytes in each update"),
        f"  all rounds  about {about.expected_bytes:,} bytes",
        f"  keeps       updates of {Retention.of(about.keep)}",
        f"  codec       {about.codec}, {error}",
        f"  encryption  {about.encryption or 'none'}",
        f"  model       {about.model_fingerprint}",
        "  recorded by " + ", ".join(f"{name} {v}" for name, v in about.versions.items()),
    ]
    for repair in about.repairs:
        dropped = ", ".join(f"round {t} of {client_id}" for t, client_id in repair["dropped"])
        lines.append(
            f"  a repair    kept {repair['rounds']} of {repair['rounds_before']} rounds, and "
            f"dropped {dropped or 'no update'} from them"
        )
    lines += [
        f"  forgotten   {client['client_id']} on {client['when']}, {client['updates']} updates"
        for client in about.forgotten
    ]
    return about.to_dict(), "\n".join(lines), 0


def _browse(args: Options, progress: Progress) -> _Outcome:
    from fedrec.cli.browse import browse_command

    return browse_command(args, _source(args), progress)


def _some(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text; the output of `--json` has all of them."""
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])


def _verify(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.opening import open_history

    locked, damage = False, list[Damage]()
    with open_history(args.target, master_key=_source(args)) as history:
        try:
            locked = history.is_locked
            damage = history.damage(progress)
        except HistoryCorruptedError as error:
            damage = [Damage(part="the file", reason=str(error))]
        rounds = 0 if damage else len(history.rounds())
    text = f"All {rounds} rounds of history {history.path} are as they were written."
    if locked:
        text += " It is encrypted: without its master key, checksums were compared and no more."
    if damage:
        lines = [f"  - {part}" for part in damage]
        text = "\n".join([f"History {history.path} is damaged:", *lines])
    return _verified(str(history.path), damage, locked), text, int(bool(damage))


def _repair(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.repair import repair

    done = repair(args.target, progress=progress, master_key=_source(args))
    result = {**dataclasses.asdict(done), "damage": _as_dicts(list(done.damage))}
    result["mended"] = _as_dicts(list(done.mended))
    result["backups"] = [str(path) for path in done.backups]
    if not done.damage:
        return result, "Nothing is damaged, and nothing was changed.", 0
    lines = ["Damaged:", *(f"  - {part}" for part in done.damage)]
    lines += [
        f"Taken from another shard: {part.part} in round {part.round}." for part in done.mended
    ]
    lines += [f"Dropped the update of `{client_id}` in round {t}." for t, client_id in done.dropped]
    if done.rounds < done.rounds_before:
        of_all = f" in all {len(done.backups)} shards" if len(done.backups) > 1 else ""
        lines.append(f"Kept the first {done.rounds} of {done.rounds_before} rounds{of_all}.")
    lines += [f"The old file is kept as {path}." for path in done.backups]
    lines.append("Remove what is kept when you need it no more.")
    return result, "\n".join(lines), 0


def _compact(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.repair import compact

    done = compact(args.target, progress=progress, master_key=_source(args))
    text = f"{done.bytes_before:,} bytes before, {done.bytes_after:,} bytes now."
    return dataclasses.asdict(done), text, 0


def _forget(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.forget import forget

    done = forget(args.target, args.client, progress=progress, master_key=_source(args))
    result = {**dataclasses.asdict(done), "removed": [str(path) for path in done.removed]}
    lines = [f"Forgot {', '.join(done.clients)}: {done.updates} updates."]
    if done.keys:
        lines.append(f"Destroyed the data key of {', '.join(done.keys)}.")
    if done.aggregates:
        rounds = ", ".join(map(str, done.aggregates))
        lines.append(f"Replaced the aggregate, which was one of these updates, of round {rounds}.")
    lines += [f"Removed {path}." for path in done.removed]
    return result, "\n".join(lines), 0


def _new_key(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.lmdb.encryption import new_key

    new_key(args.target)
    text = f"Wrote a master key to {args.target}. Keep it apart from the history, and a copy of it."
    return {"path": args.target}, text, 0


def _source(args: Options) -> str | None:
    """Return the source of the master key, as `master_key=` of a history takes it."""
    return None if args.key_file is None else f"file:{args.key_file}"


def _export(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.export import export_history

    done = export_history(args.target, args.folder, progress=progress, master_key=_source(args))
    text = f"Wrote {done.rounds} rounds, {done.num_bytes:,} bytes, to {done.folder}."
    return dataclasses.asdict(done), text, 0


def _import(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.importing import import_history

    done = import_history(
        args.folder,
        args.target,
        codec=args.codec,
        progress=progress,
        master_key=_source(args),
    )
    text = f"Read {done.rounds} rounds, {done.num_bytes:,} bytes, into {done.path}."
    return dataclasses.asdict(done), text, 0


def _shard(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.sharding import shard_history

    done = shard_history(
        args.target,
        args.folder,
        num_shards=args.shards,
        progress=progress,
        master_key=_source(args),
    )
    text = f"Wrote {done.rounds} rounds in {done.num_shards} shards"
    return dataclasses.asdict(done), f"{text}, {done.num_bytes:,} bytes, to {done.path}.", 0


def _merge(args: Options, progress: Progress) -> _Outcome:
    from fedrec.history.tools.sharding import merge_history

    done = merge_history(args.target, args.folder, progress=progress, master_key=_source(args))
    text = f"Wrote {done.rounds} rounds in one file, {done.num_bytes:,} bytes, to {done.path}."
    return dataclasses.asdict(done), text, 0


_ACTIONS: dict[str, Callable[[Options, Progress], _Outcome]] = {
    "info": _info,
    "browse": _browse,
    "verify": _verify,
    "repair": _repair,
    "compact": _compact,
    "forget": _forget,
    "new-key": _new_key,
    "export": _export,
    "import": _import,
    "shard": _shard,
    "merge": _merge,
}


def _verified(path: str, damage: list[Damage], locked: bool = False) -> dict[str, Any]:
    return {
        "path": path,
        "whole": not damage,
        "damage": _as_dicts(damage),
        "checksums_only": locked,
    }


def _as_dicts(damage: list[Damage]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(part) for part in damage]


@contextmanager
def _progress(enabled: bool) -> Iterator[Progress]:
    """Show a bar of rounds, if it is enabled and standard error is a terminal."""
    if not (enabled and sys.stderr.isatty()):
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
