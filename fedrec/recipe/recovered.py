"""The recovered models of a run folder, and how to load them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.schema import Recipe, folder_name, label_of

__all__ = ["lines_to_load"]


def lines_to_load(recipe: Recipe, folder: Path) -> list[str]:
    """Return lines that say where the recovered models are, and what loads the first one.

    Args:
        recipe: The recipe that was run.
        folder: The run folder.

    Returns:
        A sentence and a line of Python; nothing if there is no recovered model.
    """
    labels = [str(label_of(node)) for node in recipe.config.get("recoverers") or []]
    paths = [folder / "recover" / folder_name(label) / "model.ckpt" for label in labels]
    paths = [path for path in paths if path.exists()]
    if not paths:
        return []
    node: Any = recipe.config["model"]
    name = node if isinstance(node, str) else str(node["class_path"])
    given = {} if isinstance(node, str) else dict(node.get("init_args") or {})
    cls = ClassFinder(recipe.allow).find(name, [pl.LightningModule])
    module = "fedrec.models" if cls.__module__.startswith("fedrec.models.") else cls.__module__
    arguments = [repr(str(paths[0]))]
    try:
        checkpoint = torch.load(paths[0], weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # the module itself put something else into it
        checkpoint = {}
        arguments.append("weights_only=False")
    # Arguments that the module does not keep as hyper-parameters have to be given again.
    stored = checkpoint.get("hyper_parameters", {})
    arguments += [f"{key}={value!r}" for key, value in given.items() if key not in stored]
    if len(paths) == 1:
        where = f"The recovered model is {paths[0]}. To load it:"
    else:
        where = f"The recovered models are {folder / 'recover' / '*' / 'model.ckpt'}. To load one:"
    load = f"{cls.__name__}.load_from_checkpoint({', '.join(arguments)})"
    return [where, f"    from {module} import {cls.__name__}; model = {load}"]
