"""Preparing a module once, when the federation is made: checks, setup hooks, lazy layers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from fedrec.clients.hooks import call, check_hooks, lightning_class
from fedrec.clients.lightning import LightningClient
from fedrec.clients.step import output_of
from fedrec.clients.trainer import LocalTrainer, warn_of_unknown_attributes
from fedrec.exceptions import ConfigurationError

__all__ = ["prepare"]


def prepare(module: Any, client: LightningClient | None = None) -> None:
    """Check the module, let it set itself up, and give lazy layers their shapes.

    Args:
        module: A LightningModule; a module of any other class is left alone.
        client: A client that trains the module, or `None` if none does.

    Raises:
        ConfigurationError: If local training cannot do what the module relies on.
    """
    if lightning_class(module) is None:
        return
    trainer = LocalTrainer(module)
    if client is not None:
        check_hooks(module)
        warn_of_unknown_attributes(module)
        trainer = client.local_trainer(module)
    with trainer.attached(), trainer._before_data():
        call(module, "prepare_data")
        call(module, "setup", "fit")
        call(module, "configure_model")
    if client is not None and any(is_lazy(tensor) for tensor in _tensors(module).values()):
        _materialize(module, client)


def _tensors(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _materialize(module: Any, client: LightningClient) -> None:
    """Run a copy of the module on a batch, and give the lazy layers the shapes of the copy's."""
    make: Any = UninitializedBuffer
    lazy = [b for b in module.buffers() if is_lazy(b)]
    # `deepcopy` cannot copy lazy buffers, and takes those of the memo.
    memo = {id(b): make(device=b.device, dtype=b.dtype) for b in lazy}
    copied = copy.deepcopy(module, memo).eval()
    size = min(client.batch_size or client.num_samples, client.num_samples)
    with client.local_trainer(copied).attached(), torch.no_grad():
        batch = client.batch(copied, np.arange(size), torch.device("cpu"))
        try:
            output_of(copied, batch, 0)
        except Exception as error:
            raise ConfigurationError(
                f"The lazy layers of {type(module).__name__} have no shapes yet, and its "
                f"`training_step` fails on a batch ({type(error).__name__}: {error}). HINT: call "
                "the module once on a batch before you hand it over."
            ) from error
    made = _tensors(copied)
    with torch.no_grad():
        for name, tensor in _tensors(module).items():
            if is_lazy(tensor):
                if is_lazy(made[name]):
                    raise ConfigurationError(
                        f"`{name}` of {type(module).__name__} is lazy, and `training_step` does "
                        "not use it. HINT: remove its layer, or give it a size."
                    )
                tensor.materialize(made[name].shape)
                tensor.copy_(made[name])
    for layer, materialized in zip(module.modules(), copied.modules(), strict=True):
        if type(layer) is not type(materialized):
            _finish_lazy(layer, materialized)


def _finish_lazy(layer: Any, materialized: nn.Module) -> None:
    """Turn a lazy layer whose tensors have their shapes into a layer of the final class."""
    layer._initialize_hook.remove()
    layer._load_hook.remove()
    del layer._initialize_hook, layer._load_hook
    mode = layer.training
    layer.__class__ = type(materialized)
    plain = (bool, int, float, str, tuple)  # sizes, as `in_features`
    vars(layer).update({k: v for k, v in vars(materialized).items() if isinstance(v, plain)})
    layer.training = mode
