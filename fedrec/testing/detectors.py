"""The contract of detectors, as tests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from fedrec._guard import left_alone
from fedrec.detectors.base import Detector
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import ConfigurationError
from fedrec.history.manifest import Manifest
from fedrec.history.memory import MemoryHistory
from fedrec.testing.component import ComponentContract
from fedrec.types import CohortUpdates, Detection, RoundRecord

__all__ = ["DetectorContract"]

_D = 12
_LR = 0.1


class DetectorContract(ComponentContract):
    """Tests for a detector; subclass it in a test module and write `make`.

    The histories are of clients with quadratic losses and noisy gradients; malicious clients send
    noise. Whether a detector finds them is left to the detector's own tests.

    Examples:
        >>> from fedrec.detectors import KnownMalicious
        >>> class TestMyDetector(DetectorContract):
        ...     def make(self):
        ...         return KnownMalicious()
    """

    base = Detector

    #: Clients, malicious ones, and rounds of the histories.
    num_clients: int = 12
    malicious: tuple[str, ...] = ("client-02", "client-05", "client-09")
    num_rounds: int = 60

    #: Fraction of benign clients that may be flagged when nobody is malicious, on average.
    max_false_positive_rate: float = 0.0

    #: Number of histories that this average is taken over.
    num_benign_histories: int = 5

    @abstractmethod
    def make(self) -> Detector:
        """Return a new detector, the same each time."""

    def make_records(self, malicious: Sequence[str] = (), seed: int = 0) -> list[RoundRecord]:
        """Return a recording in which the clients of `malicious` are malicious."""
        generator = torch.Generator().manual_seed(seed)
        ids = tuple(f"client-{i:02d}" for i in range(self.num_clients))
        is_malicious = torch.tensor([c in malicious for c in ids])
        curvature = torch.linspace(0.5, 2.0, _D)
        centres = 0.3 * torch.randn(self.num_clients, _D, generator=generator)
        weights = torch.full((_D,), 3.0)
        records = []
        for t in range(self.num_rounds):
            noise = torch.randn(2, self.num_clients, _D, generator=generator)
            updates = curvature * (weights - centres) + 0.3 * noise[0]
            updates[is_malicious] = 3.0 * noise[1][is_malicious]
            aggregate = updates.mean(dim=0)
            records.append(
                RoundRecord(
                    round=t,
                    global_weights=weights,
                    sent=CohortUpdates(
                        client_ids=ids,
                        updates=updates,
                        num_samples=torch.full((self.num_clients,), 10),
                    ),
                    aggregate=aggregate,
                    cohort=ids,
                )
            )
            weights = weights - _LR * aggregate
        return records

    def watch(self, records: Iterable[RoundRecord], malicious: Sequence[str] = ()) -> Detection:
        """Return the verdict of a new detector that observes a recording round by round."""
        detector = self.make()
        detector.reset(malicious)
        for record in records:
            shown = {"updates": record.updates, "aggregate": record.aggregate}
            with left_alone("observe", ConfigurationError, **shown):
                detector.observe(record)
        return detector.result()

    @staticmethod
    def check_same(first: Detection, second: Detection) -> None:
        """Check that two verdicts are the same; scores may differ by rounding."""
        assert first.malicious == second.malicious
        assert first.seen == second.seen
        assert first.round == second.round
        assert dict(first.scores) == pytest.approx(dict(second.scores), rel=1e-4, abs=1e-6)

    def test_no_verdict_before_the_first_round(self) -> None:
        """Nobody was seen, so nobody is accused."""
        detector = self.make()
        detector.reset(self.malicious)
        result = detector.result()
        assert result.malicious == ()
        assert result.seen == ()
        assert result.round is None

    @pytest.mark.parametrize("attacked", [True, False])
    def test_accuses_only_whom_it_saw(self, attacked: bool) -> None:
        """Verdicts are sorted lists of distinct clients that took part."""
        malicious = self.malicious if attacked else ()
        records = self.make_records(malicious)
        result = self.watch(records, malicious)
        assert list(result.malicious) == sorted(set(result.malicious))
        assert list(result.seen) == sorted(records[0].client_ids)
        assert set(result.malicious) <= set(result.seen)
        assert set(result.scores) <= set(result.seen)
        for t, scores in result.round_scores.items():
            assert set(scores) <= set(records[t].client_ids)

    def test_order_of_clients_does_not_matter(self) -> None:
        """Rows come in any order."""
        records = self.make_records(self.malicious)
        shuffled = []
        for record in records:
            generator = torch.Generator().manual_seed(record.round)
            order = torch.randperm(self.num_clients, generator=generator).tolist()
            ids = tuple(record.client_ids[i] for i in order)
            shuffled.append(replace(record.select(ids), cohort=ids))
        self.check_same(self.watch(shuffled, self.malicious), self.watch(records, self.malicious))

    def test_clients_in_shards_get_the_same_verdict(self) -> None:
        """Of updates in shards, as on several devices, every shard may be looked at by itself."""
        records = self.make_records(self.malicious)
        sharding = Sharding(client_ids=records[0].client_ids, num_shards=5)
        in_shards = [
            replace(record, sent=ShardedUpdates.of(record.sent, sharding, Ranks()))
            for record in records
        ]
        self.check_same(self.watch(in_shards, self.malicious), self.watch(records, self.malicious))

    def test_flags_few_when_nobody_is_malicious(self) -> None:
        """On benign histories, false positives stay within the stated rate."""
        rates = []
        for seed in range(self.num_benign_histories):
            rate = self.watch(self.make_records(seed=seed)).false_positive_rate(())
            assert rate is not None
            rates.append(rate)
        assert sum(rates) / len(rates) <= self.max_false_positive_rate

    def test_live_is_as_replayed(self) -> None:
        """A stored recording gives the verdict that watching it gave."""
        records = self.make_records(self.malicious)
        with MemoryHistory() as history:
            history.begin(
                Manifest(
                    model_fingerprint="0" * 32,
                    num_parameters=_D,
                    clients=dict.fromkeys(records[0].client_ids, 10),
                    seed=0,
                    aggregator={},
                    server_lr=_LR,
                    max_rounds=self.num_rounds,
                    malicious=self.malicious,
                )
            )
            for record in records:
                history.write_round(record)
            replayed = self.make().detect(history)
        self.check_same(replayed, self.watch(records, self.malicious))

    def test_owns_what_it_remembers(self) -> None:
        """The loop may reuse a round's memory for the next one."""
        records = self.make_records(self.malicious)
        buffer = torch.empty_like(records[0].updates)
        reused = (
            replace(r, sent=replace(r.sent, updates=buffer.copy_(r.updates))) for r in records
        )
        self.check_same(self.watch(reused, self.malicious), self.watch(records, self.malicious))

    def test_reset_forgets(self) -> None:
        """After a reset, a detector gives the verdict of a new one."""
        records = self.make_records(self.malicious)
        detector = self.make()
        for record in self.make_records(seed=7):
            detector.observe(record)
        detector.reset(self.malicious)
        for record in records:
            detector.observe(record)
        self.check_same(detector.result(), self.watch(records, self.malicious))
