"""Keeping log records and warnings of dependencies off the terminal, while a command runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]

# Loggers of tips, "GPU available: False" and the like.
_LOGGERS = ("pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities", "torch")

_PACKAGES = (
    "torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|lightning_utilities|"
    "tensorboard|wandb|mlflow"
)

# What loggers read when they are imported: no chat on the terminal, no reports to their makers.
_ENVIRONMENT = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings and log records of torch, Lightning and loggers until exit, except errors.

    What the user has set in the environment counts.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
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
