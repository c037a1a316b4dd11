"""Compiled loops for the codecs, where the process has a compiler."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from types import ModuleType

__all__ = ["compiled"]


def compiled() -> ModuleType | None:
    """Return the compiled loops, or `None` where NumPy has to do.

    They give the same bits. numba takes a second to import: it is not loaded for a history, but
    used if a loop has loaded it to compute with (the `speed` extra, and a model that is worth it).
    """
    return _load() if "fedrec.functional.kernels._numba_estimates" in sys.modules else None


@lru_cache(maxsize=1)
def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("fedrec.history.codecs._numba_codecs")
        module._compiled()
    except Exception:  # noqa: BLE001  # a compiler may raise anything; NumPy does the same
        return None
    return module
