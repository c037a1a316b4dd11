"""A run folder: where a run keeps what it has done, so that it can go on."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pytorch_lightning import LightningModule

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.data import FederatedDataModule
from fedrec.data.partitioners import Partitioner
from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError, expected
from fedrec.federation import Federation
from fedrec.loop import FederatedLoop
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.parts import Parts
from fedrec.recipe.schema import Recipe, folder_name
from fedrec.recoverers.base import Recoverer

__all__ = [
    "DETECTION",
    "RECORD",
    "RECORDED",
    "RunFolder",
    "existing",
    "hash_of",
    "is_same",
    "locked",
    "recording_part",
]

RECORD = "record/result.json"
DETECTION = "detection.json"
#: Stands for the recorded model, beside the labels of recoveries, which are not empty.
RECORDED = ""

_COMPONENTS = ("data", "model", "aggregator", "attack", "history", "detector", "recoverer")
_BASES = (
    FederatedDataModule, Partitioner, LightningModule, Aggregator, Attack, Detector, Recoverer,
)  # fmt: skip
# What of the loop decides the bits of a recording.
_PLAN = ("accelerator", "devices", "precision", "executor", "seed", "deterministic", "fast_dev_run")


def recording_part(recipe: Recipe, parts: Parts) -> dict[str, Any]:
    """Return what of a recipe its recording depends on.

    An argument that says what the default says anyway makes no other recording.

    Args:
        recipe: From `load_recipe`.
        parts: What it stands for.
    """
    config, seed = recipe.config, recipe.config.get("seed", 0)
    part = {key: config.get(key) for key in ("seed", "data", "model", "aggregator", "attack")}
    federation = config.get("federation")
    part["federation"] = _given(federation, Federation.from_data, seed=seed, local_steps=1)
    part["record"] = _given(config.get("record"), FederatedLoop.record)
    loop = _given(config.get("loop"), FederatedLoop, seed=seed) or {}
    part["loop"] = {key: loop[key] for key in _PLAN if key in loop}
    part["history"] = _stored(config.get("history"))
    part["detector"] = config.get("detector") if parts.stop_on_detection else None
    return part


def _given(
    arguments: Mapping[str, Any] | None, function: Callable[..., Any], **defaults: Any
) -> dict[str, Any] | None:
    """Return the arguments that are not the defaults; the recipe's own defaults come first."""
    known = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    known |= defaults
    plain = (type(None), bool, int, float, str)
    left = {
        name: value
        for name, value in (arguments or {}).items()
        if not (isinstance(value, plain) and name in known and value == known[name])
    }
    return left or None


def _stored(node: Any) -> Any:
    """Return of a history what changes what is stored in it."""
    if isinstance(node, Mapping):
        given = node.get("init_args") or {}
        kept = {k: v for k, v in given.items() if k not in ("map_size", "sync_every")}
        if kept.get("codec") == "float32":
            del kept["codec"]
        node = {**node, "init_args": kept} if kept else node["class_path"]
    return None if node == "LMDBHistory" else node


@contextmanager
def locked(path: Path, in_use: str) -> Iterator[None]:
    """Lock a folder, or a file that is made for it; the lock ends with this process.

    Args:
        path: The folder or file.
        in_use: What to say if another process has it.

    Raises:
        ConfigurationError: If another process has it.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(in_use) from error
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a fork may still have it open
        os.close(handle)


class RunFolder:
    """Paths and small files of one run.

    A step that is finished leaves a JSON file with what it was asked to do (`spec`) and what came
    out (`result`); one that has only begun leaves `spec` alone.

    Args:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    def recovery_file(self, label: str) -> str:
        """The file of a recovery that `result` and `write` are about."""
        return f"recover/{folder_name(label)}/result.json"

    def measures_file(self, label: str) -> str:
        """The file with what was measured of a recovered model, or of the recorded one."""
        return f"{'record' if label == RECORDED else f'recover/{folder_name(label)}'}/measures.json"

    def weights_file(self, label: str) -> str:
        """Where the weights of a finished recovery, or those of the recording, are."""
        return "history" if label == RECORDED else f"recover/{folder_name(label)}/checkpoint.npz"

    def failure_file(self, label: str) -> str:
        """The file with the traceback of a recovery that failed by a fault of its own."""
        return f"recover/{folder_name(label)}/failure.txt"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from working on the run.

        Raises:
            ConfigurationError: If another one does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        in_use = (
            f"Another process works on the run in `{self.path}`. HINT: wait until it is done, or "
            "choose another folder with `name=` or `--output-dir`."
        )
        with locked(self.path, in_use):
            yield

    def open(self, recipe: Recipe, recording: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder, or take up the one there is if it belongs to the same recording.

        Args:
            recipe: The recipe.
            recording: Its `recording_part`.
            overwrite: Remove an existing run first.

        Raises:
            ConfigurationError: If it holds a recording of another recipe, or is no run folder.
        """
        if not self.recipe_file.exists() and not self._is_run() and any(self.path.glob("*")):
            raise ConfigurationError(
                f"Expected `{self.path}` to be a run folder, or a new or empty one, but it holds "
                "other files. HINT: choose another with `name=` or `--output-dir`."
            )
        if self.path.exists() and overwrite:
            # The folder itself stays, and with it the lock on it.
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self._check_same(recording)
        text = OmegaConf.to_yaml(OmegaConf.create(dict(recipe.config)))
        write_atomically(self.recipe_file, text.encode())

    def _is_run(self) -> bool:
        """Return whether a run has begun here, for folders that have lost their recipe."""
        return (self.path / RECORD).is_file()

    def _check_same(self, recording: Mapping[str, Any]) -> None:
        stored = self.read(RECORD)
        if stored is None:
            return
        before, after = _flatten(_canonical(stored["spec"])), _flatten(_canonical(recording))
        differ = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        if not differ:
            return
        lines = "\n".join(
            f"  - {key}: {before.get(key)!r} there, {after.get(key)!r} here" for key in differ
        )
        raise ConfigurationError(
            f"The run folder `{self.path}` holds a recording of another recipe. What differs:\n"
            f"{lines}\n"
            "HINT: `name=another-name` starts a run of its own; `--overwrite` removes this one."
        )

    def read(self, name: str | Path) -> dict[str, Any] | None:
        """Read one of the folder's JSON files; `None` if it is not there."""
        path = self.path / name
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigurationError(
                f"`{path}` cannot be read: {error}. HINT: remove it, and the step is done again."
            ) from error
        return value

    def write(self, name: str | Path, value: Mapping[str, Any]) -> None:
        """Write a JSON file so that after a crash the old or the new one is there, whole."""
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def write_detection(self, value: Mapping[str, Any]) -> None:
        """Write the file of the detection, which has a score of each client."""
        register_derived(self.path / DETECTION, keys=("result", "scores"))
        self.write(DETECTION, value)

    def result(self, name: str | Path, spec: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a finished step left behind, if it was asked to do the same."""
        stored = self.read(name)
        if stored is None or not is_same(stored.get("spec"), spec):
            return None
        result: dict[str, Any] | None = stored.get("result")
        return result


def existing(path: str | Path) -> RunFolder:
    """Return a run folder that is there.

    Raises:
        ConfigurationError: If it is not.
    """
    folder = RunFolder(path)
    if not folder.recipe_file.is_file():
        hint = "`fedrec run RECIPE` makes one, `runs/<name>` by default."
        if folder.read(RECORD) is not None:
            hint = (
                "its recipe.yaml was deleted; `fedrec run` with the recipe of this run, "
                f"`name={folder.path.resolve().name}` and `--output-dir "
                f"{folder.path.resolve().parent}` writes it again and keeps what is done."
            )
        raise ConfigurationError(
            expected("RUN", "a run folder (with recipe.yaml in it)", str(path), hint=hint)
        )
    return folder


def hash_of(spec: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits that tell what a step depends on.

    What means the same has the same digits: the order of keys does not matter, nor whether a class
    of fedrec goes by its name, its dotted path, or has `init_args` that are the defaults anyway.

    Args:
        spec: What the step depends on, such as a `recording_part`.

    Examples:
        >>> hash_of({"seed": 0, "aggregator": "Median"})
        '9e238df7ea1c'
        >>> hash_of({"aggregator": {"class_path": "fedrec.aggregators.Median"}, "seed": 0})
        '9e238df7ea1c'
    """
    text = json.dumps(_canonical(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_same(spec: Any, other: Any) -> bool:
    """Return whether two specs mean the same, in the sense of `hash_of`."""
    same: bool = _canonical(spec) == _canonical(other)
    return same


def _canonical(spec: Any) -> Any:
    """Write a spec in the one way that all of those with the same meaning share, as JSON has it."""
    if not isinstance(spec, Mapping):
        return spec
    spec = json.loads(json.dumps(spec))
    if "recoverer" in spec and "exclude" in spec:  # of a recovery, which says whom it leaves out
        spec["recover"] = _given(spec.get("recover"), FederatedLoop.recover, exclude="detected")
    return _short(spec, {"seed": spec.get("seed") or 0})


def _short(value: Any, of_data: Mapping[str, Any]) -> Any:
    """Leave out what defaults say anyway; those of data modules are the recipe's first."""
    if isinstance(value, list):
        return [_short(v, of_data) for v in value]
    if not isinstance(value, dict):
        return value
    named = {k: v for k, v in value.items() if k in _COMPONENTS and isinstance(v, str)}
    value = {**value, **{k: {"class_path": v} for k, v in named.items()}}
    value = {k: _short(v, of_data) for k, v in value.items()}
    if "class_path" in value:
        path = str(value["class_path"])
        if path.startswith("fedrec."):
            value["class_path"] = path.rpartition(".")[2]
        cls = _classes().get(value["class_path"])
        if cls is not None and isinstance(value.get("init_args"), dict):
            defaults = of_data if issubclass(cls, FederatedDataModule) else {}
            value["init_args"] = _given(value["init_args"], cls, **defaults)
        if not value.get("init_args", True):
            del value["init_args"]
    return value


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of fedrec whose defaults are known, by name."""
    known = [ClassFinder().known([base]) for base in _BASES]
    return {name: found[0] for names in known for name, found in names.items()}


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        parts = [_flatten(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()]
        return {k: v for part in parts for k, v in part.items()}
    return {key: value}
