"""Starting the processes of a run, by Lightning Fabric."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from fedrec.distributed.ranks import Ranks, failure_of
from fedrec.exceptions import ConfigurationError, FedrecWarning, expected

__all__ = ["launch"]

_BETWEEN_LOOKS = 0.2
# Seconds until a process that hangs is ended, when another has died.
_GRACE = 15.0
# Seconds that other processes have to end with this one.
_FOR_END = 5.0
# Seconds that processes have to start and find each other.
_FOR_START = 600.0


@cache
def launch(accelerator: str, devices: int, num_nodes: int, timeout: float) -> Ranks:
    """Start one process for each device, unless torchrun or SLURM have started them; join them.

    Once in a process: after that, the same is returned.

    The processes that are started run the same command from its beginning, and come here, too.

    Args:
        accelerator: `"cpu"` or `"cuda"`.
        devices: Processes on each node.
        num_nodes: Number of nodes.
        timeout: Seconds that a process waits for another.

    Raises:
        ConfigurationError: If the processes cannot be started, or there are others.
    """
    _require_as_started(devices, num_nodes)
    # They announce every process on the terminal.
    logs = [logging.getLogger(name) for name in ("lightning_fabric", "pytorch_lightning")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING)
    try:
        strategy = _Strategy(timeout=timedelta(seconds=max(timeout, _FOR_START)))
        fabric = Fabric(
            accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy
        )
        atexit.register(_end, strategy)
        fabric.launch()
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"Cannot start {devices * num_nodes} processes: {error}. HINT: in a notebook, use "
            "devices=1; on several nodes, start with torchrun or srun."
        ) from error
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
    if fabric.device.type == "cuda":
        torch.cuda.set_device(fabric.device)
    if fabric.global_rank > 0:
        # What rank 0 says, all others would say, too.
        logging.getLogger("fedrec").setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore", FedrecWarning)
    strategy.ranks = Ranks(fabric.device, timeout)
    return strategy.ranks


class _Launcher(_SubprocessScriptLauncher):
    """Starts processes as Lightning does, without its observer.

    When one of them dies, that would kill this process, too, before it can say why it ends.

    Args:
        strategy: Whose processes they are.
    """

    def __init__(self, strategy: _Strategy) -> None:
        environment = strategy.cluster_environment
        assert environment is not None
        super().__init__(environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            if sys.argv[0] in ("", "-", "-c"):
                raise RuntimeError("they run the same script again, and there is none")
            self._call_children_scripts()
            watch = threading.Thread(target=_watch, args=[self._strategy], daemon=True)
            watch.start()
        return function(*args, **kwargs)


class _Strategy(DDPStrategy):
    #: Known once all processes have found each other.
    ranks: Ranks | None = None

    @property
    def children(self) -> Sequence[subprocess.Popen[bytes]]:
        """The processes that this one has started."""
        return getattr(self._launcher, "procs", ())

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = _Launcher(self)


def _end(strategy: _Strategy) -> None:
    """Leave no process, and no thread, behind: processes that are well end with this one."""
    until = time.monotonic() + _FOR_END
    for child in strategy.children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))
    for child in strategy.children:
        child.kill()
    if strategy.ranks is not None:
        strategy.ranks.close()


def _watch(strategy: _Strategy) -> None:
    """Say which of the started processes has died; end this one if it does not notice."""
    while True:
        time.sleep(_BETWEEN_LOOKS)
        codes = [child.poll() for child in strategy.children]
        if all(code == 0 for code in codes):
            return
        dead = [(i, code) for i, code in enumerate(codes, start=1) if code]
        if not dead:
            continue
        place, code = dead[0]
        why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        rank = strategy.global_rank + place
        if strategy.ranks is not None:
            strategy.ranks.say_of(rank, why)
            time.sleep(_GRACE)  # for this process to raise an error
        sys.stderr.write(f"Error: {failure_of(rank, why)}\n")
        for child in strategy.children:
            child.kill()
        os._exit(1)


def _require_as_started(devices: int, num_nodes: int) -> None:
    """Refuse to be one of several processes that do not know of each other."""
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and int(started) != devices * num_nodes:
        hint = "`loop.devices` and `loop.num_nodes` say what torchrun has started."
        requirement = f"such that devices * num_nodes is {started}"
        raise ConfigurationError(expected("devices", requirement, devices, hint=hint))
