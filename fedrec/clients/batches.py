"""Which samples a client trains on in a round, and how they become batches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fedrec.exceptions import ConfigurationError, FedrecError, expected
from fedrec.random import reused_generator

__all__ = [
    "CollateFn",
    "batch_indices",
    "check_map_style",
    "collate_name",
    "failures_explained",
    "form_of",
    "is_plain",
    "num_batches",
    "take",
]

CollateFn = Callable[[list[Any]], Any]


def batch_indices(
    *,
    seed: int,
    round: int,
    client_id: str,
    num_samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None,
    drop_last: bool = False,
    purpose: str = "batch",
) -> list[np.ndarray]:
    """Draw the mini-batches of one client in one round, without replacement within an epoch.

    Args:
        seed: Seed of the recording.
        round: Round $t$.
        client_id: Name of the client.
        num_samples: Size of the data set that batches are drawn from.
        batch_size: Samples per batch; `None`, or at least `num_samples`, for the full batch, which
            needs no randomness.
        local_steps: Batches to draw; `None` where `local_epochs` is given.
        local_epochs: Passes over the data; `None` where `local_steps` is given. The last batch of a
            pass may be smaller.
        drop_last: Leave the last batch of a pass out if it is smaller.
        purpose: Name of the random stream: each name gives its own batches.

    Returns:
        One array of indices per local step.
    """
    size = num_samples if batch_size is None else min(batch_size, num_samples)
    if size == num_samples:
        steps = local_steps if local_steps is not None else local_epochs
        return [np.arange(num_samples)] * (steps or 0)
    generator = reused_generator(seed, purpose, round, client_id)
    if local_epochs is not None:
        end = num_samples - num_samples % size if drop_last else num_samples
        return [
            order[i : i + size]
            for order in (generator.permutation(num_samples) for _ in range(local_epochs))
            for i in range(0, end, size)
        ]
    batches: list[np.ndarray] = []
    order = generator.permutation(num_samples)
    start = 0
    for _ in range(local_steps or 0):
        if start + size > num_samples:
            order, start = generator.permutation(num_samples), 0
        batches.append(order[start : start + size])
        start += size
    return batches


def num_batches(
    *,
    num_samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None,
    drop_last: bool,
) -> int:
    """Return how many batches `batch_indices` draws for the same arguments."""
    if local_epochs is None:
        return local_steps or 1
    size = num_samples if batch_size is None else min(batch_size, num_samples)
    each = num_samples // size if drop_last else math.ceil(num_samples / size)
    return local_epochs * each


def is_plain(dataset: object, collate_fn: CollateFn | None) -> bool:
    """Whether a batch is rows of a `TensorDataset`'s tensors, without code of the user's."""
    # A subclass of `TensorDataset` may change samples in its `__getitem__`.
    return type(dataset) is TensorDataset and collate_fn in (None, default_collate)


def take(
    dataset: Dataset[Any],
    indices: np.ndarray,
    device: torch.device,
    collate_fn: CollateFn | None = None,
    owner: str = "the data set",
) -> Any:
    """Return the samples at some indices as a batch on the device, as a DataLoader would.

    Args:
        dataset: Map-style data set.
        indices: Indices of the samples.
        device: The device to move the batch to.
        collate_fn: Makes a batch of a list of samples; `None` for torch's `default_collate`.
        owner: Whose data set it is, to name in an error.

    Raises:
        ConfigurationError: If torch cannot make a batch of the samples.
    """
    if is_plain(dataset, collate_fn):
        index = torch.from_numpy(indices)
        tensors: Any = dataset.tensors  # type: ignore[attr-defined]
        return [t[index.to(t.device)].to(device) for t in tensors]
    samples = _fetch(dataset, indices.tolist())
    if collate_fn is not None:
        return move_data_to_device(collate_fn(samples), device)
    try:
        batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"Cannot put samples of {owner} into one batch: {_misfit(samples, indices)}. HINT: let "
            "a transform make them alike, or pass a `collate_fn=` that does (by padding, say)."
        ) from error
    return move_data_to_device(batch, device)


def _fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Read samples as a DataLoader does: all at once, where the data set can."""
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[i] for i in indices]


def _misfit(samples: Sequence[Any], indices: np.ndarray) -> str:
    """Say which sample has other types or shapes than the first sample."""
    first = form_of(samples[0])
    for sample, index in zip(samples, indices, strict=True):
        form = form_of(sample)
        if form != first:
            return f"sample {index} is {form}, and sample {indices[0]} is {first}"
    return f"sample {indices[0]} is {first}"


def form_of(value: Any) -> str:
    """Describe a sample, or a part of one, by its types and shapes."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {form_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(form_of, value[:8])) + (", ..." if len(value) > 8 else "")
        if isinstance(value, list):
            return f"[{inner}]"
        return f"{type(value).__name__ if hasattr(value, '_fields') else ''}({inner})"
    return type(value).__name__


# Parts of torch's messages about types.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|floating point type|(Input|input|output|result) type|not implemented for"
    r"|must be Tensor, not|must be tensors?, not"
)
# Parts of torch's messages about values and about shapes, each with the hint that helps.
_HINTS = {
    re.compile(r"out of bounds|index out of range in self|out of range in self"): (
        "labels have to be below the number of the model's outputs, and ids below the rows of its "
        "embedding."
    ),
    re.compile(
        r"shapes cannot be multiplied|Dimension out of range|target tensor expected"
        r"|size of tensor|size mismatch"
        r"|to have \d+ channels|[Ee]xpected (input|target) (batch_)?size|Given normalized_shape"
        r"|Expected \dD|is invalid for input of size|must be equal to (target|input) size"
        r"|different target size"
    ): "let the data set, or a transform, give the shapes that the model and its loss take.",
    re.compile("values to unpack"): (
        "let the data set, or a transform, give what the model takes apart: most often, inputs and "
        "a label."
    ),
}
# Attributes that only a logger has: reading one of `None` means that a module expects a logger.
_OF_LOGGERS = ("experiment", "log_metrics", "log_hyperparams", "log_image", "log_table", "log_dir")


@contextmanager
def failures_explained(
    whose: str, module: nn.Module, batch: Any, indices: np.ndarray
) -> Iterator[None]:
    """Turn torch's errors about a batch into errors that name the samples and say what to do.

    Args:
        whose: Whose data the batch is of, such as "client 'a'".
        module: The model that is given the batch.
        batch: The batch.
        indices: Indices of its samples.

    Raises:
        ConfigurationError: In place of torch's errors about types, shapes, labels and ids, about
            normalising a batch of one sample, and about a logger: local training has none.
    """
    try:
        yield
    except AttributeError as error:
        if error.obj is not None or error.name not in _OF_LOGGERS:
            raise
        raise ConfigurationError(
            f"{type(module).__name__} reads `logger.{error.name}`, but a module has no logger in "
            "local training: `self.logger` is None. HINT: use `self.log`, which goes to the loop's "
            "logger, or ask `if self.logger` first."
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, FedrecError):
            raise
        if "more than 1 value per channel" in text and len(indices) == 1:
            raise ConfigurationError(
                f"Cannot train on a batch of one sample ({indices[0]}) of {whose}: "
                f"{text}. HINT: `drop_last=True` leaves out the last batch of a pass where that is "
                "smaller than the others; if all are of one sample, raise `batch_size`."
            ) from error
        hint = (
            "let the data set, or a transform, give the types that the model takes: `.float()` for "
            "inputs, `.long()` for class labels."
        )
        if not _ABOUT_DTYPES.search(text):
            hint = next((hint for about, hint in _HINTS.items() if about.search(text)), "")
        if not hint:
            raise
        leaves = [x[0] if isinstance(x, Tensor) and x.ndim else x for x in tree_flatten(batch)[0]]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
        raise ConfigurationError(
            f"{type(module).__name__} computes in {' and '.join(dtypes)} and fails on a batch of "
            f"{whose}, whose first sample ({indices[0]}) gives {form_of(leaves)}: "
            f"{text.rstrip('.')}. HINT: {hint}"
        ) from error


def check_map_style(argument: str, dataset: object) -> None:
    """Raise `ConfigurationError` unless a data set's samples can be counted and read by index."""
    methods = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not methods or isinstance(dataset, IterableDataset | Mapping):
        raise ConfigurationError(
            expected(
                argument,
                "a map-style data set (with __len__ and __getitem__ by index)",
                type(dataset).__name__,
                hint="batches are drawn by index; put the samples into a list or TensorDataset.",
            )
        )


def collate_name(collate_fn: CollateFn | None) -> str | None:
    """Return the qualified name of a function, for a manifest; `None` for `None`."""
    if collate_fn is None:
        return None
    named = collate_fn if hasattr(collate_fn, "__qualname__") else type(collate_fn)
    return f"{named.__module__}.{named.__qualname__}"
