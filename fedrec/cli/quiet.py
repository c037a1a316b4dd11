"""Keeping log records and warnings of dependencies off the terminal, while a command runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]

# Loggers of tips, "GPU available: False" and the like.
_LOGGERS = ("pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "torch")

_PACKAGES = "torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|lightning_utilities"


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings and log records of torch and Lightning until exit, except errors."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({_PACKAGES})(\..*)?$")
        # Imported now, as it sets the levels of its loggers when it is imported.
        import pytorch_lightning  # noqa: F401

        loggers = [logging.getLogger(name) for name in _LOGGERS]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
