"""The folder in which data sets look for their files."""

from __future__ import annotations

import os
from pathlib import Path

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["check_root", "data_root"]


def check_root(root: object) -> None:
    """Raise `ConfigurationError` if `root` is neither a path nor `None`."""
    if not isinstance(root, str | os.PathLike | None):
        raise ConfigurationError(expected("root", "a path or None", root))


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Return `root`; if it is `None`, the folder that FEDREC_DATA names, or else `data`."""
    return Path(root or os.environ.get("FEDREC_DATA") or "data")
