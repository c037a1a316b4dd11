"""Testing global weights: error and attack success."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import Metric

from fedrec.attacks.base import Attack
from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.metrics import AttackSuccessRate, TestErrorRate
from fedrec.random import numpy_generator

__all__ = ["evaluate", "evaluate_metrics", "fixed_subset"]

_BATCH = 256


def fixed_subset(dataset: Dataset[Any], size: int | None, seed: int) -> Dataset[Any]:
    """Return a seeded subset of at most `size` samples, the same for every caller."""
    total = len(dataset)  # type: ignore[arg-type]
    if size is None or size >= total:
        return dataset
    chosen = numpy_generator(seed, "evaluation").permutation(total)[:size]
    # Not a subclass: its `__getitem__` may do something to the samples.
    if type(dataset) is TensorDataset:
        index = torch.from_numpy(chosen)
        return TensorDataset(*(t[index] for t in dataset.tensors))
    return torch.utils.data.Subset(dataset, chosen.tolist())


def _batches(dataset: Dataset[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        yield from zip(x.split(_BATCH), y.split(_BATCH), strict=True)
        return
    for batch in DataLoader(dataset, batch_size=_BATCH):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ConfigurationError(
                "Expected the test data set to give (input, label) pairs, "
                f"but got {type(batch).__name__}."
            )
        yield batch[0], batch[1]


def evaluate(
    federation: Federation,
    dataset: Dataset[Any],
    global_weights: Tensor,
    *,
    attack: Attack | None,
    buffers: Tensor | None,
    device: torch.device,
) -> dict[str, float | None]:
    """Compute test error rate and, for a targeted attack, attack success rate.

    Args:
        federation: Its module's `forward` gives logits, shape $(N, classes)$.
        dataset: Pairs of input and label.
        global_weights: Shape $(d,)$.
        attack: Gives trigger and target label.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        device: Where to compute.

    Returns:
        `{"ter": ..., "asr": ...}`, fractions in [0, 1]; `asr` is `None` where it is undefined.
    """
    ter = TestErrorRate().to(device)
    target = None if attack is None else attack.target_label
    asr = None if target is None else AttackSuccessRate(target_label=target).to(device)
    has_other_labels = False
    with _testing(federation, global_weights, buffers) as module:
        for x, y in _batches(dataset):
            x, y = x.to(device), y.to(device)
            ter.update(module(x), y)
            if asr is not None and attack is not None and target is not None:
                has_other_labels = has_other_labels or bool((y - target).any())
                asr.update(module(attack.trigger(x)), y)
    return {
        "ter": float(ter.compute()),
        "asr": float(asr.compute()) if asr is not None and has_other_labels else None,
    }


def evaluate_metrics(
    federation: Federation,
    metrics: Mapping[str, Metric],
    global_weights: Tensor,
    *,
    buffers: Tensor | None,
    members: Sequence[Dataset[Any]],
    device: torch.device,
) -> dict[str, float]:
    """Compute metrics on the test set.

    Args:
        federation: Its module's `forward` gives the predictions; with test data.
        metrics: By label. One whose `update` takes `member` as well is shown the samples of
            `members`, too, and which of the samples these are.
        global_weights: Shape $(d,)$.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        members: Pairs of input and label that metrics with a `member` ask about.
        device: Where to compute.

    Returns:
        A number for every label.

    Raises:
        ConfigurationError: If a metric does not take what the model predicts, or gives anything
            but one number.
    """
    asking = {label: _asks_members(metric) for label, metric in metrics.items()}
    for metric in metrics.values():
        metric.to(device).reset()
    shown = [*((dataset, True) for dataset in members if any(asking.values()))]
    if federation.test_dataset is not None:
        shown.append((federation.test_dataset, False))
    with _testing(federation, global_weights, buffers) as module:
        for dataset, member in shown:
            for x, y in _batches(dataset):
                y = y.to(device)
                preds, is_member = module(x.to(device)), torch.full(y.shape[:1], member).to(device)
                for label, metric in metrics.items():
                    with _named(label):
                        if asking[label]:
                            metric.update(preds, y, is_member)
                        elif not member:
                            metric.update(preds, y)
    found = {}
    for label, metric in metrics.items():
        with _named(label):
            found[label] = float(metric.compute())
    return found


def _asks_members(metric: Metric) -> bool:
    return "member" in inspect.signature(metric.update).parameters


@contextmanager
def _named(label: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"The metric `{label}` does not fit this model and data: {error}"
        ) from error


@contextmanager
def _testing(
    federation: Federation, global_weights: Tensor, buffers: Tensor | None
) -> Iterator[nn.Module]:
    """Give the federation's module these weights, ready to predict."""
    module = federation.module
    federation.layout.load(module, global_weights)
    if buffers is not None:
        federation.layout.load_buffers(module, buffers)
    # One by one: a user may keep some of them, as frozen layers, in another mode than the rest.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        for part, mode in modes:
            part.training = mode
