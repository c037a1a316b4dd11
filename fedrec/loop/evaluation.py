"""Testing global weights: test error rate, attack success rate, and other metrics."""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import Metric, MetricCollection

from fedrec.attacks.base import Attack
from fedrec.clients.batches import CollateFn, failures_explained, take
from fedrec.clients.generators import generators_restored, held_generators, held_restored, seed_held
from fedrec.clients.hooks import is_overridden, lightning_class
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import changes_batches, transferred
from fedrec.clients.state import state_of
from fedrec.clients.trainer import LocalTrainer
from fedrec.exceptions import ConfigurationError, FedrecWarning, expected
from fedrec.federation import Federation
from fedrec.metrics import AttackSuccessRate, TestErrorRate
from fedrec.metrics._labels import UndefinedRateError, has_one_logit_each
from fedrec.random import numpy_generator

__all__ = [
    "check_evaluation",
    "evaluate",
    "evaluate_metrics",
    "fixed_subset",
    "named_metrics",
]

# Columns of curves, which no metric may have as its name.
_TAKEN = ("ter", "asr", "round", "asked")
_BATCH = 256
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def fixed_subset(dataset: Dataset[Any], size: int | None, seed: int) -> Dataset[Any]:
    """Return a seeded subset of at most `size` samples, the same for every caller."""
    total = len(dataset)  # type: ignore[arg-type]
    if size is None or size >= total:
        return dataset
    chosen = numpy_generator(seed, "evaluation").permutation(total)[:size]
    # A subclass of `TensorDataset` may change samples in its `__getitem__`.
    if type(dataset) is TensorDataset:
        index = torch.from_numpy(chosen)
        return TensorDataset(*(t[index] for t in dataset.tensors))
    return torch.utils.data.Subset(dataset, chosen.tolist())


def named_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name.

    Args:
        metrics: A metric, a list of metrics, a `MetricCollection`, or a mapping from names to
            metrics; `None` for no metric. A metric without a name goes by the name of its class.

    Raises:
        ConfigurationError: If `metrics` is something else, a name repeats, or a name is a column
            of curves.
    """
    if metrics is None:
        return {}
    given = [metrics] if isinstance(metrics, Metric) else metrics
    named: list[tuple[Any, Any]]
    if isinstance(given, Mapping | MetricCollection):
        named = list(given.items())
    elif isinstance(given, list | tuple):
        named = [(type(metric).__name__, metric) for metric in given]
    else:
        raise ConfigurationError(expected("metrics", "torchmetrics by name", metrics))
    by_name: dict[str, Metric] = {}
    for name, metric in named:
        if not isinstance(metric, Metric):
            hint = "torchmetrics has many, `MeanSquaredError()` for instance."
            raise ConfigurationError(expected("metrics", "torchmetrics by name", metric, hint=hint))
        if not isinstance(name, str) or name in (*_TAKEN, *by_name):
            hint = 'give each metric a name, as in `metrics={"f1": ...}`.'
            requirement = (
                "names that differ from each other and from `ter`, `asr`, `round` and `asked`"
            )
            raise ConfigurationError(expected("metrics", requirement, name, hint=hint))
        by_name[name] = metric
    return by_name


def keep_to_oneself(*modules: nn.Module) -> None:
    """Let the metrics in modules compute from what this process has seen.

    Where there are several processes, torchmetrics would wait for those that test nothing.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, Metric):
                part.distributed_available_fn = _never


def _never() -> bool:
    return False


def evaluate(
    federation: Federation,
    dataset: Dataset[Any],
    global_weights: Tensor,
    *,
    attack: Attack | None,
    buffers: Tensor | None,
    device: torch.device,
    metrics: Mapping[str, Metric],
    can_do_without: bool,
) -> dict[str, float | None]:
    """Compute the test error rate, for a targeted attack its success rate, and other metrics.

    Args:
        federation: The federation; its module's `forward` gives logits, see `TestErrorRate`.
        dataset: Pairs of input and label.
        global_weights: Shape $(d,)$.
        attack: The attack, which has the trigger and the target label, or `None`.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        device: The device to compute on.
        metrics: Other metrics, by name.
        can_do_without: Whether the error rate may be undefined.

    Returns:
        `{"ter": ..., "asr": ..., <metrics>}`, the two rates as fractions in [0, 1]. `None` stands
        for an `asr` that is undefined, for a `ter` that is allowed to be, and for a metric that is
        not finite.

    Raises:
        ConfigurationError: If the test data are no pairs, or a rate or a metric is not defined for
            this model and data.
    """
    rates, others = _Rates(attack, device, can_do_without), _Metrics(metrics, device)
    with _testing(federation, global_weights, buffers) as module:
        for x, y in _batches(federation, dataset, device):
            inputs, labels = _as_given(module, x, y, device)
            preds = _predicted(module, inputs)
            rates.update(module, x, preds, labels)
            others.update(preds, labels)
    values = {name: value if math.isfinite(value) else None for name, value in others.compute()}
    return {**rates.compute(type(federation.module).__name__), **values}


def check_evaluation(
    federation: Federation,
    *,
    attack: Attack | None,
    device: torch.device,
    metrics: Mapping[str, Metric],
    can_do_without: bool,
) -> None:
    """Test the initial weights on one batch, to refuse before training what cannot be tested.

    Args:
        federation: Model and test data; without test data nothing is checked.
        attack: As in `evaluate`.
        device: The device to compute on.
        metrics: As in `evaluate`.
        can_do_without: As in `evaluate`.

    Raises:
        ConfigurationError: As in `evaluate`.
    """
    dataset = federation.test_dataset
    if dataset is None:
        return
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigurationError(expected("test_dataset", "None, or to have samples", "no sample"))
    rates, others = _Rates(attack, device, can_do_without), _Metrics(metrics, device)
    with _testing(federation, None, None) as module:
        x, y = next(_batches(federation, dataset, device))
        inputs, labels = _as_given(module, x, y, device)
        preds = _predicted(module, inputs)
        rates.update(module, x, preds, labels)
        others.update(preds, labels)
    others.check_numbers()


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
        federation: The federation; its module's `forward` gives the predictions.
        metrics: Metrics by label. A metric whose `update` takes `member` as well is also shown the
            samples of `members`, and told for every sample whether it is one of them.
        global_weights: Shape $(d,)$.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        members: Data sets of pairs of input and label, for metrics with a `member`.
        device: The device to compute on.

    Returns:
        A number for every label.

    Raises:
        ConfigurationError: If a metric does not take the model's predictions, or gives anything
            but one number.
    """
    evaluated = _Metrics(metrics, device)
    datasets = [*((dataset, True) for dataset in members if evaluated.ask_members)]
    if federation.test_dataset is not None:
        datasets.append((federation.test_dataset, False))
    with _testing(federation, global_weights, buffers) as module:
        for dataset, member in datasets:
            for x, y in _batches(federation, dataset, device):
                inputs, labels = _as_given(module, x, y, device)
                evaluated.update(_predicted(module, inputs), labels, member)
    return dict(evaluated.compute())


class _Rates:
    """TER and ASR of one model, batch by batch."""

    def __init__(self, attack: Attack | None, device: torch.device, can_do_without: bool) -> None:
        self.ter: TestErrorRate | None = TestErrorRate().to(device)
        self.attack = attack
        target = None if attack is None else attack.target_label
        self.asr = None if target is None else AttackSuccessRate(target_label=target).to(device)
        keep_to_oneself(*(rate for rate in (self.ter, self.asr) if rate is not None))
        self.can_do_without = can_do_without and self.asr is None
        # The range of outputs, for models with one logit for each label.
        self.lowest, self.highest = math.inf, -math.inf
        # The number of labels, as long as every sample has exactly one of them; then -1.
        self.num_one_hot = 0

    def update(self, module: nn.Module, x: Any, preds: Any, y: Tensor) -> None:
        if not isinstance(preds, Tensor):
            if self.can_do_without:
                self.ter = None
                return
            raise ConfigurationError(
                f"Expected `{type(module).__name__}.forward` to give a tensor of logits, but got "
                f"{type(preds).__name__}. HINT: test error and attack success are computed from it."
            )
        if self.ter is not None:
            try:
                self.ter.update(preds, y)
            except UndefinedRateError:
                if not self.can_do_without:
                    raise
                self.ter = None
            else:
                self._watch(preds, y)
        if self.asr is not None and self.attack is not None:
            if not isinstance(x, Tensor):
                raise ConfigurationError(
                    f"{type(self.attack).__name__} puts its trigger into tensors, but the inputs "
                    f"of the test data are of type {type(x).__name__}. HINT: let the data set give "
                    "tensors."
                )
            inputs, labels = _as_given(module, self.attack.trigger(x), y, self.asr.device)
            self.asr.update(_predicted(module, inputs, "the test data with the trigger"), labels)

    def _watch(self, preds: Tensor, y: Tensor) -> None:
        """Note what `compute` warns of: outputs like probabilities, labels that are one-hot."""
        if not has_one_logit_each(preds, y) or not len(preds):
            return
        self.lowest = min(self.lowest, float(preds.min()))
        self.highest = max(self.highest, float(preds.max()))
        if y.ndim == 2 and y.shape[1] > 1:
            one_each = bool((y.sum(dim=1) == 1).all())
            self.num_one_hot = y.shape[1] if one_each and self.num_one_hot >= 0 else -1

    def compute(self, model: str) -> dict[str, float | None]:
        if self.ter is not None and 0 <= self.lowest <= self.highest <= 1:
            warnings.warn(
                f"All outputs of {model} on the test data are in [0, 1], as probabilities are, but "
                "`forward` has to give logits: with one output for each label, a label is "
                "predicted where it is above 0. HINT: leave the sigmoid to the loss "
                "(`binary_cross_entropy_with_logits`).",
                FedrecWarning,
                stacklevel=3,
            )
        if self.ter is not None and self.num_one_hot > 0:
            warnings.warn(
                f"Every test sample has exactly one of {self.num_one_hot} labels, but the test "
                "error rate counts each label by itself, as for samples with any number of them. "
                "HINT: if classes exclude each other, give class indices "
                "(`labels.argmax(dim=1)`).",
                FedrecWarning,
                stacklevel=3,
            )
        # If all labels are the target label, the success rate is undefined.
        asr = self.asr if self.asr is not None and int(self.asr.total) > 0 else None
        return {
            "ter": None if self.ter is None else float(self.ter.compute()),
            "asr": None if asr is None else float(asr.compute()),
        }


class _Metrics:
    """Metrics of one model, batch by batch, computed by copies of the given metrics."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics = {label: copy.deepcopy(m).to(device) for label, m in metrics.items()}
        keep_to_oneself(*self.metrics.values())
        self.asking = {
            label: "member" in inspect.signature(metric.update).parameters
            for label, metric in self.metrics.items()
        }
        for metric in self.metrics.values():
            metric.reset()

    @property
    def ask_members(self) -> bool:
        return any(self.asking.values())

    def update(self, preds: Any, y: Tensor, member: bool = False) -> None:
        for label, metric in self.metrics.items():
            with _named(label):
                if self.asking[label]:
                    is_member = torch.full(y.shape[:1], member, device=y.device)
                    metric.update(preds, y, is_member)
                elif not member:
                    metric.update(preds, y)

    def check_numbers(self) -> None:
        """Refuse metrics that give anything but one number."""
        for label, metric in self.metrics.items():
            value: Any = 0.0
            # A metric may not be computable from a single batch.
            with warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")
                value = metric.compute()
            form = type(value).__name__
            if isinstance(value, Tensor):
                form = f"a tensor of shape {tuple(value.shape)}"
            numbers = value.numel() if isinstance(value, Tensor) else isinstance(value, float | int)
            if numbers != 1:
                hint = 'take an average (`average="macro"`), or one of its numbers.'
                requirement = f"one number from the metric `{label}`"
                raise ConfigurationError(f"Expected {requirement}, but got {form}. HINT: {hint}")

    def compute(self) -> Iterator[tuple[str, float]]:
        for label, metric in self.metrics.items():
            with _named(label):
                yield label, float(metric.compute())


@contextmanager
def _named(label: str) -> Iterator[None]:
    """Name the metric in an error that it raises."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigurationError(
            f"The metric `{label}` does not fit this model and data: {error}"
        ) from error


def _check_forward(module: nn.Module) -> None:
    """Raise `ConfigurationError` unless the module has a `forward` that takes one input."""
    name = type(module).__name__
    if lightning_class(module) is not None and not is_overridden(module, "forward"):
        raise ConfigurationError(
            f"{name} has no `forward`, which has to give logits of the test data. HINT: write it, "
            "or leave the test data out."
        )
    arguments = inspect.signature(module.forward).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind in _POSITIONAL]
    if len(needed) > 1:
        raise ConfigurationError(
            f"Expected `{name}.forward` to take one input, that of a test sample, but it needs "
            f"{', '.join(f'`{name}`' for name in needed)}. HINT: let it take a tuple, which the "
            "test data give as the input."
        )


def _predicted(module: nn.Module, x: Any, whose: str = "the test data") -> Any:
    with failures_explained(whose, module, x, np.arange(1)):
        return module(x)


def _collate_fn(federation: Federation) -> CollateFn | None:
    """Return the `collate_fn` of the clients if all have the same, else `None`."""
    clients = [c for c in federation.clients if isinstance(c, LightningClient)]
    first = clients[0].collate_fn if clients else None
    return first if all(c.collate_fn is first for c in clients) else None


def _batches(
    federation: Federation, dataset: Dataset[Any], device: torch.device
) -> Iterator[tuple[Any, Tensor]]:
    """Yield batches of inputs and labels, in order, with held generators seeded."""
    total, collate_fn = len(dataset), _collate_fn(federation)  # type: ignore[arg-type]
    if _has_transfers(federation.module):  # the module's hooks get batches on the CPU, as loaders
        device = torch.device("cpu")
    held = held_generators(dataset, collate_fn)
    with held_restored(held):
        seed_held(held, 0, "testing")
        for start in range(0, total, _BATCH):
            index = np.arange(start, min(start + _BATCH, total))
            batch = take(dataset, index, device, collate_fn, "the test data")
            pair = isinstance(batch, list | tuple) and len(batch) == 2
            if not pair or not isinstance(batch[1], Tensor):
                size = f" of {len(batch)}" if isinstance(batch, list | tuple | dict) else ""
                raise ConfigurationError(
                    "Expected the test data set to give (input, label) pairs, which become pairs "
                    "with a tensor of labels, but a batch of it is a "
                    f"{type(batch).__name__}{size}. HINT: wrap it in a data set that gives the "
                    "input of `forward`, and the label."
                )
            yield batch[0], batch[1]


def _has_transfers(module: nn.Module) -> bool:
    return lightning_class(module) is not None and changes_batches(module)


def _as_given(module: nn.Module, x: Any, y: Tensor, device: torch.device) -> tuple[Any, Tensor]:
    """Return inputs and labels of a batch after the module's transfer hooks."""
    if not _has_transfers(module):
        return x, y
    inputs, labels = transferred(module, [x, y], device)
    return inputs, labels


@contextmanager
def _testing(
    federation: Federation, global_weights: Tensor | None, buffers: Tensor | None
) -> Iterator[nn.Module]:
    """Put the federation's module, with some weights, into evaluation mode; restore it on exit.

    The global generators are seeded the same way each time, and restored, too.
    """
    module, layout = federation.module, federation.layout
    _check_forward(module)
    state, weights = state_of(module), layout.flatten(module)
    with generators_restored(weights.device):
        torch.default_generator.manual_seed(0)
        if weights.device.type == "cuda":
            torch.cuda.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 - what a transform of test samples may draw from
        random.seed(0)
        try:
            if global_weights is not None:
                layout.load(module, global_weights)
            if buffers is not None:
                layout.load_buffers(module, buffers)
            module.eval()
            with torch.no_grad(), _trainer(module, weights.device):
                yield module
        finally:
            layout.load(module, weights)
            state.restore()


def _trainer(module: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """Give a LightningModule a trainer that tests it."""
    if lightning_class(module) is None:
        return nullcontext()
    trainer = LocalTrainer(module, device=device)
    trainer.training, trainer.testing, trainer.evaluating = False, True, True
    return trainer.attached()
