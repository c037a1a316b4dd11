"""The abstract history store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedrec.exceptions import ConfigurationError, HistoryFormatError, expected
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundArrays, RoundIndex

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from fedrec.distributed.ranks import Ranks
    from fedrec.types import RoundRecord

__all__ = ["SEALED", "HistoryStore"]

#: What content begins with that `HistoryStore.seal` has encrypted.
SEALED = b"fedrec sealed\n"


class HistoryStore(ABC):
    """What the server stored while training: one round after the other, and a `Manifest`.

    The life of a store: `begin(manifest)` once, `write_round` for rounds 0, 1, 2, ... in order,
    `close`. Reading works at any time, also while another thread writes. A store is a context
    manager.

    Users write and read `RoundRecord`s, which are tensors (`write_round`, `read_round`). A store
    gets and gives the same round as NumPy arrays (`append`, `read`) and needs no torch.
    """

    #: Whether writing is a mere copy, so that a thread of its own would not pay.
    in_memory: bool = False

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If nothing has been recorded yet.
        """

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing, not even a manifest, has been written yet."""

    @abstractmethod
    def begin(self, manifest: Manifest) -> None:
        """Start a recording in an empty store.

        Raises:
            HistoryFormatError: If the store already holds a recording.
        """

    @abstractmethod
    def append(self, arrays: RoundArrays) -> None:
        """Append a round; when this returns, the round is as safe as the store can make it.

        Args:
            arrays: The round, which may share the caller's memory: a store that keeps it copies.
                `RoundArrays.check` and `RoundArrays.magnitudes` refuse what does not fit.

        Raises:
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
        """

    @abstractmethod
    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round as arrays; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """

    @abstractmethod
    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """

    @abstractmethod
    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes the store takes."""

    def attach(self, ranks: Ranks) -> None:
        """Get ready for the processes of a run, which all call this at the same time.

        By default there is nothing to do: each process reads, or keeps in memory, a store of its
        own.

        Args:
            ranks: The processes.
        """

    def require_writers(self, ranks: Ranks) -> None:
        """Refuse a recording by several processes to a store that only one can write to.

        Args:
            ranks: The processes.

        Raises:
            ConfigurationError: If they cannot share the store.
        """
        if ranks.size > 1 and not self.in_memory:
            hint = "ShardedHistory(path) keeps one for each shard; `fedrec history shard` converts."
            requirement = f"one that {ranks.size} processes can write to"
            raise ConfigurationError(
                expected("history", requirement, type(self).__name__, hint=hint)
            )

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Clients that were forgotten: nothing they sent is stored any more."""
        return ()

    def seal(self, content: bytes, shard: int = 0) -> bytes:
        """Return the content of a file that lies beside the history: encrypted, if that is.

        Args:
            content: What is in the file.
            shard: Whose file it is, in a history in shards.

        Returns:
            By default the same; otherwise something that begins with `SEALED`.
        """
        return content

    def unseal(self, content: bytes, shard: int = 0) -> bytes:
        """Return what `seal` was given; by default, that is what it returned.

        Args:
            content: What `seal` returned.
            shard: Whose file it is, in a history in shards.

        Raises:
            HistoryCorruptedError: If it was changed, or is of another history.
        """
        return content

    def close(self) -> None:
        """Release what the store holds. Closing twice is fine."""

    def write_round(self, record: RoundRecord) -> None:
        """Append a round; when this returns, the round is as safe as the store can make it.

        Args:
            record: The round; its number is the number of rounds stored so far, its clients are
                in the manifest.

        Raises:
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
        """
        from fedrec.history.conversion import to_arrays

        self.append(to_arrays(record))

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        from fedrec.history.conversion import to_record

        return to_record(self.read(t, client_ids))

    def as_stored(self, updates: Tensor) -> Tensor:
        """Return updates that are to be written as `read_round` would return them afterwards.

        They differ where a store keeps updates approximately.

        Args:
            updates: Shape $(m, d)$; must not be changed until they are written.

        Returns:
            Shape $(m, d)$; `updates` itself if nothing differs.
        """
        return updates

    def to_pandas(
        self, rounds: Iterable[int] | None = None, client_ids: Collection[str] | None = None
    ) -> pd.DataFrame:
        r"""Return a `DataFrame` with one row per round and client that was asked.

        Updates are read one round after the other, and of large models a few clients at a time:
        more than about 64 MB of them, or one update if that is more, are never in memory.

        Args:
            rounds: Rounds to read; `None` for all that are stored.
            client_ids: Clients to read; `None` for all.

        Returns:
            Columns

            - `round`: $t$, 0-based;
            - `client_id` (a category);
            - `num_samples`: size of the client's data set before any poisoning;
            - `norm`: Euclidean norm of the client's update $g_t^i$, in units of the weights
              divided by a learning rate;
            - `max_abs`: its largest magnitude;
            - `cosine`: of the angle between the update and the round's aggregate, in [-1, 1];
            - `malicious` (bool): the ground truth in the manifest;
            - `refused`: why the update was not aggregated, or missing if it was.

            `norm`, `max_abs` and `cosine` are NaN where the update is not stored: it was refused,
            the client was forgotten, or the store keeps some updates only. So is the cosine of
            zeros.

        Raises:
            RoundNotFoundError: If a round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
            MissingDependencyError: If pandas is not installed.
        """
        from fedrec.history.tools.frame import history_frame

        return history_frame(self, rounds, client_ids)

    def check_model(self, fingerprint: str, num_parameters: int) -> None:
        """Raise `HistoryFormatError` if the recording is of another model."""
        if self.manifest.model_fingerprint != fingerprint:
            raise HistoryFormatError(
                f"The history was recorded for a model with {self.manifest.num_parameters} "
                f"parameters (fingerprint {self.manifest.model_fingerprint}), but this model has "
                f"{num_parameters} (fingerprint {fingerprint}). HINT: build the model with the "
                "same layers and names, or record again."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
