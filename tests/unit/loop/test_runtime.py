"""Freed memory is used again."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from fedrec.loop.runtime import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(30):
    faults()
print(max(faults() for _ in range(10)))
"""


@pytest.mark.slow  # a process of its own, and gigabytes to write
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_pages_of_a_freed_tensor_are_not_mapped_again() -> None:
    """64 MiB are 16,384 pages of 4 KiB. Small blocks in between take a few turns to settle."""
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 100
