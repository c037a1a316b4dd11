"""Starting the processes of a run, by Lightning Fabric."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from functools import cache

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy

from fedrec.distributed.ranks import Ranks
from fedrec.exceptions import ConfigurationError, FedrecWarning, expected

__all__ = ["launch"]


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
        fabric = Fabric(
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=DDPStrategy(timeout=timedelta(seconds=timeout)),
        )
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
    return Ranks(fabric.device)


def _require_as_started(devices: int, num_nodes: int) -> None:
    """Refuse to be one of several processes that do not know of each other."""
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and int(started) != devices * num_nodes:
        hint = "`loop.devices` and `loop.num_nodes` say what torchrun has started."
        requirement = f"such that devices * num_nodes is {started}"
        raise ConfigurationError(expected("devices", requirement, devices, hint=hint))
