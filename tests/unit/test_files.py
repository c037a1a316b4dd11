"""Writing files: what is left when it fails, and what the error says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.exceptions import FileWriteError
from fedrec.recipe.failures import keep_failure


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: nothing that was written can be brought to it."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_named_and_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(FileWriteError) as caught:
        write_atomically(path, b"new")
    assert str(caught.value) == (
        f"`{path}` cannot be written: No space left on device. HINT: free space, and give the same "
        "command again: what is done is kept."
    )
    assert caught.value.errno == errno.ENOSPC
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"result.json": "old"}
    with pytest.raises(FileWriteError, match=r"derived\.jsonl` cannot be written: No space"):
        register_derived(path)


@pytest.mark.usefixtures("full")
def test_a_traceback_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    reason = keep_failure(ZeroDivisionError("by nothing"), tmp_path / "failure.txt", "failure.txt")
    assert reason.startswith("ZeroDivisionError: by nothing (without its traceback: `")
    assert "No space left on device" in reason


def test_a_path_through_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(FileWriteError) as caught:
        write_atomically(tmp_path / "afile" / "sub" / "x.json", b"{}")
    assert f"HINT: `{tmp_path / 'afile'}` is a file, not a folder" in str(caught.value)
