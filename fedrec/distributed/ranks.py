"""The processes of a run, and what they tell each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedrec.exceptions import FedrecError, RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["Ranks", "failure_of"]

T = TypeVar("T")

# Seconds in which a process that still lives says that it waits for another.
_PATIENCE = 3.0
_HINT = "HINT: what was recorded is kept; start all ranks again to go on."


class Ranks:
    """The processes of a run, which all do the same rounds; each has a number, its rank.

    Every method is called by all ranks, in the same order, and returns the same in all of them.
    With one process nothing is sent.

    Args:
        device: Where tensors to be sent have to be, the rank's own, if the processes are those of
            torch's process group; `None` for this process alone.
        timeout: Seconds that a process waits for another.

    Attributes:
        rank: Of this process, from 0 on.
        size: Number of processes.

    Examples:
        >>> ranks = Ranks()
        >>> ranks.rank, ranks.size, ranks.gather("a")
        (0, 1, ['a'])
    """

    def __init__(self, device: torch.device | None = None, timeout: float = 1800.0) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.rank, self.size = 0, 1
        #: Bytes of tensors that this rank has sent.
        self.sent_bytes = 0
        self._group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None
        self._has_left = False
        if device is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(timeout=timedelta(seconds=timeout))
            self._connect()

    def _connect(self) -> None:
        """Open the board on which ranks say why they leave: it works when others are gone."""
        from torch._C._distributed_c10d import TCPStore

        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if self.rank == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = self.broadcast(0 if self._store is None else self._store.port)
        if self._store is None:
            self._store = TCPStore(host, port, is_master=False, wait_for_workers=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prints and writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in order.

        Args:
            value: Anything that can be pickled.

        Raises:
            RankError: If another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0.

        Raises:
            RankError: If another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return value
        values = [value]
        with self._together():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def once(self, function: Callable[[], T]) -> T:
        """Call a function in rank 0 alone; return what it returns, or raise what it raises.

        Raises:
            RankError: If another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return function()
        result: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - raised again below, in every rank
                error = raised
        result, failed = self.broadcast((result, None if error is None else _portable(error)))
        if error is not None:
            raise error
        if failed is not None:
            kind, text = failed
            raise kind(text)
        return result  # type: ignore[return-value]

    def each(self, function: Callable[[], T]) -> list[T]:
        """Call a function in every rank; return what each returns, in order.

        Raises:
            FedrecError: If it raised that in one of them; the same in all ranks.
            Exception: What else it raised in this rank.
            RankError: If it raised that in another one.
        """
        if self.size == 1:
            return [function()]
        result: T | None = None
        failed: Exception | None = None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - raised again below, once all ranks know
            failed = error
        known = failed if failed is None or isinstance(failed, FedrecError) else _in_short(failed)
        found = self.gather((result, known))
        if failed is not None and not isinstance(failed, FedrecError):
            raise failed
        for rank, (_, why) in enumerate(found):
            if isinstance(why, FedrecError):
                raise why
            if why is not None:
                raise RankError(failure_of(rank, why))
        return [result for result, _ in found]  # type: ignore[misc]

    def rows(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, those of rank 0 first.

        Args:
            part: Rows of this rank.
            counts: Number of rows of each rank.

        Raises:
            RankError: If another rank has left, or does not answer in time.

        Shape:
            - `part`: $(m_r, d)$.
            - Output: $(m, d)$.
        """
        if self.size == 1:
            return part
        most, width = max(counts), part.shape[1]
        padded = part.contiguous()
        if len(part) < most:  # gloo gathers equal parts
            padded = torch.cat([part, part.new_zeros(most - len(part), width)])
        found = part.new_empty(self.size * most, width)
        with self._together():
            dist.all_gather(list(found.chunk(self.size)), padded, group=self._group)
        self.sent_bytes += padded.nbytes * (self.size - 1)
        if min(counts) == most:
            return found
        return torch.cat([found[r * most : r * most + k] for r, k in enumerate(counts)])

    def columns(
        self, part: Tensor, counts: Sequence[int], blocks: Sequence[Sequence[slice]]
    ) -> list[Tensor]:
        """Return some columns of the rows of all ranks: each rank gets blocks of its own.

        Args:
            part: Rows of this rank.
            counts: Number of rows of each rank.
            blocks: The blocks of columns of each rank.

        Raises:
            RankError: If another rank has left, or does not answer in time.

        Shape:
            - `part`: $(m_r, d)$.
            - Output: $(m, c)$ for each block of this rank, contiguous.
        """
        found = [part.new_empty(sum(counts), b.stop - b.start) for b in blocks[self.rank]]
        rows = [block.split(list(counts)) for block in found]
        for block, into in zip(blocks[self.rank], rows, strict=True):
            into[self.rank].copy_(part[:, block])
        self._exchange(
            {r: [part[:, b].contiguous() for b in blocks[r]] for r in self._others},
            {r: [into[r] for into in rows] for r in self._others},
        )
        return found

    def rows_of_columns(
        self, found: Sequence[Tensor], counts: Sequence[int], blocks: Sequence[Sequence[slice]]
    ) -> Tensor:
        """Return this rank's rows, of which each rank has some columns: the way back.

        Args:
            found: The blocks that this rank has, with the rows of all ranks.
            counts: Number of rows of each rank.
            blocks: The blocks of columns of each rank: all columns, one block after the other.

        Raises:
            RankError: If another rank has left, or does not answer in time.

        Shape:
            - `found`: $(m, c)$ each.
            - Output: $(m_r, d)$.
        """
        rows = [block.split(list(counts)) for block in found]
        own = [
            [found[0].new_empty(counts[self.rank], b.stop - b.start) for b in of] for of in blocks
        ]
        own[self.rank] = [into[self.rank] for into in rows]
        self._exchange(
            {r: [into[r].contiguous() for into in rows] for r in self._others},
            {r: own[r] for r in self._others},
        )
        return torch.cat([block for of in own for block in of], dim=1)

    @property
    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _exchange(
        self, leaving: Mapping[int, Sequence[Tensor]], arriving: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send other ranks contiguous tensors, and get theirs, each in the order it was sent."""
        # `all_to_all` would do it in one call, but it is much slower with gloo (docs/scale.md).
        operations = [
            dist.P2POp(operation, tensor, r, self._group)
            for operation, by_rank in ((dist.isend, leaving), (dist.irecv, arriving))
            for r, tensors in by_rank.items()
            for tensor in tensors
            if tensor.numel()
        ]
        if operations:
            with self._together():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        self.sent_bytes += sum(tensor.nbytes for tensors in leaving.values() for tensor in tensors)

    def whole(self, block: Tensor, blocks: Sequence[slice]) -> Tensor:
        """Return a vector of which each rank has some entries.

        Args:
            block: The entries of this rank.
            blocks: Those of each rank, one block after the other.

        Raises:
            RankError: If another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return block
        sizes = [one.stop - one.start for one in blocks]
        padded = block.new_zeros(1, max(sizes))
        padded[0, : len(block)] = block
        rows = self.rows(padded, [1] * self.size)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    def agree(self, t: int, weights: Tensor, *, stop: int | None, save: bool) -> tuple[int, bool]:
        """Agree on how to go on after a round.

        Args:
            t: The round.
            weights: The next global weights, which have to have the same bits in every rank.
            stop: The signal that has arrived at this rank, if any.
            save: Whether it is time to write a checkpoint; rank 0 decides.

        Returns:
            The signal that has arrived at some rank, or 0; and whether to write a checkpoint.

        Raises:
            RankError: If the weights differ, another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return stop or 0, save
        bits = int(weights.contiguous().view(torch.int32).sum(dtype=torch.int64))
        said = self.gather((stop or 0, save, bits))
        different = [r for r, (_, _, b) in enumerate(said) if b != said[0][2]]
        if different:
            raise RankError(
                f"After round {t}, ranks {different} have other global weights than rank 0. "
                "HINT: the ranks' processors or packages differ; use machines of one kind."
            )
        return max(s for s, _, _ in said), said[0][1]

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves; not called by all ranks."""
        self._has_left = True
        if not isinstance(error, RankError):
            self.say_of(self.rank, _in_short(error))

    def close(self) -> None:
        """Let go of the other processes, before this one ends; not called by all ranks at once.

        Threads that talk to them must not outlive the interpreter. After an error they are left to
        the end of the process, since they may still wait for another.
        """
        if self._group is not None and not self._has_left:
            self._group = self._store = None
            dist.destroy_process_group()

    def say_of(self, rank: int, why: str) -> None:
        """Tell the other ranks why a rank has left, unless it has said so itself."""
        if self._store is not None:
            with suppress(RuntimeError):  # the board is gone with rank 0
                if not self._store.check([f"left/{rank}"]):
                    self._store.set(f"left/{rank}", why)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(self._who_is_missing(error)) from error

    def _who_is_missing(self, error: RuntimeError) -> str:
        """Find out why a rank did not answer, by what the ranks have left on the board."""
        store = self._store
        if store is None:
            return f"The ranks cannot find each other ({_in_short(error)}). {_HINT}"
        try:
            store.set(f"waits/{self.rank}", "")
            until = time.monotonic() + _PATIENCE
            others = [r for r in range(self.size) if r != self.rank]
            silent = others
            while silent and time.monotonic() < until:
                for r in others:
                    if store.check([f"left/{r}"]):
                        why = store.get(f"left/{r}").decode()
                        return failure_of(r, why)
                silent = [r for r in others if not store.check([f"waits/{r}"])]
                time.sleep(0.05)
        except (RuntimeError, OSError):
            silent = [0]  # the board is rank 0's
        if not silent:
            return f"The ranks cannot talk to each other ({_in_short(error)}). {_HINT}"
        names = ", ".join(map(str, silent))
        noun = "Rank" if len(silent) == 1 else "Ranks"
        return f"{noun} {names} died, or did not answer in time, which ends all others. {_HINT}"


def failure_of(rank: int, why: str) -> str:
    """Return the error text for a rank that has failed."""
    return f"Rank {rank} has failed ({why}), which ends all others. {_HINT}"


def _in_short(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _portable(error: Exception) -> tuple[type[FedrecError], str]:
    """Return the class and the text with which other processes raise an error of rank 0."""
    if isinstance(error, FedrecError):
        return type(error), str(error)
    return RankError, failure_of(0, _in_short(error))
