"""The contract of recoverers, as tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback, LoopSettings
from fedrec.federation import Federation
from fedrec.history.memory import MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.train_from_scratch import TrainFromScratch
from fedrec.testing.problems import CountingClient, QuadraticClient, quadratic_federation
from fedrec.types import RoundContext, RunResult

__all__ = ["RecovererContract"]

ROUNDS = 12


class _StopAfter(Callback):
    """Interrupts a run at the end of its `count`-th round, as Ctrl-C does."""

    def __init__(self, *, count: int) -> None:
        self.count = count
        self.round = -1

    def on_round_end(self, loop: LoopSettings, ctx: RoundContext, metrics: object) -> None:
        self.count -= 1
        if self.count == 0:
            self.round = ctx.round
            raise KeyboardInterrupt


class RecovererContract:
    """Tests for a `Recoverer`: subclass it in a test module and write `make`.

    Examples:
        >>> from fedrec.recoverers import HistoricalOnly
        >>> class TestHistoricalOnly(RecovererContract):
        ...     def make(self):
        ...         return HistoricalOnly()
        >>> TestHistoricalOnly().test_ledger_adds_up()
    """

    def make(self) -> Recoverer:
        """Return a new recoverer, with settings that fit 12 rounds."""
        raise TypeError(f"{type(self).__name__} has to define make")

    def make_exact(self) -> Recoverer | None:
        """Return a recoverer that asks all clients in every round; `None` if it never does so."""
        return None

    def make_federation(self) -> Federation:
        """Return five clients, one of them malicious, that note when they are asked.

        For a method that needs LightningClients, or data at the server, return
        `fedrec.testing.problems.classifying_federation()`.
        """
        return quadratic_federation()

    def make_loop(self, folder: Path | None = None, *callbacks: Callback) -> FederatedLoop:
        """Return a quiet loop on the CPU that checkpoints after every round."""
        return FederatedLoop(
            accelerator="cpu",
            enable_progress_bar=False,
            callbacks=list(callbacks),
            default_root_dir=folder,
            checkpoint_every=0.0,
        )

    def record(self) -> tuple[Federation, MemoryHistory, Tensor]:
        """Record 12 rounds of the federation."""
        federation, history = self.make_federation(), MemoryHistory()
        result = self.make_loop().record(
            federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=0.3
        )
        _asked(federation, forget=True)
        return federation, history, result.global_weights

    def recover(
        self, recoverer: Recoverer, exclude: Sequence[str] | None = None
    ) -> tuple[Federation, RunResult]:
        """Record, then recover without `exclude` (the malicious client by default)."""
        federation, history, _ = self.record()
        left_out = federation.malicious if exclude is None else exclude
        return federation, self.make_loop().recover(federation, history, recoverer, left_out)

    def test_result_is_finite_and_repeatable(self) -> None:
        """The same recovery gives the same bits, also with a recoverer that was used before."""
        recoverer = self.make()
        first = self.recover(recoverer)[1].global_weights
        assert bool(torch.isfinite(first).all())
        assert torch.equal(first, self.recover(recoverer)[1].global_weights)
        assert torch.equal(first, self.recover(self.make())[1].global_weights)

    def test_excluded_clients_are_never_asked(self) -> None:
        """Excluded clients are not asked, unless the method declares `needs_excluded_client`."""
        recoverer = self.make()
        if recoverer.needs_excluded_client:
            pytest.skip("`needs_excluded_client` of the recoverer is True")
        federation, _ = self.recover(recoverer)
        asked = _asked(federation)
        assert [asked[c] for c in federation.malicious] == [0] * len(federation.malicious)

    def test_ledger_adds_up(self) -> None:
        """Every call of a client is in the ledger, and ACP follows from it."""
        federation, result = self.recover(self.make())
        assert result.ledger is not None
        remaining = [c for c in federation.client_ids if c not in federation.malicious]
        asked = _asked(federation)
        metered = dict.fromkeys(federation.client_ids, 0)
        for entry in result.ledger.entries:
            metered[entry.client_id] += 1
        assert metered == asked
        saved = [(ROUNDS - asked[c]) / ROUNDS for c in remaining]
        assert abs(result.ledger.acp() - sum(saved) / len(saved)) < 1e-9

    def test_all_rounds_exact_and_nobody_excluded_is_the_recording(self) -> None:
        """With the same batches, exact updates give the recorded trajectory."""
        recoverer = self.make_exact()
        if recoverer is None:
            pytest.skip("`make_exact` returns None")
        federation, history, recorded = self.record()
        result = self.make_loop().recover(federation, history, recoverer, [])
        assert torch.equal(result.global_weights, recorded)

    def test_all_rounds_exact_is_train_from_scratch(self) -> None:
        """Without the malicious clients, exact updates give train-from-scratch."""
        recoverer = self.make_exact()
        if recoverer is None:
            pytest.skip("`make_exact` returns None")
        scratch = self.recover(TrainFromScratch())[1].global_weights
        assert torch.equal(self.recover(recoverer)[1].global_weights, scratch)

    def test_resumed_is_uninterrupted(self) -> None:
        """A resumed recovery gives the same bits, and goes on from its checkpoint."""
        whole = self.recover(self.make())
        federation, history, _ = self.record()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            stop = _StopAfter(count=max(1, whole[1].rounds * 2 // 3))
            with contextlib.suppress(KeyboardInterrupt):
                self.make_loop(folder, stop).recover(
                    federation, history, self.make(), federation.malicious
                )
            resumed = self.make_loop(folder).recover(
                federation, history, self.make(), federation.malicious, resume=True
            )
        assert torch.equal(resumed.global_weights, whole[1].global_weights)
        assert resumed.ledger is not None
        assert whole[1].ledger is not None
        assert resumed.ledger.entries == whole[1].ledger.entries
        # Only the round that was interrupted had no checkpoint yet, and is done twice.
        assert stop.round >= 0
        again = sum(e.round == stop.round for e in resumed.ledger.entries)
        assert sum(_asked(federation).values()) == sum(_asked(whole[0]).values()) + again


def _asked(federation: Federation, forget: bool = False) -> dict[str, int]:
    """Count how often each client was asked."""
    counts = {}
    for client in federation.clients:
        if isinstance(client, QuadraticClient | CountingClient):
            counts[client.client_id] = len(client.rounds_asked)
            if forget:
                client.rounds_asked.clear()
    return counts
