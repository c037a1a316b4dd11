"""A run folder: the files of a run's finished steps, and whether they belong to a recipe."""

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
from fedrec._files import temporary_of, write_atomically, writing
from fedrec.aggregators.base import Aggregator
from fedrec.attacks.base import Attack
from fedrec.data import FederatedDataModule
from fedrec.data.partitioners import Partitioner
from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError, expected
from fedrec.federation import Federation
from fedrec.loop import FederatedLoop
from fedrec.loop.runtime import default_shards
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
    "num_ranks",
    "num_shards",
    "recording_part",
]

RECORD = "record/result.json"
DETECTION = "detection.json"
#: Label of the recorded model, among the labels of recoveries, which are never empty.
RECORDED = ""

_COMPONENTS = ("data", "model", "aggregator", "attack", "history", "detector", "recoverer")
_BASES = (
    FederatedDataModule, Partitioner, LightningModule, Aggregator, Attack, Detector, Recoverer,
)  # fmt: skip
# Arguments of the loop that decide the bits of a recording.
_PLAN = ("accelerator", "precision", "executor", "seed", "deterministic", "fast_dev_run")


def recording_part(recipe: Recipe, parts: Parts) -> dict[str, Any]:
    """Return the part of a recipe that its recording depends on.

    Arguments that equal their defaults are left out: they do not change the recording.

    Args:
        recipe: A recipe from `load_recipe`.
        parts: The recipe's objects.
    """
    config, seed = recipe.config, recipe.config.get("seed", 0)
    part = {key: config.get(key) for key in ("seed", "data", "model", "aggregator", "attack")}
    federation = config.get("federation")
    part["federation"] = _given(federation, Federation.from_data, seed=seed, local_steps=1)
    part["record"] = _given(config.get("record"), FederatedLoop.record)
    loop = _given(config.get("loop"), FederatedLoop, seed=seed) or {}
    planned = {key: loop[key] for key in _PLAN if key in loop}
    if num_shards(loop) > 1:
        planned["num_shards"] = num_shards(loop)
    part["loop"] = planned
    part["history"] = _stored(config.get("history"))
    part["detector"] = config.get("detector") if parts.stop_on_detection else None
    return part


def num_shards(loop: Mapping[str, Any]) -> int:
    """Return the number of shards that a recipe's `loop` asks for, as far as clients allow.

    It decides the bits of a recording, where `devices` do not.
    """
    given = loop.get("num_shards")
    return default_shards(num_ranks(loop)) if given is None else int(given)


def num_ranks(loop: Mapping[str, Any]) -> int:
    """Return the number of processes that a recipe's `loop` asks for."""
    return int(loop.get("devices") or 1) * int(loop.get("num_nodes") or 1)


def _given(
    arguments: Mapping[str, Any] | None, function: Callable[..., Any], **defaults: Any
) -> dict[str, Any] | None:
    """Return the arguments that differ from their defaults, or `None` if there are none.

    `defaults` are those of recipes, which go before the defaults of the function.
    """
    known = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    known |= defaults
    plain = (type(None), bool, int, float, str)
    differing = {
        name: value
        for name, value in (arguments or {}).items()
        if not (isinstance(value, plain) and name in known and value == known[name])
    }
    return differing or None


def _stored(node: Any) -> Any:
    """Return the part of a recipe's `history` that changes the bytes of the stored updates.

    Whether they are encrypted is in it, and where the master key lies is not: keys are moved.
    """
    if isinstance(node, Mapping):
        init_args = node.get("init_args") or {}
        part = {k: v for k, v in init_args.items() if k not in ("map_size", "sync_every")}
        if part.get("codec") == "float32":
            del part["codec"]
        if part.pop("master_key", None) is not None:
            part["master_key"] = "given"
        node = {**node, "init_args": part} if part else node["class_path"]
    return None if node == "LMDBHistory" else node


@contextmanager
def locked(path: Path, in_use: str) -> Iterator[None]:
    """Lock a folder, or a file that is made to be locked, until exit or the end of this process.

    Args:
        path: The folder or file.
        in_use: Text of the error if another process holds the lock.

    Raises:
        ConfigurationError: If another process holds the lock.
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
    """The paths and small files of one run.

    A finished step leaves a JSON file with what it was asked to do (`spec`) and its `result`. The
    file of a step that has begun has only `spec`.

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
        """Return the path of a recovery's JSON file, for `result` and `write`."""
        return f"recover/{folder_name(label)}/result.json"

    def measures_file(self, label: str) -> str:
        """Return the path of the measures of a recovered model, or of the recorded model."""
        return f"{'record' if label == RECORDED else f'recover/{folder_name(label)}'}/measures.json"

    def weights_file(self, label: str) -> str:
        """Return the path of the weights of a finished recovery, or of the recorded model."""
        return "history" if label == RECORDED else f"recover/{folder_name(label)}/checkpoint.npz"

    def failure_file(self, label: str) -> str:
        """Return the path of the traceback of a recovery that failed."""
        return f"recover/{folder_name(label)}/failure.txt"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from working on the run.

        Raises:
            ConfigurationError: If another process works on the run.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        in_use = (
            f"Another process works on the run in `{self.path}`. HINT: wait until it is done, or "
            "choose another folder with `name=` or `--output-dir`."
        )
        with locked(self.path, in_use):
            yield

    def open(self, recipe: Recipe, recording: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder; an existing run is kept if its recording is that of the recipe.

        Args:
            recipe: The recipe.
            recording: Its `recording_part`.
            overwrite: Remove an existing run first.

        Raises:
            ConfigurationError: If the folder holds a recording of another recipe, or is no run
                folder.
        """
        # A process that was ended in its very first write has left no more than that.
        others = set(self.path.glob("*")) - {temporary_of(self.recipe_file)}
        if not self.recipe_file.exists() and not self._is_run() and others:
            raise ConfigurationError(
                f"Expected `{self.path}` to be a run folder, or a new or empty one, but it holds "
                "other files. HINT: choose another with `name=` or `--output-dir`."
            )
        if self.path.exists() and overwrite:
            # The folder itself stays: this process holds a lock on it.
            for path in self.path.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self._check_same(recording)
        text = OmegaConf.to_yaml(OmegaConf.create(dict(recipe.config)))
        write_atomically(self.recipe_file, text.encode())

    def _is_run(self) -> bool:
        """Return whether a run has begun in this folder, even if its recipe file was deleted."""
        return (self.path / RECORD).is_file()

    def _check_same(self, recording: Mapping[str, Any]) -> None:
        """Raise an error with the differences if the stored recording is of another recipe."""
        stored = self.read(RECORD)
        if stored is None:
            return
        before, after = map(_flatten, _compared(stored, recording))
        differ = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        if not differ:
            return
        # An empty group beside one with keys: the keys say it.
        told = [k for k in differ if {} not in (before.get(k), after.get(k))] or differ
        lines = "\n".join(
            f"  - {key}: {before.get(key)!r} there, {after.get(key)!r} here" for key in told
        )
        raise ConfigurationError(
            f"The run folder `{self.path}` holds a recording of another recipe. What differs:\n"
            f"{lines}\n"
            "HINT: `name=another-name` starts a run of its own; `--overwrite` removes this one."
        )

    def read(self, name: str | Path) -> dict[str, Any] | None:
        """Return the content of a JSON file of the folder, or `None` if there is no such file."""
        path = self.path / name
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ConfigurationError(
                f"`{path}` cannot be read: {error}. HINT: remove it, and the step is done again."
            ) from error
        return value

    def write(self, name: str | Path, value: Mapping[str, Any]) -> None:
        """Write a JSON file so that after a crash either the old or the new one is there, whole."""
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / name, text.encode())

    def write_detection(self, value: Mapping[str, Any]) -> None:
        """Write the file of the detection, which has a score of each client."""
        register_derived(self.path / DETECTION, keys=("result", "scores"))
        self.write(DETECTION, value)

    def recorded(self, recording: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of the finished recording, or `None` if it is another one, or none.

        Args:
            recording: The `recording_part` of a recipe.
        """
        stored = self.read(RECORD)
        if stored is None:
            return None
        before, after = _compared(stored, recording)
        result: dict[str, Any] | None = stored.get("result")
        return result if before == after else None

    def result(self, name: str | Path, spec: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a finished step, or `None` if it was asked to do something else."""
        stored = self.read(name)
        if stored is None or not is_same(stored.get("spec"), spec):
            return None
        result: dict[str, Any] | None = stored.get("result")
        return result


def existing(path: str | Path) -> RunFolder:
    """Return an existing run folder.

    Raises:
        ConfigurationError: If there is no run folder at this path.
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
        elif folder.path.is_file():
            hint = f"`fedrec run {path}`, if that is a recipe, makes one and says where it is."
        raise ConfigurationError(
            expected("RUN", "a run folder (with recipe.yaml in it)", str(path), hint=hint)
        )
    return folder


def hash_of(spec: Mapping[str, Any]) -> str:
    """Return a hash of what a step depends on: 12 hexadecimal digits.

    Specs with the same meaning have the same hash. The order of keys does not matter, nor whether a
    class of fedrec is named by its short name or its dotted path, nor `init_args` that equal the
    class's defaults.

    Args:
        spec: The keys and values that the step depends on, such as a `recording_part`.

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
    """Return a spec in its canonical form: specs with the same meaning have the same one."""
    if not isinstance(spec, Mapping):
        return spec
    spec = json.loads(json.dumps(spec))
    if "history" in spec:  # a `recording_part`; that of an earlier fedrec says where the key lies
        spec["history"] = _stored(spec["history"])
    if "recoverer" in spec and "exclude" in spec:  # a `recovery_spec`, which has the clients itself
        spec["recover"] = _given(spec.get("recover"), FederatedLoop.recover, exclude="detected")
    return _short(spec, {"seed": spec.get("seed") or 0})


def _short(value: Any, of_data: Mapping[str, Any]) -> Any:
    """Shorten class paths, and leave out arguments that equal their defaults.

    `of_data` are the recipe's defaults for data modules, which go before those of the class.
    """
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
    families = [ClassFinder().known([base]) for base in _BASES]
    return {name: classes[0] for family in families for name, classes in family.items()}


def _compared(stored: Mapping[str, Any], recording: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the spec of a stored recording and a recipe's `recording_part`, to be compared.

    Once a recording is finished, its history may be made into shards or into one file, and several
    processes or one may recover from it: then that is no part of either.
    """
    specs = _canonical(stored.get("spec")), _canonical(recording)
    if "result" not in stored:
        return specs
    before, after = map(_without_shards, specs)
    return before, after


def _without_shards(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a canonical `recording_part` without the shards of the history."""
    loop = {k: v for k, v in (spec.get("loop") or {}).items() if k != "num_shards"}
    history = dict(spec.get("history") or {"class_path": "LMDBHistory"})
    if history["class_path"] == "ShardedHistory":
        history["class_path"] = "LMDBHistory"
    return {**spec, "loop": loop, "history": history}


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    if isinstance(value, Mapping) and value:
        parts = [_flatten(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()]
        return {k: v for part in parts for k, v in part.items()}
    return {key: value}
