"""Measuring a run's models: distance to training from scratch, and a recipe's own metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torchmetrics import Metric

from fedrec.federation import Federation
from fedrec.history import HistoryStore, HistoryView
from fedrec.loop.checkpoint import finished_state
from fedrec.loop.evaluation import evaluate_metrics
from fedrec.loop.runtime import Runtime
from fedrec.recipe.folder import RECORDED, RunFolder
from fedrec.recipe.results import measure_specs, reference_label
from fedrec.recoverers._final import final_weights

__all__ = ["Model", "distances", "is_measured", "measure", "recorded_model"]


class Model(NamedTuple):
    """A model's weights and averaged buffers.

    Attributes:
        weights: Shape $(d,)$.
        buffers: Shape $(b,)$, or `None` if no buffers are averaged.
        buffer_spec: Names, dtypes and shapes of the averaged buffers.
    """

    weights: Tensor
    buffers: Tensor | None
    buffer_spec: Mapping[str, Any]


def distances(weights: Tensor, reference: Tensor) -> dict[str, float | None]:
    r"""Return $\lVert w - w^* \rVert_2$, and the same divided by $\lVert w^* \rVert_2$.

    Args:
        weights: $w$, shape $(d,)$.
        reference: $w^*$, shape $(d,)$.

    Examples:
        >>> import torch
        >>> distances(torch.tensor([3.0, 8.0]), torch.tensor([3.0, 4.0]))
        {'distance': 4.0, 'relative_distance': 0.8}
    """
    reference = reference.double()
    distance = float((weights.double() - reference).norm())
    norm = float(reference.norm())
    return {"distance": distance, "relative_distance": distance / norm if norm else None}


def recorded_model(history: HistoryStore) -> Model:
    """Return the final model of a recording."""
    rounds = len(history.rounds())
    buffers = history.read_round(rounds - 1, ()).buffers
    return Model(final_weights(HistoryView(history), rounds), buffers, history.manifest.buffers)


def is_measured(folder: RunFolder, config: Mapping[str, Any]) -> bool:
    """Return whether all models are measured whose weights are in the folder.

    Args:
        folder: A run folder.
        config: The resolved recipe, which may have other metrics than the recipe in the folder.
    """
    return all(
        folder.result(folder.measures_file(label), spec) is not None
        or not (folder.path / folder.weights_file(label)).exists()
        for label, spec in measure_specs(folder, config).items()
    )


def measure(
    folder: RunFolder,
    config: Mapping[str, Any],
    *,
    runtime: Runtime,
    federation: Federation,
    metrics: Mapping[str, Metric],
    models: Mapping[str, Model],
) -> None:
    """Measure the models of a run that are not measured yet.

    Args:
        folder: The run folder.
        config: The resolved recipe.
        runtime: The loop's runtime, which has the device.
        federation: Model and data.
        metrics: The recipe's own metrics, by label.
        models: Models in memory, by label; all others are read from the folder.

    Raises:
        ConfigurationError: If a metric does not fit the model's outputs.
    """
    specs = measure_specs(folder, config)
    name = reference_label(config)
    reference = _model(folder, name, models) if name in specs else None
    for label, spec in specs.items():
        file = folder.measures_file(label)
        if folder.result(file, spec) is not None:
            continue
        model = _model(folder, label, models)
        if model is None:
            continue
        result: dict[str, Any] = {}
        if reference is not None:
            result |= distances(model.weights.cpu(), reference.weights.cpu())
        result["metrics"] = _values(runtime, federation, metrics, model, spec["exclude"])
        folder.write(file, {"spec": spec, "result": result})


def _model(folder: RunFolder, label: str, models: Mapping[str, Model]) -> Model | None:
    """Return a model from memory, or from the checkpoint of a finished recovery, or `None`."""
    path = folder.path / folder.weights_file(label)
    if label in models or label == RECORDED:
        return models.get(label)
    state = finished_state(path)
    if state is None:
        return None
    return Model(state["weights"], state["buffers"], state["buffer_spec"])


def _values(
    runtime: Runtime,
    federation: Federation,
    metrics: Mapping[str, Metric],
    model: Model,
    exclude: Collection[str],
) -> dict[str, float | None]:
    """Return the values of the metrics for a model; `None` for a value that is not finite."""
    if not metrics:
        return {}
    members = [
        client.dataset
        for client in federation.clients
        if client.client_id in exclude and hasattr(client, "dataset")
    ]
    with runtime.running(federation):
        federation.module.to(runtime.device)
        federation.layout.select_buffers(federation.module, model.buffer_spec)
        values = evaluate_metrics(
            federation,
            metrics,
            model.weights.to(runtime.device),
            buffers=model.buffers,
            members=members,
            device=runtime.device,
        )
    return {label: value if math.isfinite(value) else None for label, value in values.items()}
