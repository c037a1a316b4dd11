"""What torch and the allocator are told for as long as a loop runs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

from fedrec.clients.state import forget_states
from fedrec.federation import Federation

if TYPE_CHECKING:
    from fedrec.loop import FederatedLoop

__all__ = ["keep_freed_memory", "torch_settings"]

_SMALL_MODEL = 20_000
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LIMIT = 1 << 30
_OLD_LIMIT = 32 << 20  # the most that older versions of glibc accept


@contextmanager
def torch_settings(loop: FederatedLoop, federation: Federation) -> Iterator[None]:
    """Set torch up for a loop, then leave its settings and the module as they were found."""
    before = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    tf32 = torch.backends.cudnn.allow_tf32
    layout, module = federation.layout, federation.module
    weights = layout.flatten(module)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    small = layout.num_parameters < _SMALL_MODEL
    torch.set_num_threads(loop.num_threads or (1 if small else threads))
    if loop.device.type == "cpu":
        keep_freed_memory()
    # On CUDA, convolutions would otherwise keep 10 bits of what "32-true" promises.
    torch.backends.cudnn.allow_tf32 = False
    if loop.deterministic:
        # What cuBLAS asks for before its results can be repeated.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    except BaseException as error:
        loop.call("on_exception", error)
        raise
    finally:
        forget_states()
        layout.load(module, weights)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        torch.backends.cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)
        for logger in loop.loggers:
            logger.save()


@cache
def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed memory, in this process and from now on.

    By default glibc returns large blocks to the kernel as soon as they are freed. A training step
    allocates the same ones again, and every page of them is cleared and mapped anew, which can
    take as long as the computing. Here blocks of up to 1 GiB are kept: the process holds on to
    what it needed at its peak, and to gaps between blocks (3 to 16% more with the paper's models).

    Returns:
        Whether that is in force; `False` with another C library, where nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    kept = libc.mallopt(_M_MMAP_THRESHOLD, _LIMIT) or libc.mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)
    return bool(kept and libc.mallopt(_M_TRIM_THRESHOLD, _LIMIT))
