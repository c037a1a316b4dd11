"""`fedrec doctor`: what it finds, and what it makes of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from fedrec.cli import doctor
from fedrec.cli.main import main
from fedrec.history.lmdb import mounts

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_SECONDS", 1e-9)  # a block and a transaction, whatever they take
    monkeypatch.setattr(doctor, "_SLOW_COMMIT", float("inf"))
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor, "_LITTLE_FREE", 0)
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    _mount("ext4")


def _mount(kind: str) -> None:
    mounts.MOUNTS.write_text(f"1 0 8:1 / / rw - {kind} /dev/sda1 rw\n")


def _problems(found: doctor.Diagnosis) -> list[tuple[str, bool]]:
    return [(problem.text.partition(":")[0], problem.stops) for problem in found.problems]


def test_a_machine_without_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_kernels", _no_kernels)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True
    assert found["problems"] == []
    assert found["directory"]["file system"] == "ext4"
    assert found["directory"]["path"] == str(tmp_path)
    assert found["directory"]["bytes per second"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mounts"]  # it leaves nothing behind
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("fedrec works here.\n")
    own = str(tmp_path)
    assert max(len(line) for line in text.splitlines() if own not in line) <= 60


def _no_kernels(found: doctor.Diagnosis) -> None:
    found.sections["kernels"] = {"work": True, "kept in": "cache"}


def test_it_looks_at_all_that_pyproject_names_for_users() -> None:
    def names(texts: list[str]) -> set[str]:
        return {Requirement(text).name for text in texts}

    assert set(doctor._NEEDED) == names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    for_users = {extra: names(extras[extra]) for extra in extras if extra not in ("docs", "dev")}
    assert {extra: set(packages) for extra, packages in doctor._OPTIONAL.items()} == for_users


def test_what_is_missing_or_too_old_stops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from packaging.specifiers import SpecifierSet

    monkeypatch.setattr(doctor, "_NEEDED", {"lmdb": "lmdb", "absent": "no_such_module"})
    monkeypatch.setattr(doctor, "_ranges", lambda: {"lmdb": SpecifierSet(">=99")})
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    old, absent = found["problems"]
    assert old["text"].startswith("Expected `lmdb` to be >=99, but it is ")
    assert old["hint"] == "`pip install 'lmdb>=99'`."
    assert absent["text"].endswith("failed: No module named 'no_such_module'.")
    assert [old["stops"], absent["stops"]] == [True, True]
    assert found["versions"]["absent"] is None
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("fedrec does not work here: see what is marked !\n")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nfs4", "The working directory is on a remote file system (nfs4)"),
        ("tmpfs", "The working directory is in memory (tmpfs)"),
    ],
)
def test_a_file_system_that_is_not_safe(kind: str, said: str, tmp_path: Path) -> None:
    _mount(kind)
    found = doctor.Diagnosis()
    doctor._directory(found, tmp_path)
    assert [(p.text.startswith(said), p.stops) for p in found.problems] == [(True, False)]


def test_a_full_disk_and_a_folder_that_cannot_be_written_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "_seconds_per_commit", refuse)
    found = doctor.Diagnosis()
    doctor._directory(found, tmp_path)
    assert _problems(found) == [("A history cannot be written to the working directory", True)]
    monkeypatch.setattr(doctor, "_LITTLE_FREE", 1 << 80)
    monkeypatch.setattr(doctor, "_LEAST_FREE", 1 << 80)
    found = doctor.Diagnosis()
    doctor._directory(found, tmp_path)
    assert [problem.stops for problem in found.problems] == [True]


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor, "_quota", lambda: 2.5)
    found = doctor.Diagnosis()
    doctor._threads(found)
    (problem,) = found.problems
    assert problem.text.startswith("torch computes with 64 threads, but this process may use 3")
    assert problem.hint == "`export OMP_NUM_THREADS=3`."


@pytest.mark.parametrize(
    ("process", "files", "quota"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/host/path\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        (
            "4:cpu,cpuacct:/x\n2:memory:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_that_a_control_group_allows(
    process: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "process").write_text(process)
    assert doctor._quota(tmp_path / "cgroup", tmp_path / "process") == quota


class _Stats:
    cache_path: Any = None


class _Function:
    stats = _Stats()


def test_kernels_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("fedrec.executors.winners.kernels", lambda: {"f": _Function()})
    found = doctor.Diagnosis()
    doctor._extras(found)
    doctor._kernels(found)
    assert found.sections["kernels"] == {"work": True, "kept in": None}
    assert [problem.stops for problem in found.problems] == [False]
    monkeypatch.setattr("fedrec.executors.winners.kernels", lambda: None)
    found.problems.clear()
    doctor._kernels(found)
    assert found.sections["kernels"]["work"] is False
    assert "its kernels do not work here" in found.problems[0].text
