"""`fedrec doctor`: what fedrec finds on this machine, and what keeps it from working here.

Imports nothing that may be missing or broken before it is looked at.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedrec import __version__
from fedrec.cli.output import lines_of, write_json
from fedrec.cli.parser import Options

__all__ = ["Diagnosis", "Problem", "diagnose", "execute"]

# Distributions that fedrec needs, with the module to import.
_NEEDED = {
    "torch": "torch",
    "pytorch-lightning": "pytorch_lightning",
    "torchmetrics": "torchmetrics",
    "numpy": "numpy",
    "lmdb": "lmdb",
    "xxhash": "xxhash",
    "lz4": "lz4.frame",
    "zstandard": "zstandard",
    "omegaconf": "omegaconf",
    "scikit-learn": "sklearn",
    "rich": "rich",
    "click": "click",
}
# Optional distributions by extra, and what they are for.
_OPTIONAL = {
    "speed": {"numba": "compiled kernels: faster medians, estimates and convolutions"},
    "plot": {"matplotlib": "fedrec plot"},
    "pandas": {"pandas": "to_pandas of results and histories"},
    "encryption": {"cryptography": "encrypted histories"},
    "loggers": {
        "tensorboard": "TensorBoardLogger",
        "wandb": "WandbLogger",
        "mlflow": "MLFlowLogger",
    },
    "flower": {"flwr": "federations of Flower"},
}
_WIDTH = 60
_GIB = 1 << 30
_LEAST_FREE = 200 << 20  # what the quickstart takes
_LITTLE_FREE = 2 * _GIB
_BLOCK = 4 << 20
_MOST_BLOCKS = 16
_SECONDS = 0.4  # for each of the two measurements of the disk
_SLOW_COMMIT = 0.05
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
_NVIDIA = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    Args:
        text: What was found.
        hint: One thing to do about it.
        stops: Whether fedrec does not work until that is done.
    """

    text: str
    hint: str
    stops: bool = False


@dataclass
class Diagnosis:
    """What was found, by section and name, and what is wrong with it.

    Args:
        sections: Plain values.
        problems: In the order they were found.
    """

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether nothing keeps fedrec from working."""
        return not any(problem.stops for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        problems = [asdict(problem) for problem in self.problems]
        return {"works": self.works, **self.sections, "problems": problems}

    def add(self, text: str, hint: str, *, stops: bool = False) -> None:
        """Add a problem."""
        self.problems.append(Problem(text, hint, stops))


def execute(args: Options) -> int:
    """Look at everything, print it, and return the exit code."""
    logging.disable(logging.WARNING)  # dependencies talk when they are imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = diagnose(Path.cwd())
    finally:
        logging.disable(logging.NOTSET)
    if args.json:
        write_json(found.to_dict())
    else:
        sys.stdout.write(_text(found) + "\n")
    return 0 if found.works else 1


def diagnose(directory: Path) -> Diagnosis:
    """Look at packages, devices, threads, a directory, extras and compiled kernels.

    Args:
        directory: Where runs are to lie. A few MB are written to it and removed again.
    """
    found = Diagnosis()
    _versions(found)
    _devices(found)
    _threads(found)
    _directory(found, directory)
    _extras(found)
    _kernels(found)
    return found


def _versions(found: Diagnosis) -> None:
    rows: dict[str, Any] = {"fedrec": __version__, "python": platform.python_version()}
    ranges = _ranges()
    for name, module in _NEEDED.items():
        hint = f"`pip install --upgrade {name}`."
        try:
            importlib.import_module(module)
            rows[name] = metadata.version(name)
        except Exception as error:  # noqa: BLE001 - a broken package may raise anything
            rows[name] = None
            what = f"Expected `{name}` to be installed and to work, but importing it failed"
            found.add(f"{what}: {error}.", hint, stops=True)
            continue
        if name in ranges and not ranges[name].contains(rows[name], prereleases=True):
            what = f"Expected `{name}` to be {ranges[name]}, but it is {rows[name]}."
            found.add(what, f"`pip install '{name}{ranges[name]}'`.", stops=True)
    found.sections["versions"] = rows


def _ranges() -> Mapping[str, Any]:
    """Return the versions that fedrec asks for; none if it runs from a folder of sources."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(text) for text in metadata.requires("fedrec") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    return {requirement.name: requirement.specifier for requirement in needed}


def _devices(found: Diagnosis) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    names = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            names.append(f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB")
    elif _NVIDIA.exists():
        built = torch.version.cuda
        what = f"built for CUDA {built}" if built else "built without CUDA"
        found.add(
            f"There is an NVIDIA device, but torch ({what}) cannot use it.",
            "`nvidia-smi` names the driver's CUDA version; install a torch built for it.",
        )
    used = "cuda" if names else "cpu"
    found.sections["devices"] = {"used": used, "cuda": names, "torch built for": torch.version.cuda}


def _threads(found: Diagnosis) -> None:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    allowed = allowed or 1
    quota = _quota()
    usable = allowed if quota is None else max(1, min(allowed, math.ceil(quota)))
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    omp = os.environ.get("OMP_NUM_THREADS")
    found.sections["threads"] = {
        "cores": os.cpu_count(),
        "allowed by affinity": allowed,
        "allowed by cgroup": quota,
        "torch": threads,
        "OMP_NUM_THREADS": omp,
    }
    if threads is not None and threads > usable:
        found.add(
            f"torch computes with {threads} threads, but this process may use {usable} cores: "
            "threads that wait for each other slow it down.",
            f"`export OMP_NUM_THREADS={usable}`.",
        )


def _quota(files: Path = _CGROUP, process: Path = _CGROUP_OF_PROCESS) -> float | None:
    """Return the number of cores that control groups allow, or `None` if they do not limit it."""
    try:
        lines = process.read_text().splitlines()
    except OSError:  # not Linux
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        v1 = "cpu" in controllers.split(",")
        if controllers and not v1:
            continue
        top = files / "cpu" if v1 else files
        group = top / path.lstrip("/")
        # In a container, the path may be that of the host, while the files are those of the group.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                if v1:
                    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                    amount, period = [(folder / name).read_text().strip() for name in names]
                else:
                    amount, period = (folder / "cpu.max").read_text().split()
            except (OSError, ValueError):
                continue
            if amount not in ("max", "-1"):
                limits.append(int(amount) / int(period))
    return min(limits, default=None)


def _directory(found: Diagnosis, directory: Path) -> None:
    from fedrec.history.lmdb.mounts import MEMORY, REMOTE, file_system

    kind = file_system(directory)
    free = shutil.disk_usage(directory).free
    rows: dict[str, Any] = {"path": str(directory), "file system": kind, "free bytes": free}
    found.sections["directory"] = rows
    elsewhere = "give `--output-dir` a folder on a local disk."
    if kind in REMOTE:
        what = f"The working directory is on a remote file system ({kind}), where the locks and "
        what += "memory map of a history may not hold."
        found.add(what, elsewhere)
    elif kind in MEMORY:
        found.add(
            f"The working directory is in memory ({kind}): histories take that from training.",
            elsewhere,
        )
    if free < _LITTLE_FREE:
        what = f"{free / _GIB:.1f} GiB of disk are free; the quickstart takes 0.2 GiB."
        found.add(what, f"free some, or {elsewhere}", stops=free < _LEAST_FREE)
        if free < _LEAST_FREE:
            return
    try:
        with tempfile.TemporaryDirectory(prefix=".fedrec-doctor-", dir=directory) as folder:
            speed = _written_per_second(Path(folder) / "written")
            seconds = _seconds_per_commit(Path(folder))
    except Exception as error:  # noqa: BLE001 - an LMDB that is broken may raise anything
        what = f"A history cannot be written to the working directory: {error}."
        found.add(what, elsewhere, stops=True)
        return
    rows |= {"bytes per second": speed, "seconds per commit": seconds}
    if seconds > _SLOW_COMMIT:
        found.add(
            f"A transaction takes {seconds:.2f} s until it is on the disk, and "
            "each recorded round is one.",
            "give `--output-dir` a folder on a faster disk.",
        )


def _written_per_second(path: Path) -> float:
    block, written, began = os.urandom(_BLOCK), 0, time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(_MOST_BLOCKS):
            file.write(block)
            os.fsync(file.fileno())
            written += _BLOCK
            seconds = time.perf_counter() - began
            if seconds > _SECONDS:
                break
    path.unlink()
    return round(written / seconds)


def _seconds_per_commit(folder: Path) -> float:
    """Return how long LMDB takes to make a small transaction durable; the median of a few."""
    import lmdb

    took: list[float] = []
    with lmdb.open(str(folder), map_size=1 << 20) as environment:
        while len(took) < 32 and sum(took) < _SECONDS:
            began = time.perf_counter()
            with environment.begin(write=True) as txn:
                txn.put(b"key", len(took).to_bytes(8, "big"))
            took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def _extras(found: Diagnosis) -> None:
    rows: dict[str, Any] = {}
    for extra, packages in _OPTIONAL.items():
        for name, purpose in packages.items():
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                version = None
            rows[name] = {"version": version, "extra": extra, "for": purpose}
    found.sections["extras"] = rows


def _kernels(found: Diagnosis) -> None:
    """Try the compiled kernels, which compiles what is not in numba's cache."""
    if found.sections["extras"]["numba"]["version"] is None or not found.works:
        found.sections["kernels"] = {"work": False, "kept in": None}
        return
    from fedrec.executors.winners import kernels
    from fedrec.functional.aggregation.order_statistics import use_kernel

    try:
        with use_kernel("numba"):
            functions = kernels()
    except ImportError:
        functions = None
    if functions is None:
        found.sections["kernels"] = {"work": False, "kept in": None}
        what = "numba is installed, but its kernels do not work here; NumPy and torch are used."
        found.add(what, "`pip install --upgrade numba`.")
        return
    places = {function.stats.cache_path for function in functions.values()}
    kept = str(min(places)) if None not in places else None
    found.sections["kernels"] = {"work": True, "kept in": kept}
    if kept is None:
        found.add(
            "Compiled kernels cannot be kept, and are compiled again by every command.",
            "`export NUMBA_CACHE_DIR=` and a folder that you may write to.",
        )


def _text(found: Diagnosis) -> str:
    """Return everything as lines of at most 60 letters, where words allow for it."""
    lines: list[str] = []
    sections = found.sections
    _add(lines, "Versions", {k: v or "does not work" for k, v in sections["versions"].items()})
    devices = sections.get("devices", {})
    if devices:
        cuda = devices["torch built for"]
        rows = {"used": devices["used"], "torch": f"for CUDA {cuda}" if cuda else "without CUDA"}
        _add(lines, "Devices", rows | {f"cuda:{i}": d for i, d in enumerate(devices["cuda"])})
    threads, quota = sections["threads"], sections["threads"]["allowed by cgroup"]
    omp = threads["OMP_NUM_THREADS"]
    cores = f"{threads['allowed by affinity']} of {threads['cores']} allowed"
    _add(
        lines,
        "Threads",
        {
            "cores": cores if quota is None else f"{cores}, cgroup allows {quota:g}",
            "torch": threads["torch"],
            "OMP": "not set" if omp is None else f"OMP_NUM_THREADS={omp}",
        },
    )
    place = sections["directory"]
    rows = {
        "path": place["path"],
        "file system": place["file system"] or "not known",
        "free": f"{place['free bytes'] / _GIB:,.1f} GiB",
    }
    if "seconds per commit" in place:
        rows["writes"] = f"{place['bytes per second'] / 1e6:,.0f} MB/s"
        rows["a commit"] = f"{1000 * place['seconds per commit']:.1f} ms, as each recorded round"
    _add(lines, "Working directory", rows)
    extras = {}
    for name, about in sections["extras"].items():
        missing = f"missing, for {about['for']}: pip install 'fedrec[{about['extra']}]'"
        extras[name] = about["version"] or missing
    kernels = sections["kernels"]
    extras["kernels"] = "compiled" if kernels["work"] else "not compiled"
    if kernels["work"] and kernels["kept in"] is None:
        extras["kernels"] = "compiled, for this process only"
    _add(lines, "Extras", extras)
    if found.problems:
        lines += ["Problems"]
        for problem in found.problems:
            text = f"{problem.text} HINT: {problem.hint}"
            lines += _wrapped(text, "  ! " if problem.stops else "  - ", "    ")
    end = "fedrec works here." if found.works else "fedrec does not work here: see what is marked !"
    return "\n".join([*lines, end])


def _add(lines: list[str], title: str, rows: Mapping[str, Any]) -> None:
    lines.append(title)
    label = max(map(len, rows))
    for name, value in rows.items():
        before = f"  {name:<{label}}  "
        lines += _wrapped(str(value), before, " " * len(before))


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return lines_of(text, _WIDTH, first, others)
