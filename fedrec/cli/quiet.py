"""Keep what dependencies have to say off the terminal, in the command only."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet"]

# Tips, "GPU available: False" and the like are information and warnings of these loggers.
_LOGGERS = ("pytorch_lightning", "lightning", "lightning.pytorch", "lightning.fabric", "torch")
_LOGGERS_FABRIC = ("lightning_fabric", "lightning_utilities")

_PACKAGES = "torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|lightning_utilities"


def quiet() -> None:
    """Filter warnings and log records of torch and Lightning; ours still get through."""
    for name in (*_LOGGERS, *_LOGGERS_FABRIC):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=rf"({_PACKAGES})(\..*)?$")
