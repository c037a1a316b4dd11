"""Whether the model of a recipe fits its data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from fedrec.data import FederatedDataModule
from fedrec.exceptions import RecipeError, expected
from fedrec.recipe.failures import reason_of

__all__ = ["check_fit"]


def check_fit(config: Mapping[str, Any], model: pl.LightningModule, data: Any) -> None:
    """Let a model predict two test samples, and compare its outputs with the data's classes.

    More outputs than classes are fine. The model is left as it was.

    Args:
        config: The resolved recipe, which says what the model was made with.
        model: The model.
        data: A `FederatedDataModule`, whose data are loaded.

    Raises:
        RecipeError: If the model cannot take the samples, gives no logits, or has fewer outputs
            than there are classes.
    """
    if not isinstance(data, FederatedDataModule):
        return
    inputs, name = data.test_dataset.tensors[0][:2], type(model).__name__
    shape = tuple(inputs.shape[1:])
    try:
        output = _predict(model, inputs)
    except Exception as error:
        fitting = {"in_features": inputs[0].numel()}
        if len(shape) == 3:
            fitting |= {"in_channels": shape[0], "image_size": shape[1]}
        given = _arguments(config, model)
        wrong = {k: v for k, v in fitting.items() if k in given and given[k] != v}
        reason = f"{name} cannot take samples of shape {shape} ({reason_of(error)})"
        hint = f"`{', '.join(f'model.init_args.{k}={v}' for k, v in wrong.items())}` fits."
        mistakes = [
            f"model.init_args.{key}: {expected(key, f'{fitting[key]} for these data', given[key])} "
            f"{reason}. HINT: {hint}"
            for key in wrong
        ]
        if not mistakes:
            hint = "choose a model, or arguments of it, that fit `data`."
            mistakes = [f"model: Expected a model that fits the data, but {reason}. HINT: {hint}"]
        raise RecipeError(mistakes) from error
    classes = data.num_classes
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(inputs):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise RecipeError(
            f"model: Expected `{name}.forward` to give logits of shape ({len(inputs)}, {classes}) "
            f"for {len(inputs)} samples, but got {found}."
        )
    if output.shape[1] < classes:
        has, wanted = output.shape[1], f"at least {classes}, the number of classes of the data"
        if "num_classes" in _arguments(config, model):
            hint = f"`model.init_args.num_classes={classes}` fits."
            text = expected("num_classes", wanted, has, hint=hint)
            raise RecipeError(f"model.init_args.num_classes: {text}")
        raise RecipeError(f"model: {expected(f'outputs of {name}', wanted, has)}")


def _predict(model: pl.LightningModule, inputs: Tensor) -> Any:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(inputs.to(model.device))
    finally:
        for module, mode in training:
            module.training = mode


def _arguments(config: Mapping[str, Any], model: pl.LightningModule) -> dict[str, Any]:
    """Return what the model was made with, its defaults included."""
    node = config["model"]
    given = (node.get("init_args") or {}) if isinstance(node, Mapping) else {}
    parameters = inspect.signature(type(model)).parameters
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}
