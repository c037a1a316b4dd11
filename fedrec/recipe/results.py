"""Put together what the steps of a run left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from fedrec.exceptions import ConfigurationError
from fedrec.recipe.folder import DETECTION, RECORD, RECORDED, RunFolder
from fedrec.recipe.schema import label_of
from fedrec.recipe.stored import CONVERGENCE

__all__ = [
    "collect_results",
    "excluded_clients",
    "is_reference",
    "measure_specs",
    "recovery_spec",
    "reference_label",
]

_METHOD = (
    "ter", "asr", "acp", "cp_min", "cp_max", "exact_rounds_by_reason", "client_bytes", "seconds",
    "client_seconds", *CONVERGENCE,
)  # fmt: skip


def recovery_spec(config: Mapping[str, Any], index: int, exclude: list[str]) -> dict[str, Any]:
    """Return what a recovery depends on, besides the recording.

    Args:
        config: The resolved recipe.
        index: Position of the recoverer.
        exclude: The clients it leaves out.
    """
    return {
        "recoverer": config["recoverers"][index],
        "recover": config.get("recover"),
        "exclude": exclude,
    }


def excluded_clients(folder: RunFolder, config: Mapping[str, Any]) -> list[str] | None:
    """Return whom the recoveries of a run leave out; `None` as long as nothing was detected.

    Args:
        folder: A run folder.
        config: The resolved recipe.
    """
    exclude: list[str] | str = (config.get("recover") or {}).get("exclude", "detected")
    if not isinstance(exclude, str):
        return exclude
    detection = folder.result(DETECTION, {"detector": config.get("detector")})
    return None if detection is None else list(detection["malicious"])


def is_reference(node: Any) -> bool:
    """Return whether an entry of `recoverers` trains from scratch."""
    path = node.get("class_path") if isinstance(node, Mapping) else node
    return str(path).rpartition(".")[2] == "TrainFromScratch"


def reference_label(config: Mapping[str, Any]) -> str | None:
    """Return which recovery the others are compared with: the first that trains from scratch.

    Args:
        config: The resolved recipe.
    """
    nodes = config.get("recoverers") or []
    return next((str(label_of(node)) for node in nodes if is_reference(node)), None)


def measure_specs(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the measures of the models there are depend on, besides the recording.

    Args:
        folder: A run folder.
        config: The resolved recipe.

    Returns:
        By label of the finished recoveries, and of the recorded model; nothing as long as there is
        nothing to measure.
    """
    exclude = excluded_clients(folder, config)
    if exclude is None or folder.read(RECORD) is None:
        return {}
    done = {}
    for i, node in enumerate(config.get("recoverers") or []):
        spec = recovery_spec(config, i, exclude)
        if folder.result(folder.recovery_file(label_of(node)), spec) is not None:
            done[str(label_of(node))] = spec
    reference, metrics = done.get(reference_label(config) or RECORDED), config.get("metrics")
    if reference is None and not metrics:
        return {}
    shared = {"exclude": exclude, "reference": reference, "metrics": metrics}
    return {label: {"model": spec, **shared} for label, spec in {RECORDED: None, **done}.items()}


def collect_results(folder: RunFolder) -> dict[str, Any]:
    """Return what `results.json` holds, as far as the run has come.

    Args:
        folder: A run folder.

    Returns:
        All rates, ACP and CP too, as fractions in [0, 1], `None` where a figure is undefined; by
        method whom it left out. Recoveries that were made for another recipe, or without other
        clients, are left out. In `failures`, why a method failed when it was tried last, by its
        label.

    Raises:
        ConfigurationError: If nothing has been recorded.
    """
    config: Any = OmegaConf.to_container(OmegaConf.load(folder.recipe_file), resolve=False)
    record = (folder.read(RECORD) or {}).get("result")
    if record is None:
        raise ConfigurationError(
            f"`{folder.path}` has no finished recording. HINT: `fedrec run {folder.recipe_file} "
            f"--output-dir {folder.path.parent}` goes on with it."
        )
    detection = folder.result(DETECTION, {"detector": config.get("detector")})
    exclude = excluded_clients(folder, config)
    specs = measure_specs(folder, config)

    def measured(label: str) -> dict[str, Any]:
        found = folder.result(folder.measures_file(label), specs[label]) if label in specs else None
        return {"distance": None, "relative_distance": None, "metrics": {}, **(found or {})}

    # Why a method has no figures is known to the run that tried it last alone.
    earlier = folder.read("results.json") or {}
    failures = earlier.get("failures", {}) if earlier.get("recipe") == config else {}
    methods = []
    for i, node in enumerate(config.get("recoverers") or []):
        if exclude is None:
            break
        label = label_of(node)
        done = folder.result(folder.recovery_file(label), recovery_spec(config, i, exclude))
        if done is not None:
            figures = {key: done.get(key) for key in _METHOD} | measured(label)
            methods.append({"name": label, **figures, "excluded": exclude})
    return {
        "recipe": config,
        "synthetic_data": record.get("synthetic_data", False),
        "poisoned": {"ter": record["ter"], "asr": record["asr"], **measured(RECORDED)},
        "detection": None
        if detection is None
        else {key: detection[key] for key in ("malicious", "fnr", "fpr", "round")},
        "methods": methods,
        "failures": {k: v for k, v in failures.items() if k not in {m["name"] for m in methods}},
        "recording": {key: record.get(key) for key in ("seconds", "client_seconds", "malicious")},
        "history": record["history"],
        "execution": record["execution"],
        "versions": record["versions"],
    }
