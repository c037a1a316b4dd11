"""The `fedrec` command: arguments, messages and exit codes. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedrec import __version__
from fedrec.exceptions import FedrecError, MethodsFailedError

__all__ = ["main"]

_RECIPE = "recipe file (YAML)"
_RUN = "run folder, such as runs/quickstart"
_ALLOW = "let the recipe use the classes of this module or package of yours; repeatable"

_COMMANDS = {
    "run": ("record, detect, recover and report; goes on where an earlier run stopped", _RECIPE),
    "record": ("train under attack and store the history", _RECIPE),
    "detect": ("find the malicious clients of a recording", _RUN),
    "recover": ("recover the model of a recording", _RUN),
    "report": ("write results.json and report.html of a run again, or compare runs", _RUN),
    "validate": ("check a recipe and list all of its mistakes", _RECIPE),
}

_LISTING = {
    "ls": "list what a recipe can name: attacks, aggregators, detectors, ...",
    "show": "show a component's arguments, documentation and paper",
}

_HISTORY = {
    "info": "tell what a history holds, without reading its updates",
    "browse": "look into its rounds: who was asked, who sent what, how large updates were",
    "verify": "read everything and name all that is damaged; exit code 1 if anything is",
    "repair": "drop what is damaged, and nothing else; the old file is kept as data.mdb.damaged",
    "compact": "give free space in the file back to the disk",
    "forget": "leave nothing of what a client sent, in the history and in the run it lies in",
    "new-key": "write a new master key for encrypted histories to a file",
    "export": "write every round to an .npz file, checked and without any code in it",
    "import": "make a history of what `export` wrote, checking all of it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fedrec` command.

    Args:
        argv: Arguments without the program's name; by default the process's arguments.

    Returns:
        The exit code: 0; 1 if a history is damaged, or a method or a point of a sweep failed; 2 for
        a mistake of the user's; 130 after an interrupt.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # Overrides may stand between options, which argparse does not allow for.
    takes_overrides = "overrides" in args
    unknown = [t for t in rest if t.startswith("-") or "=" not in t or not takes_overrides]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides:
        args.overrides = [*args.overrides, *rest]
    try:
        if args.command == "history":
            from fedrec.cli.history import execute

            return execute(args)
        if args.command == "doctor":
            from fedrec.cli import doctor

            return doctor.execute(args)
        if getattr(args, "allow", None):
            sys.path.insert(0, os.getcwd())  # noqa: PTH109 - modules that lie here can be allowed
        with _log_to_terminal():
            return _execute(args)
    except KeyboardInterrupt:
        words = [word for word in (sys.argv[1:] if argv is None else argv) if word != "--overwrite"]
        again = shlex.join(["fedrec", *words])
        sys.stderr.write(f"\nStopped. What is done is kept; go on with:\n  {again}\n")
        return 130
    except FedrecError as error:
        if args.debug:
            raise
        sys.stderr.write(f"Error: {error}\n")
        return 1 if isinstance(error, MethodsFailedError) else 2


def _execute(args: argparse.Namespace) -> int:
    from fedrec.cli.quiet import quiet

    with quiet():
        from fedrec.cli.commands import COMMANDS

        return COMMANDS[args.command](args) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedrec",
        description="Federated learning: record, attack, detect, recover, report.",
    )
    parser.add_argument("--version", action="version", version=f"fedrec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, target) in _COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        sub.add_argument(
            "target",
            metavar=target.split()[0].upper(),
            help=target,
            nargs="+" if name == "report" else None,
        )
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
        if name == "report":
            where = "page to write (default: report.html in the run folder; of several runs, here)"
            sub.add_argument("-o", "--output", metavar="FILE", help=where)
            continue
        sub.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="overrides: a dotted key of the recipe (recoverers.0.label) and a YAML value",
        )
        _add_allow(sub, _ALLOW)
        if name == "detect":
            sub.add_argument(
                "--detector",
                action="append",
                default=[],
                metavar="DETECTOR",
                help="compare this detector (class, or {class_path: ..., init_args: {...}}) on the "
                "recording and change nothing; repeatable",
            )
            sub.add_argument("--json", action="store_true", help="print the comparison as JSON")
        if name in ("run", "record", "validate"):
            sub.add_argument(
                "--output-dir", default="runs", help="where run folders lie (default: runs)"
            )
        if name in ("run", "record"):
            sub.add_argument(
                "--overwrite", action="store_true", help="remove an existing run of this name first"
            )
        if name != "validate":
            sub.add_argument("--no-progress", action="store_true", help="no progress bars")
    _add_sweep(commands)
    _add_plot(commands)
    _add_listing(commands)
    _add_history(commands)
    about = "tell what fedrec finds on this machine, and what keeps it from working here"
    sub = commands.add_parser("doctor", help=about, description=f"{about.capitalize()}.")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def _add_allow(sub: argparse.ArgumentParser, about: str) -> None:
    sub.add_argument("--allow", action="append", default=[], metavar="MODULE", help=about)


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "run a recipe at every point of a grid; goes on where an earlier call stopped"
    sub = commands.add_parser("sweep", help=about, description=f"{about.capitalize()}.")
    sub.add_argument("target", metavar="RECIPE", help=_RECIPE)
    sub.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value,value",
        help="values to sweep: a dotted key of the recipe and YAML values; commas in brackets or "
        "quotes do not separate. A key with one value is set in all points",
    )
    sub.add_argument(
        "--repeats", type=int, default=1, metavar="K", help="seeds of each point (default: 1)"
    )
    sub.add_argument(
        "--output-dir", default="runs", help="where the sweep's folder lies (default: runs)"
    )
    sub.add_argument(
        "--recordings",
        metavar="DIR",
        help="where recordings lie, which several sweeps may share (default: in the folder)",
    )
    sub.add_argument(
        "--delete-histories",
        action="store_true",
        help="remove the history of a recording once all of its points are done",
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="list the points, tell what there is to do and how much disk it takes, and do nothing",
    )
    _add_allow(sub, _ALLOW)
    sub.add_argument("--no-progress", action="store_true", help="no progress bars")
    sub.add_argument("--debug", action="store_true", help="show where an error comes from")


def _add_plot(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "draw the results of a sweep, or the costs of the clients of a run"
    sub = commands.add_parser("plot", help=about, description=f"{about.capitalize()}.")
    sub.add_argument("target", metavar="PATH", help="folder of a sweep, its results.csv, or a run")
    sub.add_argument(
        "--kind",
        choices=("values", "cost", "cp"),
        help="values: figures against a swept key (default); cost: a figure against what clients "
        "spend; cp: how CP is distributed over clients (default of a run)",
    )
    sub.add_argument("--x", metavar="KEY", help="swept key along the axis (default: the first)")
    sub.add_argument(
        "--y",
        metavar="FIGURES",
        help="columns, such as ter,asr,acp (default: these three; of cost: ter)",
    )
    sub.add_argument(
        "--by", metavar="KEY", default="method", help="what colours tell apart (default: method)"
    )
    sub.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="key=value,value",
        help="draw only rows with these values; repeatable",
    )
    sub.add_argument("-o", "--output", metavar="FILE", help="picture to write: .png, .svg or .pdf")
    sub.add_argument("--debug", action="store_true", help="show where an error comes from")


def _add_listing(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, about in _LISTING.items():
        sub = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if name == "ls":
            families = (
                "attacks, aggregators, detectors, recoverers, data, partitioners, models, ..."
            )
            sub.add_argument("target", nargs="?", metavar="FAMILY", help=f"{families} (all)")
        else:
            sub.add_argument("target", metavar="NAME", help="class name, such as TrimmedMean")
        sub.add_argument("--json", action="store_true", help="print JSON")
        _add_allow(sub, "add the classes of this module or package of yours; repeatable")
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")


def _add_history(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = f"look into a history, and after it: {', '.join(_HISTORY)}"
    history = commands.add_parser("history", help=about, description=f"{about.capitalize()}.")
    actions = history.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, does in _HISTORY.items():
        sub = actions.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        if name == "import":
            sub.add_argument("folder", metavar="FOLDER", help="what `export` wrote")
            sub.add_argument("target", metavar="PATH", help="history to make")
            sub.add_argument("--codec", help="how to store updates (default: as they were)")
            sub.add_argument("--key-file", metavar="FILE", help="master key to encrypt it with")
        elif name == "new-key":
            sub.add_argument("target", metavar="PATH", help="file to make")
        else:
            sub.add_argument("target", metavar="PATH", help="history, or the run folder it lies in")
            sub.add_argument(
                "--key-file",
                metavar="FILE",
                help="master key of an encrypted history (default: that in FEDREC_HISTORY_KEY)",
            )
        if name == "forget":
            sub.add_argument(
                "--client",
                action="append",
                required=True,
                metavar="ID",
                help="client to forget; repeatable",
            )
        if name == "browse":
            some = "such as 7, 0,10,20, 100:200:10 or -1 for the last (default: all, or some)"
            sub.add_argument("--rounds", metavar="ROUNDS", help=some)
            sub.add_argument("--clients", metavar="ID,ID", help="(default: all, or some)")
            sub.add_argument("-o", "--output", metavar="FILE", help="page (.html) to write instead")
        if name == "export":
            sub.add_argument("folder", metavar="FOLDER", help="folder to make")
        _add_allow(
            sub, "import this module of yours, which registers the history's codec; repeatable"
        )
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument("--no-progress", action="store_true", help="no progress bar")
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")


@contextmanager
def _log_to_terminal() -> Iterator[None]:
    """Write fedrec's log to standard error until exit; then restore the logger's settings."""
    logger, handler = logging.getLogger("fedrec"), _Terminal()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Terminal(logging.Handler):
    """Writes log records as plain lines to standard error; warnings start with "Warning"."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "Warning: " if record.levelno >= logging.WARNING else ""
        sys.stderr.write(f"{prefix}{record.getMessage()}\n")
