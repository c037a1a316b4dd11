"""Calling a module's `training_step`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from fedrec.exceptions import ConfigurationError

__all__ = ["loss_of", "output_of", "training_step"]


def training_step(module: Any, batch: Any, step: int) -> Tensor | None:
    """Call the module's `training_step` and return its loss; `None` means to skip the step."""
    return loss_of(output_of(module, batch, step), module)


def output_of(module: Any, batch: Any, step: int) -> Any:
    """Return the output of the module's `training_step`, called with the index if it takes one."""
    positional = _number_of_arguments(type(module).training_step)
    return module.training_step(batch, step) if positional > 1 else module.training_step(batch)


def loss_of(output: Any, module: nn.Module) -> Tensor | None:
    """Return the loss in the output of a `training_step`; `None` means to skip the step."""
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    # Of a scalar, no more is asked: what watches a pass takes as long for a call as a layer does.
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = "a dict without one" if isinstance(output, Mapping) and loss is None else None
        raise ConfigurationError(
            f"Expected {type(module).__name__}.training_step to return a scalar loss tensor, a "
            f"dict with one under 'loss', or None, but got {what or type(output).__name__}. "
            "HINT: return the mean over the batch."
        )
    return loss.reshape(())


@lru_cache
def _number_of_arguments(method: Any) -> float:
    """Count the positional arguments of a method after `self`."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return math.inf
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return sum(kind not in keyword for kind in kinds) - 1
