"""Repairing a run folder some of whose files were deleted, from the files that are left."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError
from fedrec.loop.checkpoint import finished_state, lightning_checkpoint
from fedrec.metrics import CostLedger
from fedrec.parameters import ParameterVector
from fedrec.recipe.folder import RunFolder
from fedrec.recipe.results import excluded_clients, recovery_spec
from fedrec.recipe.schema import Recipe, build_parts, label_of

__all__ = ["history_is_gone", "repair"]

_log = logging.getLogger(__name__)

_FILES = ("ledger.csv", "model.ckpt")


def history_is_gone(folder: RunFolder) -> ConfigurationError:
    """Return the error of a run that has work left, but whose recording lost its history.

    The recording is not made again unasked: recoveries that took hours would have to be, too.

    Args:
        folder: The run folder.
    """
    history = folder.path / "history"
    return ConfigurationError(
        f"The history of the finished recording in `{folder.path}` is gone, and what is left to do "
        f"needs it; nothing was changed. HINT: bring `{history}` back, or record again: `fedrec "
        "run` does so with `name=another-name` in a folder of its own, and with `--overwrite` in "
        "this one, where finished recoveries are then made again, too."
    )


def repair(folder: RunFolder, recipe: Recipe) -> None:
    """Make the deleted files of finished recoveries again, from the recoveries' checkpoints.

    A recovery without a checkpoint is marked as not finished, so that it is made again, if the
    history is there.

    Args:
        folder: The run folder.
        recipe: The run's recipe.
    """
    config = recipe.config
    exclude = excluded_clients(folder, config)
    if exclude is None:
        return
    for i, node in enumerate(config.get("recoverers") or []):
        label, spec = str(label_of(node)), recovery_spec(config, i, exclude)
        file = folder.recovery_file(label)
        where = (folder.path / file).parent
        lost = [name for name in _FILES if not (where / name).exists()]
        if not lost or folder.result(file, spec) is None:
            continue
        checkpoint, names = folder.path / folder.weights_file(label), " and ".join(lost)
        state = finished_state(checkpoint)
        if state is not None:
            _make(lost, where, state, recipe)
            _log.info("%s: %s missing, made again from the checkpoint.", label, names)
        elif (folder.path / "history").exists():
            _log.warning("%s: %s missing, without a checkpoint to make that from.", label, names)
            folder.write(file, {"spec": spec})
        else:
            _log.warning(
                "%s: %s missing in `%s`, with neither checkpoint nor history to make that from; "
                "its results are kept. HINT: bring one of the three back, or run the recipe with "
                "`name=another-name`.",
                label,
                names,
                where,
            )


def _make(names: Collection[str], where: Path, state: Any, recipe: Recipe) -> None:
    if "ledger.csv" in names:
        ledger = CostLedger(state["ledger"]["num_rounds"])
        ledger.load_state_dict(state["ledger"])
        ledger.to_csv(where / "ledger.csv")
    if "model.ckpt" in names:
        model = build_parts(recipe).model
        layout = ParameterVector(model)
        layout.load(model, state["weights"])
        if state["buffers"] is not None:
            layout.select_buffers(model, state["buffer_spec"])
            layout.load_buffers(model, state["buffers"])
        content = lightning_checkpoint(model, state["identity"]["max_rounds"])
        write_atomically(where / "model.ckpt", content)
