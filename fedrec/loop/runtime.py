"""The common part of a loop's runs: device, torch's settings, hooks, curves, files, plan."""

from __future__ import annotations

import copy
import ctypes
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.utils.data import Dataset

from fedrec._guard import left_alone
from fedrec.attacks.base import Attack
from fedrec.callbacks.callback import LoopSettings
from fedrec.clients.fake import FakeClient
from fedrec.clients.lightning import LightningClient
from fedrec.clients.state import forget_states
from fedrec.distributed.launch import launch
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.exceptions import ConfigurationError, expected
from fedrec.executors import Executor, SequentialExecutor, VectorizedExecutor
from fedrec.executors.sharded import ShardedExecutor
from fedrec.federation import Federation
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.functional.kernels._threads import default_threads
from fedrec.history.base import HistoryStore
from fedrec.loop.evaluation import (
    check_evaluation,
    evaluate,
    fixed_subset,
    keep_to_oneself,
)
from fedrec.loop.footprint import num_bytes_text
from fedrec.loop.loggers import prepare
from fedrec.loop.logs import MetricsLog
from fedrec.loop.plan import plan_text
from fedrec.loop.round import Engine
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["Runtime", "default_shards", "keep_freed_memory"]

_log = logging.getLogger(__name__)

_DEV_ROUNDS = 3
# Shards on several devices, unless told otherwise: a number that many numbers of ranks divide.
_SHARDS = 8
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LIMIT = 1 << 30
_OLD_LIMIT = 32 << 20  # the most that older versions of glibc accept


class Runtime:
    """The common part of a loop's runs: how they are computed, tested and logged.

    Args:
        settings: The loop's arguments. They are read when they are needed, and handed to hooks.

    Attributes:
        can_do_without_ter: Whether the test error rate may be undefined, since other metrics are
            computed.
    """

    def __init__(self, settings: LoopSettings) -> None:
        self.settings = settings
        self.can_do_without_ter = bool(settings.metrics)
        self._announced = ""
        self._subset: tuple[object, Any] | None = None

    # -- where and how to compute ---------------------------------------------------------------

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the run, which are started now unless they are there."""
        settings = self.settings
        if settings.devices * settings.num_nodes == 1:
            return Ranks()
        return launch(self._accelerator, settings.devices, settings.num_nodes, settings.timeout)

    @property
    def _accelerator(self) -> str:
        on_cuda = self.settings.accelerator != "cpu" and torch.cuda.is_available()
        return "cuda" if on_cuda else "cpu"

    @cached_property
    def device(self) -> torch.device:
        """The device of all tensors, as Lightning Fabric chooses it."""
        if self.ranks.size > 1:
            return self.ranks.device
        # Precision is applied by `autocast` below; Fabric would announce it on the terminal.
        return Fabric(accelerator=self._accelerator, devices=1).device

    def shard(self, client_ids: Sequence[str], recorded: int | None = None) -> Sharding | None:
        """Return the shards of the clients; `None` where there is one shard and one process.

        Shards are computed with one thread until the end of the run, unless the loop says more.

        Args:
            client_ids: All clients of the recording.
            recorded: The number of shards of an existing recording.

        Raises:
            ConfigurationError: If there are more processes than shards, or more shards than
                clients.
        """
        ranks, number = self.ranks, recorded or self.settings.num_shards
        if number is None:
            number = min(default_shards(ranks.size), len(client_ids))
        elif self.settings.num_shards not in (None, number):
            raise ConfigurationError(
                expected("num_shards", f"{number}, as in the recording", self.settings.num_shards)
            )
        if number == ranks.size == 1:
            return None
        if self.settings.num_threads is None:
            torch.set_num_threads(1)  # however many cores a rank has
        ids = tuple(client_ids)
        return Sharding(client_ids=ids, num_shards=number, rank=ranks.rank, size=ranks.size)

    @property
    def autocast(self) -> Any:
        """Makes the context manager of the chosen precision."""
        if self.settings.precision == "32-true":
            return nullcontext
        device = self.device.type
        return lambda: torch.autocast(device, dtype=torch.bfloat16)

    @contextmanager
    def running(
        self, federation: Federation, history: HistoryStore | None = None
    ) -> Iterator[None]:
        """Set torch up for a run; restore its settings and the module on exit.

        If the run ends by an error, callbacks get it.

        Args:
            federation: The clients, the model, the test data.
            history: The store that is written or read; callbacks may look at it meanwhile.
        """
        if history is not None:
            history.attach(self.ranks)
        before = torch.are_deterministic_algorithms_enabled()
        threads = torch.get_num_threads()
        tf32 = torch.backends.cudnn.allow_tf32
        layout, module = federation.layout, federation.module
        if self.ranks.size > 1:
            trained = {c.module for c in federation.clients if isinstance(c, LightningClient)}
            keep_to_oneself(module, *trained)
        weights = layout.flatten(module)
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        torch.set_num_threads(
            self.settings.num_threads or default_threads(layout.num_parameters, threads)
        )
        if self.device.type == "cpu":
            keep_freed_memory()
        # With TF32, convolutions on CUDA would have 10 bits of precision instead of 23.
        torch.backends.cudnn.allow_tf32 = False
        if self.settings.deterministic:
            # cuBLAS needs this setting for deterministic results.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        prepare(self.loggers)
        self.settings.history = history
        status = "failed"
        try:
            yield
            status = "success"
        except BaseException as error:
            self.ranks.leave(error)
            self.log_error(error)
            self.call("on_exception", error)
            raise
        finally:
            self.settings.history = None
            forget_states()
            layout.load(module, weights)
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])
            torch.backends.cudnn.allow_tf32 = tf32
            torch.use_deterministic_algorithms(before)
            torch.set_num_threads(threads)
            for logger in self.loggers:
                logger.finalize(status)

    def choose_executor(self, sharding: Sharding | None) -> Executor:
        """Return the executor that the loop's argument `executor` names.

        Args:
            sharding: The shards, each of which gets an executor of its own; or `None`.
        """
        executor = self.settings.executor
        if sharding is not None:
            return ShardedExecutor(make=self._make_executor, sharding=sharding, ranks=self.ranks)
        return executor if isinstance(executor, Executor) else self._make_executor()

    def _make_executor(self) -> Executor:
        executor = self.settings.executor
        if isinstance(executor, Executor):
            return copy.deepcopy(executor)
        if executor == "sequential":
            return SequentialExecutor()
        return VectorizedExecutor(warn=executor == "vectorized")

    def plan(
        self, engine: Engine, global_weights: Tensor, client_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Let the executor choose its path, and return the execution plan.

        The plan has everything that the bits of a result depend on, besides its seed.

        Args:
            engine: Computes the rounds.
            global_weights: Shape $(d,)$.
            client_ids: All clients that take part.
        """
        ids = list(client_ids)
        ctx = engine.context(0, ids, global_weights)
        clients = [engine.clients[c] for c in ids]
        real = [c for c in clients if not isinstance(c, FakeClient)]
        return {
            "device": self.device.type,
            "precision": self.settings.precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **engine.executor.plan(real or clients, global_weights, ctx),
            "kernel": choose_kernel(self.device, len(ids), global_weights.numel()),
        }

    def limit(self, max_rounds: int) -> int:
        """Return the number of rounds, limited by `fast_dev_run`."""
        limit = self.settings.fast_dev_run
        return min(max_rounds, _DEV_ROUNDS if limit is True else limit) if limit else max_rounds

    # -- callbacks and logs ---------------------------------------------------------------------

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback; they must leave alone what they are shown."""
        shown: dict[str, Tensor] = {}
        for arg in args:
            if isinstance(arg, RoundContext):
                shown["global_weights"] = arg.global_weights
            elif isinstance(arg, CohortUpdates):
                shown["updates"] = arg.in_process().updates
        with left_alone(f"`{hook}` of callbacks", ConfigurationError, **shown):
            for callback in self.settings.callbacks:
                getattr(callback, hook)(self.settings, *args)

    def announce(self, plan: Mapping[str, Any], num_bytes: int) -> None:
        """Log how updates are computed, and their memory, unless the same was logged before."""
        text = plan_text(plan)
        if text != self._announced:
            self._announced = text
            _log.info("%s; about %s of memory for updates.", text, num_bytes_text(num_bytes))

    @property
    def loggers(self) -> list[Any]:
        """Lightning's loggers; metrics.csv is written beside them."""
        logger = self.settings.logger
        if isinstance(logger, bool) or logger is None or self.settings.fast_dev_run:
            return []
        if not self.ranks.is_first:
            return []
        return list(logger) if isinstance(logger, (list, tuple)) else [logger]

    @property
    def folder(self) -> Path | None:
        """The run folder, or `None` if nothing is to be written by this process."""
        return self.own_folder if self.ranks.is_first else None

    @property
    def own_folder(self) -> Path | None:
        """The run folder, where each process keeps what it has of its own clients, or `None`."""
        return None if self.settings.fast_dev_run else self.settings.default_root_dir

    def log_error(self, error: BaseException) -> None:
        """Write why this process leaves, where there are several, to a file of its own."""
        folder = self.settings.default_root_dir
        if self.ranks.size > 1 and folder is not None and isinstance(error, Exception):
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(traceback.format_exception(error))
            (folder / f"rank-{self.ranks.rank}.log").write_text(text, encoding="utf-8")

    def metrics_log(self, folder: Path | None, prefix: str, first_round: int) -> MetricsLog:
        """Return the log for the figures of a run.

        Args:
            folder: The folder of metrics.csv, or `None` for no file.
            prefix: Prefix of the names that loggers get.
            first_round: The round that the run begins with.
        """
        path = folder / "metrics.csv" if folder and self.settings.logger is not False else None
        return MetricsLog(path, self.loggers, prefix, first_round, self.settings.metrics)

    # -- tests ----------------------------------------------------------------------------------

    def check_evaluation(self, federation: Federation, attack: Attack | None) -> None:
        """Refuse, before anything is trained, a model and data that cannot be tested.

        Raises:
            ConfigurationError: As in `evaluate`.
        """
        federation.module.to(self.device)
        check_evaluation(
            federation,
            attack=attack,
            device=self.device,
            metrics=self.settings.metrics,
            can_do_without=self.can_do_without_ter,
        )

    def evaluate(
        self,
        federation: Federation,
        dataset: Dataset[Any],
        global_weights: Tensor,
        attack: Attack | None,
        buffers: Tensor | None,
    ) -> dict[str, float | None]:
        """Compute error rates and the loop's metrics, see `fedrec.loop.evaluation.evaluate`."""
        return evaluate(
            federation,
            dataset,
            global_weights,
            attack=attack,
            buffers=buffers,
            device=self.device,
            metrics=self.settings.metrics,
            can_do_without=self.can_do_without_ter,
        )

    def evaluate_curve(
        self,
        federation: Federation,
        global_weights: Tensor,
        attack: Attack | None,
        buffers: Tensor | None,
    ) -> dict[str, float]:
        """Return the results on the fixed subset of the test data; empty without test data."""
        whole = federation.test_dataset
        if whole is None:
            return {}
        if self._subset is None or self._subset[0] is not whole:
            settings = self.settings
            self._subset = whole, fixed_subset(whole, settings.eval_samples, settings.seed)
        subset = self._subset[1]
        values = self.ranks.once(
            lambda: self.evaluate(federation, subset, global_weights, attack, buffers)
        )
        return {name: value for name, value in values.items() if value is not None}

    def evaluates(self, t: int, max_rounds: int) -> bool:
        """Whether the curve has a point after round `t`."""
        every = self.settings.eval_every or math.ceil(max_rounds / 20)
        return (t + 1) % every == 0 or t == max_rounds - 1


def default_shards(num_ranks: int) -> int:
    """Return the number of shards for so many processes, where nothing else is said."""
    return 1 if num_ranks == 1 else max(_SHARDS, num_ranks)


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
    # A thread that has an arena of its own, as one that reads rounds, would give its blocks back.
    kept = kept and libc.mallopt(_M_ARENA_MAX, 1)
    return bool(kept and libc.mallopt(_M_TRIM_THRESHOLD, _LIMIT))
