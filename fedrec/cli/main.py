"""The `fedrec` command: messages and exit codes. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import click

from fedrec.cli.output import error_as_json, write_json
from fedrec.cli.parser import Options, command_line
from fedrec.exceptions import FedrecError, MethodsFailedError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fedrec` command.

    Args:
        argv: Arguments without the program's name; by default the process's arguments.

    Returns:
        The exit code: 0; 1 if a history is damaged, or a method or a point of a sweep failed; 2 for
        a mistake of the user's; 130 after an interrupt; 143 after a SIGTERM that ended a run.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int = command_line(_call).main(words, prog_name="fedrec", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:  # what becomes of Ctrl-C
        code = 128 + signal.SIGINT
    except SystemExit as end:
        if end.code != 128 + signal.SIGTERM:
            raise
        code = end.code
    else:
        return code
    again = shlex.join(["fedrec", *(word for word in words if word != "--overwrite")])
    sys.stderr.write(f"Stopped. What is done is kept; go on with:\n  {again}\n")
    return code


def _call(options: Options) -> int:
    """Run a command; show an error as the user is to see it, and return the exit code."""
    try:
        if options.command == "history":
            from fedrec.cli.history import execute

            return execute(options)
        if options.command == "doctor":
            from fedrec.cli import doctor

            return doctor.execute(options)
        # Before torch is imported, which reads it. Its idle threads else keep computing for nothing
        # the core that a thread of numba needs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if getattr(options, "allow", None):
            sys.path.insert(0, os.getcwd())  # noqa: PTH109 - modules that lie here can be allowed
        with _log_to_terminal(options):
            return _execute(options)
    except FedrecError as error:
        if options.debug:
            raise
        failed = isinstance(error, MethodsFailedError)
        if getattr(options, "json", False) and not failed:  # those results are written already
            write_json(error_as_json(error))
        sys.stderr.write(f"Error: {error}\n")
        return 1 if failed else 2


def _execute(options: Options) -> int:
    if options.command in ("new", "cp") or vars(options).get("target") == "recipes":
        from fedrec.cli.starting import STARTING

        STARTING[options.command](options)
        return 0
    from fedrec.cli.quiet import quiet

    with nullcontext() if options.verbose else quiet():
        from fedrec.cli.commands import COMMANDS

        return COMMANDS[options.command](options) or 0


@contextmanager
def _log_to_terminal(options: Options) -> Iterator[None]:
    """Write fedrec's log to standard error until exit; then restore the logger's settings."""
    logger, handler = logging.getLogger("fedrec"), _Terminal()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if options.quiet else logging.INFO)
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
