"""Checking that the model of a recipe fits its data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedrec.attacks.base import Attack
from fedrec.clients.generators import generators_restored
from fedrec.data import FederatedDataModule
from fedrec.exceptions import RecipeError, expected
from fedrec.recipe.failures import reason_of
from fedrec.recipe.schema import Recipe, build_parts

__all__ = ["check_fit"]


def check_fit(recipe: Recipe, data: FederatedDataModule) -> None:
    """Let a recipe's model predict two test samples, and compare its outputs with the classes.

    More outputs than classes are fine. The model is built for this check alone, since predicting
    may change a model's state. Random number generators are left as they are.

    Args:
        recipe: A recipe from `load_recipe`.
        data: The recipe's data; this check loads them.

    Raises:
        RecipeError: If the model cannot take the samples, gives no logits, or has fewer outputs
            than there are classes.
    """
    with generators_restored(torch.device("cpu")), torch.no_grad():
        parts = build_parts(recipe)
        model = parts.model.eval()
        # Test samples, as the test takes them: the two data sets may transform samples differently.
        dataset = data.train_dataset if data.test_dataset is None else data.test_dataset
        samples = [dataset[i] for i in range(min(2, len(dataset)))]
        inputs = default_collate(samples)[0]
        try:
            output = model(inputs.to(model.device))
        except Exception as error:
            mistakes = _misfit(_arguments(recipe.config, model), type(model), inputs, error)
            raise RecipeError(mistakes) from error
    if not data.has_classes:  # outputs of any shape may be right
        return
    name, classes = type(model).__name__, data.num_classes
    one_logit = isinstance(output, Tensor) and tuple(output.shape) in (
        (len(inputs),),
        (len(inputs), 1),
    )
    if one_logit and classes <= 2:
        _check_target(parts.attack, 2)
        return
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(inputs):
        form = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise RecipeError(
            f"model: Expected `{name}.forward` to give logits of shape ({len(inputs)}, {classes}) "
            f"for {len(inputs)} samples, but got {form}."
        )
    outputs = output.shape[1]
    if outputs < classes:
        requirement = f"at least {classes}, the number of classes of the data"
        if "num_classes" in _arguments(recipe.config, model):
            hint = f"`model.init_args.num_classes={classes}` fits."
            text = expected("num_classes", requirement, outputs, hint=hint)
            raise RecipeError(f"model.init_args.num_classes: {text}")
        raise RecipeError(f"model: {expected(f'outputs of {name}', requirement, outputs)}")
    _check_target(parts.attack, outputs)


def _check_target(attack: Attack | None, num_outputs: int) -> None:
    """Refuse an attack that aims at a label that the model cannot predict."""
    label = None if attack is None else attack.target_label
    if label is not None and label >= num_outputs:
        requirement = f"below {num_outputs}, the number of classes that the model predicts"
        raise RecipeError(f"attack: {expected('target_label', requirement, label)}")


def _misfit(given: Mapping[str, Any], model: type, inputs: Tensor, error: Exception) -> list[str]:
    """Return a mistake for every argument of a model that does not fit the data.

    If no argument is known to be wrong, it is one mistake about the model.

    Args:
        given: The model's arguments, by name.
        model: The model's class.
        inputs: The inputs that the model failed on.
        error: The error that it raised.
    """
    shape = tuple(inputs.shape[1:])
    fitting = {"in_features": inputs[0].numel()}
    if len(shape) == 3:
        fitting |= {"in_channels": shape[0], "image_size": shape[1]}
    wrong = {k: v for k, v in fitting.items() if k in given and given[k] != v}
    reason = f"{model.__name__} cannot take samples of shape {shape} ({reason_of(error)})"
    if not wrong:
        hint = "choose a model, or arguments of it, that fit `data`."
        return [f"model: Expected a model that fits the data, but {reason}. HINT: {hint}"]
    hint = f"`{', '.join(f'model.init_args.{k}={v}' for k, v in wrong.items())}` fits."
    return [
        f"model.init_args.{key}: {expected(key, f'{value} for these data', given[key])} "
        f"{reason}. HINT: {hint}"
        for key, value in wrong.items()
    ]


def _arguments(config: Mapping[str, Any], model: pl.LightningModule) -> dict[str, Any]:
    """Return the model's arguments by name, with its class's defaults for those not given."""
    node = config["model"]
    given = (node.get("init_args") or {}) if isinstance(node, Mapping) else {}
    parameters = inspect.signature(type(model)).parameters
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}
