"""The rule that chooses how a cohort is computed, and the trial of what it chose."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedrec.clients.batches import is_plain
from fedrec.clients.local import LogMeans
from fedrec.clients.state import ModuleState
from fedrec.executors.batches import CannotJoinError
from fedrec.executors.cohort import Cohort, Train
from fedrec.executors.grouped import refuse_shared_parameters, train_grouped
from fedrec.executors.kinds import CannotGroupError
from fedrec.executors.sequential import SequentialExecutor
from fedrec.executors.stacked import train_stacked
from fedrec.executors.tight_loop import train_in_a_loop
from fedrec.executors.watch import SampleWatch, refuse_hooks, traceless

__all__ = ["PATHS", "Choice", "choose", "reason_of"]

PATHS: dict[str, Train] = {
    "grouped": train_grouped,
    "vmap": train_stacked,
    "loop": train_in_a_loop,
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLED = (nn.Conv1d, nn.Conv2d)
_NUM_TRIED = 8
# Bytes of a chunk: activations ("grouped"), copies of the weights ("vmap").
_BUDGET_ON_CPU = 256 << 20
_BUDGET_ELSEWHERE = 2 << 30
# Bytes of one client's activations from which on convolutions take no less time for several clients
# at once than for one: what is between them waits for memory, and oneDNN has enough to do with one.
_LARGE_ACTIVATIONS = 16 << 20


@dataclass(frozen=True)
class Choice:
    """A path, how many clients it takes at once, and why those before it were refused.

    For `"grouped"` also whether the loss is a sum over samples, and no mean, and which convolutions
    are computed by their winners.
    """

    path: str
    chunk_size: int | None = None
    refusals: tuple[str, ...] = ()
    is_sum: bool | None = None
    winners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path, for people and for manifests."""
        return f"{self.path} (winners)" if self.winners else self.path

    @property
    def train(self) -> Train:
        """The path's function."""
        if self.path == "grouped":
            return partial(train_grouped, is_sum=self.is_sum, winners=self.winners)
        return PATHS[self.path]


def choose(
    cohort: Cohort, state: ModuleState, *, direct: bool, elementwise: bool, path: str
) -> Choice:
    """Choose a path by the rule that `VectorizedExecutor` describes, and try it.

    Args:
        cohort: Clients of one kind.
        state: Of their module, as it was handed over.
        direct: Whether they take one step of plain SGD.
        elementwise: Whether the optimiser can step stacked weights.
        path: `"auto"`, or the only one to try.
    """
    candidates = ["grouped", "vmap", "loop"] if direct else ["vmap"]
    convolves = any(isinstance(layer, _CONVOLUTIONS) for layer in cohort.module.modules())
    if path != "auto":
        candidates = [path]
    elif convolves and cohort.ctx.device.type == "cpu":
        candidates.remove("vmap")
    refusals: list[str] = []
    slower: Choice | None = None
    trial = _Trial(cohort, state)
    for candidate in candidates:
        if candidate != "vmap" and not direct:
            reason: str | None = "it is for one step of plain SGD"
        elif candidate == "vmap" and not elementwise:
            reason = "the optimizer does not work elementwise"
        else:
            reason = trial.objection(candidate)
        if reason is None:
            size = trial.chunk_size(candidate)
            found = Choice(candidate, size, tuple(refusals), trial.is_sum, trial.winners)
            if path != "auto" or not (candidate == "grouped" and convolves and trial.is_slow):
                return found
            slower = found
            continue
        refusals.append(f"{candidate}: {reason}")
    return slower or Choice("sequential", refusals=tuple(refusals))


def reason_of(error: Exception) -> str:
    """Say why a path cannot be taken, in words that are the same in every process."""
    if isinstance(error, (CannotGroupError, CannotJoinError)):
        return str(error)
    first_line = re.sub(r"0x[0-9a-f]+", "0x", (str(error).splitlines() or [""])[0])
    return f"its training_step fails there ({type(error).__name__}: {first_line})"


class _Trial:
    """Compares paths with the SequentialExecutor on a few clients."""

    def __init__(self, cohort: Cohort, state: ModuleState) -> None:
        count = len(cohort.clients)
        self.largest = max(len(steps[0]) for steps in cohort.batches)
        rows = [i * count // _NUM_TRIED for i in range(_NUM_TRIED)] if count > _NUM_TRIED else None
        self.clients = cohort.clients
        self.cohort = cohort if rows is None else cohort.select(rows)
        self.state = state
        self.num_parameters = cohort.global_weights.numel()
        self.bytes_per_sample = 1.0
        self.is_sum: bool | None = None
        self.winners: tuple[str, ...] = ()
        self.reference = SequentialExecutor().compute(
            self.cohort.clients, cohort.global_weights, cohort.ctx
        )
        state.restore()

    @property
    def is_slow(self) -> bool:
        """Whether `"grouped"` takes no less time than a loop, for a module with convolutions."""
        on_cpu = self.cohort.ctx.device.type == "cpu"
        large = self.bytes_per_sample * self.largest > _LARGE_ACTIVATIONS
        return on_cpu and large and not self.winners

    def chunk_size(self, path: str) -> int | None:
        """Return how many clients keep a chunk within the budget."""
        per_client = {
            "grouped": self.bytes_per_sample * self.largest,
            "vmap": 16 * self.num_parameters,
        }
        if path not in per_client:
            return None
        on_cpu = self.cohort.ctx.device.type == "cpu"
        budget = _BUDGET_ON_CPU if on_cpu else _BUDGET_ELSEWHERE
        return max(1, int(budget // per_client[path]))

    def objection(self, path: str) -> str | None:
        """Say why a path is not right for these clients, or `None`."""
        convolves = any(isinstance(layer, _POOLED) for layer in self.cohort.module.modules())
        if path == "grouped" and convolves:
            if self._objection(path, winners=None) is None and self.winners:
                return None
            self.winners = ()
        return self._objection(path, winners=())

    def _objection(self, path: str, winners: tuple[str, ...] | None) -> str | None:
        train, watches = PATHS[path], list[SampleWatch]()
        if path == "grouped":
            train = partial(train_grouped, watches=watches, winners=winners)
        try:
            if path != "loop":
                refuse_hooks(self.cohort.module)
            if path == "grouped":
                refuse_shared_parameters(self.cohort.module)
            with traceless(self.state):
                updates, metrics = _run(train, self.cohort)
        except Exception as error:  # noqa: BLE001 - whatever vmap or the module makes of it
            return reason_of(error)
        if not self._agree(updates, self.reference.updates):
            return "its updates differ from the sequential ones"
        if not self._agree_in_metrics(metrics):
            return "what it logs differs from the sequential values"
        if path != "grouped":
            return None
        self.is_sum = any(watch.loss_is_sum for watch in watches)
        fused = {name for w in watches if w.deferrals is not None for name in w.deferrals.fused}
        self.winners = tuple(sorted(fused))
        num_bytes = sum(watch.num_bytes for watch in watches)
        self.bytes_per_sample = num_bytes / sum(len(s[0]) for s in self.cohort.batches)
        return self._left_out({k: v for watch in watches for k, v in watch.left_out.items()})

    def _left_out(self, labels: Mapping[int, int]) -> str | None:
        """Say which labels that the loss leaves out a client has, as far as they lie in tensors."""
        for client in self.clients:
            if is_plain(client.dataset, client.collate_fn):
                tensors: Any = client.dataset.tensors
                for part, label in labels.items():
                    if bool((tensors[part] == label).any()):
                        name = client.client_id
                        return f"its loss leaves out samples with label {label}, as {name!r} has"
        return None

    @property
    def _limit(self) -> float:
        # bfloat16 keeps 8 bits, and the order of summation differs.
        return 1e-5 if self.cohort.ctx.autocast_is_off else 5e-2

    def _agree(self, updates: Tensor, reference: Tensor) -> bool:
        """Whether most updates agree to the limit, and all roughly.

        Rounding can tip over a ReLU or a maximum that is nearly tied, for a client here and there.
        """
        differences, sizes = (updates - reference).norm(dim=1), reference.norm(dim=1)
        close = int((differences <= self._limit * sizes).sum())
        rough = bool((differences <= max(1e-2, self._limit) * sizes).all())
        return rough and 2 * close > len(sizes)

    def _agree_in_metrics(self, metrics: Mapping[str, float]) -> bool:
        expected = self.reference.metrics
        return metrics.keys() == expected.keys() and all(
            math.isclose(value, expected[name], rel_tol=10 * self._limit, abs_tol=self._limit)
            for name, value in metrics.items()
        )


def _run(train: Train, cohort: Cohort) -> tuple[Tensor, dict[str, float]]:
    weights = cohort.global_weights
    updates = torch.empty(len(cohort.clients), weights.numel(), device=cohort.ctx.device)
    logs = LogMeans()
    cohort.train(train, None, range(len(updates)), updates, logs)
    return updates, logs.result()
