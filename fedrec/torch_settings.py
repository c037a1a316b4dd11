"""What torch is told for as long as a loop runs. Part of `FederatedLoop`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fedrec._allocator import keep_freed_memory
from fedrec.clients.state import forget_states
from fedrec.federation import Federation

if TYPE_CHECKING:
    from fedrec.loop import FederatedLoop

__all__ = ["torch_settings"]

_SMALL_MODEL = 20_000


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
