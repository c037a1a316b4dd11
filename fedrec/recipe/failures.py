"""Reporting methods of a run, or points of a sweep, that failed while the others went on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, FedrecError, FileWriteError, MethodsFailedError

__all__ = ["keep_failure", "raise_failures", "reason_of"]


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or the name of its class if it has no text.

    Args:
        error: The error.

    Examples:
        >>> reason_of(ValueError("by nothing")), reason_of(ValueError())
        ('by nothing', 'ValueError')
    """
    return str(error).strip() or type(error).__name__


def keep_failure(error: Exception, file: Path, shown: str | Path) -> str:
    """Return why a method or point failed; write the traceback of any error that is not fedrec's.

    Args:
        error: The error.
        file: The file to write the traceback to.
        shown: Path of that file to show to the user.
    """
    if isinstance(error, FedrecError):
        return reason_of(error)
    where = f"traceback in {shown}"
    try:
        write_atomically(file, "".join(traceback.format_exception(error)).encode())
    except FileWriteError as unwritten:  # what failed first is what counts
        where = f"without its traceback: {unwritten}"
    return f"{type(error).__name__}: {reason_of(error)} ({where})"


def raise_failures(failures: Mapping[str, Exception], files: Mapping[str, Path]) -> None:
    """Raise an error if methods failed.

    Args:
        failures: The errors, by the method's label.
        files: The file for the traceback, by the label of every method, failed or not.

    Raises:
        ConfigurationError: The first error, if all methods failed with a `ConfigurationError`: then
            the recipe is wrong.
        MethodsFailedError: If methods failed otherwise.
    """
    if not failures:
        return
    errors = list(failures.values())
    mistakes = all(isinstance(error, ConfigurationError) for error in errors)
    if mistakes and len(failures) == len(files):
        raise errors[0]
    reasons = {
        label: keep_failure(error, files[label], files[label]) for label, error in failures.items()
    }
    raise MethodsFailedError(reasons) from errors[0]
