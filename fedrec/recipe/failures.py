"""What is said, and kept, of a method or a point that failed while others go on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, FedrecError, MethodsFailedError

__all__ = ["keep_failure", "raise_failures", "reason_of"]


def reason_of(error: BaseException) -> str:
    """Return what an error says; its name, if it says nothing.

    Args:
        error: The error.

    Examples:
        >>> reason_of(ValueError("by nothing")), reason_of(ValueError())
        ('by nothing', 'ValueError')
    """
    return str(error).strip() or type(error).__name__


def keep_failure(error: Exception, file: Path, shown: str | Path) -> str:
    """Return why something failed; of a component's own fault, keep the traceback.

    Args:
        error: The error.
        file: Where the traceback goes.
        shown: How to name that file.
    """
    if isinstance(error, FedrecError):
        return reason_of(error)
    write_atomically(file, "".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {reason_of(error)} (traceback in {shown})"


def raise_failures(failures: Mapping[str, Exception], files: Mapping[str, Path]) -> None:
    """Raise if methods failed; a recipe that none of its methods can work with is wrong.

    Args:
        failures: The errors, by the method's label.
        files: Where the traceback of each method goes, failed or not.

    Raises:
        ConfigurationError: The first error, if all methods failed with one of these.
        MethodsFailedError: If some methods failed.
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
