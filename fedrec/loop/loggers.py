"""What loggers need besides numbers: files of a run for W&B and MLflow, a beginning and an end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["end_runs", "log_file", "prepare"]


def prepare(loggers: Iterable[Any]) -> None:
    """Keep a warning off the terminal: W&B warns of an argument that Lightning always passes."""
    for logger in loggers:
        arguments = getattr(logger, "_wandb_init", {})
        if arguments.get("anonymous", ...) is None:
            del arguments["anonymous"]


def log_file(loggers: Iterable[Any], path: Path, name: str) -> None:
    """Hand a file to every logger that keeps files; others are left out.

    Args:
        loggers: Lightning loggers.
        path: The file.
        name: What it is called there, such as `recover/FedRecover/ledger.csv`.
    """
    for logger in loggers:
        if _is(logger, "MLFlowLogger"):
            folder = str(PurePosixPath(name).parent)
            logger.experiment.log_artifact(
                logger.run_id, str(path), None if folder == "." else folder
            )
        elif _is(logger, "WandbLogger"):
            kind = "model" if path.suffix == ".ckpt" else "result"
            # Names of W&B's artifacts have no slashes, spaces or commas.
            plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-")
            logger.experiment.log_artifact(str(path), name=plain, type=kind)


def end_runs(loggers: Iterable[Any]) -> None:
    """End the runs of loggers that would give a run that is going on to the next logger, too."""
    for logger in loggers:
        if _is(logger, "WandbLogger"):
            logger.experiment.finish()


def _is(logger: Any, name: str) -> bool:
    # By name: `lightning.pytorch` has classes of its own, and none of them is imported for this.
    return any(cls.__name__ == name for cls in type(logger).__mro__)
