"""Keep what dependencies have to say off the terminal, while a command runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]

# Tips, "GPU available: False" and the like are information and warnings of these loggers.
_LOGGERS = ("pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "torch")

_PACKAGES = "torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|lightning_utilities"


@contextmanager
def quiet() -> Iterator[None]:
    """Filter warnings and log records of torch and Lightning; ours and errors get through.

    Everything is as before afterwards.
    """
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({_PACKAGES})(\..*)?$")
        import pytorch_lightning  # noqa: F401 - it sets the levels of its loggers when imported

        loggers = [logging.getLogger(name) for name in _LOGGERS]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
