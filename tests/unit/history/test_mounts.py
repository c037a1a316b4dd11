"""On which file systems a history warns."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb import mounts
from fedrec.history.lmdb.mounts import file_system

MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
40 22 0:30 / /mnt rw - ext4 /dev/sdb1 rw
41 40 0:45 /export /mnt/my\040runs rw,relatime shared:3 master:1 - nfs4 server:/export rw,vers=4.2
42 41 8:3 / /mnt/my\040runs/local rw - xfs /dev/sdc rw
43 22 0:46 / /mnt/hidden rw - ext4 /dev/sdd rw
44 22 0:47 / /mnt/hidden rw - lustre 10.0.0.1@tcp:/fs rw
45 22 0:48 / /home/me/remote rw - fuse.sshfs me@host: rw
46 22 0:49 / /dev/shm rw - tmpfs tmpfs rw
47 22 0:50 / /run rw - ramfs none rw
a line that makes no sense
48 22 0:51 / /cut -
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    monkeypatch.setattr(mounts, "MOUNTS", path)
    monkeypatch.setattr(mounts, "_warned", set())
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/opt/runs", "ext4"),
        ("/mnt", "ext4"),
        ("/mnt/my runs", "nfs4"),
        ("/mnt/my runs/a/history", "nfs4"),
        ("/mnt/my runs/../x", "ext4"),
        ("/mnt/my runsX", "ext4"),
        ("/mnt/my runs/local/a", "xfs"),
        ("/mnt/hidden/a", "lustre"),
        ("/home/me/remote/a", "sshfs"),
        ("/dev/shm/a", "tmpfs"),
        ("/cut/a", "ext4"),
    ],
)
def test_the_longest_and_latest_mount_counts(fake: Path, path: str, kind: str) -> None:
    assert file_system(Path(path)) == kind


def test_where_nothing_is_known(tmp_path: Path) -> None:
    assert file_system(Path("/a"), tmp_path / "none") is None
    (tmp_path / "mounts").write_bytes(b"\xff\n\n - \n")
    assert file_system(Path("/a"), tmp_path / "mounts") is None


@pytest.mark.parametrize(
    ("kind", "told"),
    [("nfs4", "remote file system (nfs4)"), ("fuse.sshfs", "remote"), ("tmpfs", "in memory")],
)
def test_a_history_warns_once(
    fake: Path,
    tmp_path: Path,
    manifest: Manifest,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    told: str,
) -> None:
    fake.write_text(f"1 0 0:1 / {tmp_path}/runs rw - {kind} x rw\n2 0 0:2 / / rw - ext4 y rw\n")
    with caplog.at_level(logging.WARNING, "fedrec"):
        for _ in range(2):
            store = LMDBHistory(tmp_path / "runs" / "history")
            if store.is_empty:
                store.begin(manifest)
            assert store.rounds() == range(0)
            store.close()
        assert [told in record.message for record in caplog.records] == [True]
        store = LMDBHistory(tmp_path / "local")
        store.begin(manifest)
        store.close()
        assert len(caplog.records) == 1
