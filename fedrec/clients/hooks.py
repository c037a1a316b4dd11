"""Which of Lightning's hooks local training calls, and what it does about the others."""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import lru_cache
from typing import Any

from torch import nn

from fedrec.exceptions import ConfigurationError, FedrecWarning

__all__ = [
    "CALLED",
    "CALLED_ONCE",
    "DATAMODULE_HOOKS",
    "MODULE_HOOKS",
    "NOT_CALLED",
    "REFUSED",
    "WARNED",
    "call",
    "check_datamodule",
    "check_hooks",
    "is_overridden",
    "lightning_class",
    "lightning_optimizer",
    "needs_sequential",
    "package_of",
    "run",
    "unwrapped",
]

CALLED = "called"
CALLED_ONCE = "called once, when the federation is made"
NOT_CALLED = "not called"
WARNED = "not called, with a warning"
REFUSED = "refused"

# Every hook of a LightningModule, and what local training does with a module's own version of it.
MODULE_HOOKS: dict[str, str] = {
    "prepare_data": CALLED_ONCE,
    "setup": CALLED_ONCE,
    "configure_model": CALLED_ONCE,
    "configure_optimizers": CALLED,
    "on_fit_start": CALLED,
    "on_train_start": CALLED,
    "on_train_epoch_start": CALLED,
    "on_before_batch_transfer": CALLED,
    "transfer_batch_to_device": CALLED,
    "on_after_batch_transfer": CALLED,
    "on_train_batch_start": CALLED,
    "optimizer_step": CALLED,
    "training_step": CALLED,
    "forward": CALLED,
    "on_before_zero_grad": CALLED,
    "optimizer_zero_grad": CALLED,
    "on_before_backward": CALLED,
    "backward": CALLED,
    "on_after_backward": CALLED,
    "on_before_optimizer_step": CALLED,
    "configure_gradient_clipping": CALLED,
    "lr_scheduler_step": CALLED,
    "on_train_batch_end": CALLED,
    "on_train_epoch_end": CALLED,
    "on_train_end": CALLED,
    "on_fit_end": CALLED,
    "on_save_checkpoint": CALLED,
    "on_load_checkpoint": CALLED,
    "teardown": WARNED,
    "train_dataloader": WARNED,
    "val_dataloader": WARNED,
    "test_dataloader": WARNED,
    "predict_dataloader": WARNED,
    "configure_callbacks": REFUSED,
    "configure_sharded_model": REFUSED,
    **{
        name: NOT_CALLED
        for stage in ("validation", "test", "predict")
        for name in (
            f"{stage}_step",
            f"on_{stage}_start",
            f"on_{stage}_end",
            f"on_{stage}_epoch_start",
            f"on_{stage}_epoch_end",
            f"on_{stage}_batch_start",
            f"on_{stage}_batch_end",
            f"on_{stage}_model_eval",
        )
    },
    "on_validation_model_zero_grad": NOT_CALLED,
    "on_validation_model_train": NOT_CALLED,
    "on_test_model_train": NOT_CALLED,
}

# The same for a LightningDataModule whose data are split over clients.
DATAMODULE_HOOKS: dict[str, str] = {
    "prepare_data": CALLED,
    "setup": CALLED,
    "train_dataloader": CALLED,
    "test_dataloader": CALLED,
    "val_dataloader": CALLED,
    "on_before_batch_transfer": REFUSED,
    "transfer_batch_to_device": REFUSED,
    "on_after_batch_transfer": REFUSED,
    "predict_dataloader": NOT_CALLED,
    "teardown": NOT_CALLED,
    "on_exception": NOT_CALLED,
    "state_dict": NOT_CALLED,
    "load_state_dict": NOT_CALLED,
}

_INSTEAD = {
    "configure_callbacks": "do what the callbacks do in hooks of the module, and leave it out.",
    "configure_sharded_model": "name it `configure_model`.",
}
# Hooks that every executor calls, also where it trains many clients at once.
_EVERYWHERE = (
    "configure_optimizers",
    "training_step",
    "forward",
    "on_save_checkpoint",
    "on_load_checkpoint",
)


def lightning_class(value: object, name: str = "LightningModule") -> type | None:
    """Return Lightning's class of that name that the object is of, or `None`.

    It is the class of `pytorch_lightning` or of `lightning.pytorch`.
    """
    kind: Any = type(value)
    return _lightning_base(kind, name)


@lru_cache
def _lightning_base(kind: type, name: str) -> type | None:
    roots = ("pytorch_lightning.core.", "lightning.pytorch.core.")
    for base in kind.__mro__:
        if base.__name__ == name and base.__module__.startswith(roots):
            return base
    return None


def unwrapped(module: Any) -> Any:
    """Return the LightningModule inside a compiled one, as Lightning does; others as they are."""
    inner = getattr(module, "_modules", {}).get("_orig_mod")
    if inner is None or lightning_class(inner) is None:
        return module
    if inner._compiler_ctx is None:
        package = package_of(inner)
        importlib.import_module(f"{package}.utilities.compile").from_compiled(module)
    return inner


def package_of(module: nn.Module) -> str:
    """Return `"pytorch_lightning"` or `"lightning.pytorch"`: whichever the module derives from."""
    base = lightning_class(module)
    return "pytorch_lightning" if base is None else base.__module__.partition(".core.")[0]


def lightning_optimizer(module: nn.Module) -> Any:
    """Return the `LightningOptimizer` of the package that the module derives from."""
    return importlib.import_module(f"{package_of(module)}.core.optimizer").LightningOptimizer


def is_overridden(module: Any, name: str, base: str = "LightningModule") -> bool:
    """Whether a module, or its class, has its own version of a method of Lightning's class."""
    own = getattr(type(module), name, None)
    parent = lightning_class(module, base)
    inherited = None if parent is None else getattr(parent, name, None)
    return own is not inherited or name in vars(module)


def call(module: Any, name: str, *args: Any) -> Any:
    """Call a hook if the module overrides it; Lightning's own version would do nothing."""
    return run(module, name, *args) if is_overridden(module, name) else None


def run(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook, and note its name on the module, so that `self.log` knows where it is called."""
    state = vars(module)
    before = state.get("_current_fx_name")
    state["_current_fx_name"] = name
    try:
        return getattr(module, name)(*args, **kwargs)
    finally:
        state["_current_fx_name"] = before


def check_hooks(module: nn.Module) -> None:
    """Refuse, or warn of, hooks that the module overrides and local training does not call.

    Raises:
        ConfigurationError: If the module overrides a hook that is refused, or its `training_step`
            takes `dataloader_iter`.
    """
    name = type(module).__name__
    overridden = {hook: how for hook, how in MODULE_HOOKS.items() if is_overridden(module, hook)}
    step: Any = type(module)
    if "dataloader_iter" in inspect.signature(step.training_step).parameters:
        raise ConfigurationError(
            f"{name}.training_step takes `dataloader_iter`, but local training has no loader. "
            "HINT: let it take `batch` and `batch_idx`."
        )
    for hook, how in overridden.items():
        if how == REFUSED:
            raise ConfigurationError(
                f"{name} overrides `{hook}`, which local training does not call. "
                f"HINT: {_INSTEAD[hook]}"
            )
    ignored = [f"`{hook}`" for hook, how in overridden.items() if how == WARNED]
    if ignored:
        warnings.warn(
            f"Local training does not call {', '.join(ignored)} of {name}: data come from the "
            "clients and the federation, and a module is set up once for all rounds.",
            FedrecWarning,
            stacklevel=3,
        )


def check_datamodule(datamodule: object) -> None:
    """Refuse a data module that changes batches: clients make their own batches.

    Raises:
        ConfigurationError: If it overrides a hook that changes batches.
    """
    for hook, how in DATAMODULE_HOOKS.items():
        if how == REFUSED and is_overridden(datamodule, hook, "LightningDataModule"):
            raise ConfigurationError(
                f"{type(datamodule).__name__} overrides `{hook}`, but clients train on its data "
                "sets, not on its batches. HINT: override it in the LightningModule."
            )


def needs_sequential(module: Any) -> str | None:
    """Return why clients with this module can only be trained one by one, or `None`.

    Training many clients at once leaves out hooks that run between the batches of one client.
    """
    name = type(module).__name__
    for hook, how in MODULE_HOOKS.items():
        if how == CALLED and hook not in _EVERYWHERE and is_overridden(module, hook):
            return f"{name} overrides `{hook}`"
    if not getattr(module, "automatic_optimization", True):
        return f"{name} uses manual optimization"
    if vars(module).get("_compiler_ctx") is not None:
        return f"{name} is compiled"
    return None
