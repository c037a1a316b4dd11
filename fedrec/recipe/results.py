"""The results of a run, put together from the files of its finished steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from fedrec.exceptions import ConfigurationError
from fedrec.recipe.folder import DETECTION, RECORD, RECORDED, RunFolder
from fedrec.recipe.schema import label_of
from fedrec.recipe.step_results import CONVERGENCE

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
    """Return everything that a recovery depends on, besides the recording.

    Args:
        config: The resolved recipe.
        index: Position of the recoverer in the recipe.
        exclude: The clients that the recovery leaves out.
    """
    return {
        "recoverer": config["recoverers"][index],
        "recover": config.get("recover"),
        "exclude": exclude,
    }


def excluded_clients(folder: RunFolder, config: Mapping[str, Any]) -> list[str] | None:
    """Return the clients that the recoveries of a run leave out; `None` before the detection.

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
    """Return the label of the first recovery that trains from scratch: others are compared to it.

    Args:
        config: The resolved recipe.
    """
    nodes = config.get("recoverers") or []
    return next((str(label_of(node)) for node in nodes if is_reference(node)), None)


def measure_specs(folder: RunFolder, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return everything that the measures of a run's models depend on, besides the recording.

    Args:
        folder: A run folder.
        config: The resolved recipe.

    Returns:
        One spec for the recorded model and for each finished recovery, by label; none if there is
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
    """Return the content of `results.json`, as far as the run has come.

    Args:
        folder: A run folder.

    Returns:
        Figures of the recorded model and of every method, and more about the run. Rates, ACP and CP
        are fractions in [0, 1]; a figure that is undefined is `None`. Recoveries that were made for
        another recipe, or with other clients left out, are missing. `failures` says by label why a
        method failed when it was last tried, `warnings` why models cannot be compared.

    Raises:
        ConfigurationError: If the folder has no finished recording.
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
        spec = specs.get(label)
        measures = None if spec is None else folder.result(folder.measures_file(label), spec)
        return {"distance": None, "relative_distance": None, "metrics": {}, **(measures or {})}

    # Why a method failed is stored only here, by the run that tried it last.
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
        "warnings": _warnings(folder, config, record["history"]["rounds"]),
        "failures": {k: v for k, v in failures.items() if k not in {m["name"] for m in methods}},
        "recording": {key: record.get(key) for key in ("seconds", "client_seconds", "malicious")},
        "history": record["history"],
        "execution": record["execution"],
        "versions": record["versions"],
    }


def _warnings(folder: RunFolder, config: Mapping[str, Any], recorded: int) -> list[str]:
    """Return a warning if models of a run are of different numbers of recorded rounds, or none.

    So it is where a repair of the history has dropped rounds that some of them were made from.
    """
    most = (config.get("recover") or {}).get("max_rounds") or recorded
    rounds = {"the recorded model": recorded}
    exclude = excluded_clients(folder, config) or []
    for i, node in enumerate(config.get("recoverers") or []):
        label = str(label_of(node))
        done = folder.result(folder.recovery_file(label), recovery_spec(config, i, exclude))
        if done is not None:
            rounds[label] = done.get("recorded", recorded)
    if len({min(number, most) for number in rounds.values()}) == 1:
        return []
    fewer = [label for label, number in rounds.items() if number < max(rounds.values())]
    places = [f"`{(folder.path / folder.recovery_file(label)).parent}`" for label in fewer]
    numbers = ", ".join(f"{label}: {number}" for label, number in rounds.items())
    text = (
        f"The models in `{folder.path}` are of different numbers of recorded rounds, and are not "
        f"to be compared: {numbers}. HINT: `fedrec record {folder.recipe_file} --output-dir "
        f"{folder.path.parent}` records lost rounds again; then remove {' and '.join(places)}, "
        f"and `fedrec recover {folder.path}` makes anew what was there."
    )
    return [text]
