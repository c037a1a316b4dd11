"""The contract of history stores, as tests."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrec.exceptions import (
    HistoryError,
    HistoryFormatError,
    RoundNotFoundError,
    ShapeError,
)
from fedrec.history import HistoryStore, Manifest
from fedrec.history.base import SEALED
from fedrec.history.manifest import FORMAT_VERSION
from fedrec.random import torch_generator
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["HistoryStoreContract"]


class HistoryStoreContract(ABC):
    """Tests for a history store: subclass it as `Test...` in a test file and write `make`.

    Examples:
        >>> from fedrec.history import MemoryHistory
        >>> class TestMemoryHistory(HistoryStoreContract):
        ...     persistent = False
        ...     def make(self, path):
        ...         return MemoryHistory()
    """

    #: Whether a second store that is made for the same path holds what the first one wrote.
    persistent: bool = True
    #: Largest error of a stored client update, relative to its largest entry; 0 means bit-exact.
    tolerance: float = 0.0
    #: Codec of the recordings that are made.
    codec: str = "float32"
    #: Size of the recordings that are made.
    client_ids: tuple[str, ...] = tuple(f"client-{i}" for i in range(6))
    num_parameters: int = 37

    @abstractmethod
    def make(self, path: Path) -> HistoryStore:
        """Return a store of the directory `path`; a store without files may ignore it."""

    def manifest(self, **changes: Any) -> Manifest:
        """Return the manifest of a small recording."""
        manifest = Manifest(
            model_fingerprint="1234",
            num_parameters=self.num_parameters,
            clients={client_id: 10 + i for i, client_id in enumerate(self.client_ids)},
            malicious=self.client_ids[:2],
            seed=7,
            aggregator={"class_path": "TrimmedMean", "init_args": {"trim": 0.2}},
            server_lr=0.1,
            max_rounds=50,
            codec=self.codec,
        )
        return dataclasses.replace(manifest, **changes)

    def record(self, t: int, **changes: Any) -> RoundRecord:
        """Return a round with random values, the same for the same `t`."""
        generator = torch_generator(0, "history contract", t)
        m, d = len(self.client_ids), self.num_parameters
        record = RoundRecord(
            round=t,
            global_weights=torch.randn(d, generator=generator),
            sent=CohortUpdates(
                client_ids=self.client_ids,
                updates=torch.randn(m, d, generator=generator),
                num_samples=torch.arange(10, 10 + m),
            ),
            aggregate=torch.randn(d, generator=generator),
            cohort=self.client_ids,
        )
        names = {f.name for f in dataclasses.fields(CohortUpdates)} - {"buffers"}
        of_sent = {name: value for name, value in changes.items() if name in names}
        rest = {name: value for name, value in changes.items() if name not in names}
        sent = dataclasses.replace(record.sent, **of_sent)
        return dataclasses.replace(record, sent=sent, **rest)

    def begun(self, path: Path, num_rounds: int = 0, **changes: Any) -> HistoryStore:
        """Return a store with a recording of `num_rounds` rounds."""
        store = self.make(path)
        store.begin(self.manifest(**changes))
        for t in range(num_rounds):
            store.write_round(self.record(t))
        return store

    def assert_same(self, read: RoundRecord, written: RoundRecord) -> None:
        """Check that a round that was read is the round that was written."""
        assert read.round == written.round
        assert read.client_ids == written.client_ids
        assert read.cohort == written.cohort
        assert dict(read.refused) == dict(written.refused)
        assert read.num_samples.tolist() == written.num_samples.tolist()
        assert same_bits(read.global_weights, written.global_weights)
        assert same_bits(read.aggregate, written.aggregate)
        assert (read.buffers is None) == (written.buffers is None)
        if read.buffers is not None and written.buffers is not None:
            assert same_bits(read.buffers, written.buffers)
        assert read.updates.shape == written.updates.shape
        if self.tolerance == 0:
            assert same_bits(read.updates, written.updates)
        for row, update in zip(read.updates, written.updates, strict=True):
            assert (row - update).abs().max() <= self.tolerance * update.abs().max()

    def test_nothing_recorded(self, tmp_path: Path) -> None:
        """A new store is empty and says so."""
        with self.make(tmp_path / "history") as store:
            assert store.is_empty
            assert store.rounds() == range(0)
            with pytest.raises(HistoryFormatError):
                store.manifest  # noqa: B018

    def test_begin_keeps_the_manifest(self, tmp_path: Path) -> None:
        """The manifest comes back equal, with the clients in their order."""
        manifest = self.manifest(clients={"b": 3, "a": 5}, malicious=("a",))
        with self.make(tmp_path / "history") as store:
            store.begin(manifest)
            assert not store.is_empty
            assert store.manifest == manifest
            assert list(store.manifest.clients) == ["b", "a"]
            assert store.rounds() == range(0)

    def test_begin_twice_is_refused(self, tmp_path: Path) -> None:
        """A recording is never overwritten."""
        with self.begun(tmp_path / "history", num_rounds=1) as store:
            with pytest.raises(HistoryFormatError, match="already holds a recording"):
                store.begin(self.manifest(seed=8))
            assert store.manifest.seed == 7
            self.assert_same(store.read_round(0), self.record(0))

    def test_newer_format_is_refused(self, tmp_path: Path) -> None:
        """A manifest of another format version is not taken."""
        with self.make(tmp_path / "history") as store:
            with pytest.raises(HistoryFormatError, match=f"version {FORMAT_VERSION + 1}"):
                store.begin(self.manifest(format_version=FORMAT_VERSION + 1))
            assert store.is_empty

    def test_other_model_is_refused(self, tmp_path: Path) -> None:
        """`check_model` accepts the recorded model alone."""
        with self.begun(tmp_path / "history") as store:
            store.check_model("1234", self.num_parameters)
            with pytest.raises(HistoryFormatError, match="recorded for a model with"):
                store.check_model("5678", self.num_parameters + 1)

    def test_round_trip(self, tmp_path: Path) -> None:
        """Every round comes back as it was written, in any order of reading."""
        with self.begun(tmp_path / "history", num_rounds=12) as store:
            assert store.rounds() == range(12)
            for t in (11, 0, 5, 4, 11, 1):
                self.assert_same(store.read_round(t), self.record(t))

    def test_extreme_numbers(self, tmp_path: Path) -> None:
        """The smallest and largest numbers and both zeros keep their bits in global weights."""
        info = torch.finfo(torch.float32)
        weights = torch.zeros(self.num_parameters)
        weights[:5] = torch.tensor([info.max, info.min, info.smallest_normal, 1e-45, -0.0])
        with self.begun(tmp_path / "history") as store:
            store.write_round(self.record(0, global_weights=weights))
            assert same_bits(store.read_round(0).global_weights, weights)

    def test_some_clients(self, tmp_path: Path) -> None:
        """Rows come in the order asked for; the rest of the round is unchanged."""
        with self.begun(tmp_path / "history", num_rounds=2) as store:
            for rows in ([4, 1, 3], [0], []):
                clients = [self.client_ids[k] for k in rows]
                self.assert_same(store.read_round(1, clients), self.record(1).select(clients))

    def test_rows_in_any_order(self, tmp_path: Path) -> None:
        """Some of the clients take part, in an order of their own; others are refused."""
        a, b, c, d, *_ = self.client_ids
        updates = self.record(0).updates[:2]
        written = self.record(
            0,
            client_ids=(d, a),
            cohort=(c, d, a, b),
            updates=updates,
            num_samples=torch.tensor([3, 9]),
            refused={c: "non-finite", b: "expected (37,), got (36,)"},
        )
        with self.begun(tmp_path / "history") as store:
            store.write_round(written)
            self.assert_same(store.read_round(0), written)
            self.assert_same(store.read_round(0, [a]), written.select([a]))
            with pytest.raises(RoundNotFoundError, match=c):
                store.read_round(0, [a, c])

    def test_what_is_known_without_reading(self, tmp_path: Path) -> None:
        """The index has the clients of a round, and bounds of their stored updates."""
        with self.begun(tmp_path / "history", num_rounds=2) as store:
            record = store.read_round(1)
            assert store.index(1).present == record.present == tuple(store.index(1).bounds)
            largest = record.updates.abs().amax(dim=1).tolist()
            for bound, magnitude in zip(store.index(1).bounds.values(), largest, strict=True):
                assert magnitude <= bound <= 1.1 * magnitude + 1e-30
            with pytest.raises(RoundNotFoundError):
                store.index(2)

    def test_as_stored(self, tmp_path: Path) -> None:
        """`as_stored` returns, before writing, the updates that reading gives."""
        with self.begun(tmp_path / "history") as store:
            expected = store.as_stored(self.record(0).updates)
            store.write_round(self.record(0))
            assert same_bits(expected, store.read_round(0).updates)

    def test_cohort_defaults_to_the_clients(self, tmp_path: Path) -> None:
        """Without a cohort, it is the clients of the updates."""
        with self.begun(tmp_path / "history") as store:
            store.write_round(self.record(0, cohort=()))
            self.assert_same(store.read_round(0), self.record(0))

    def test_round_without_clients(self, tmp_path: Path) -> None:
        """A round whose clients were all refused is stored like any other."""
        written = self.record(
            0,
            client_ids=(),
            updates=torch.zeros(0, self.num_parameters),
            num_samples=torch.zeros(0, dtype=torch.int64),
            refused=dict.fromkeys(self.client_ids, "silent"),
        )
        with self.begun(tmp_path / "history") as store:
            store.write_round(written)
            store.write_round(self.record(1))
            self.assert_same(store.read_round(0), written)
            self.assert_same(store.read_round(1), self.record(1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_buffers(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Buffers are stored in their dtype; a recording with averaged buffers has to have them."""
        buffers = torch.tensor([1.0, -2.0, 3.5, 0.1], dtype=dtype)
        spec = {
            "mean": {"dtype": str(dtype).removeprefix("torch."), "shape": [3]},
            "decay": {"dtype": "float16", "shape": []},
        }
        with self.begun(tmp_path / "history", buffers=spec) as store:
            store.write_round(self.record(0, buffers=buffers))
            self.assert_same(store.read_round(0), self.record(0, buffers=buffers))
            other = torch.float64 if dtype == torch.float32 else torch.float32
            for wrong in (None, buffers[:3], buffers.to(other)):
                with pytest.raises(ShapeError, match="buffers"):
                    store.write_round(self.record(1, buffers=wrong))
            store.write_round(self.record(1, buffers=2 * buffers))
            self.assert_same(
                store.read_round(1, ()), self.record(1, buffers=2 * buffers).select(())
            )

    def test_awkward_tensors(self, tmp_path: Path) -> None:
        """Strides and `requires_grad` of tensors make no difference."""
        record = self.record(0)
        awkward = dataclasses.replace(
            record,
            global_weights=record.global_weights.clone().requires_grad_(),
            sent=dataclasses.replace(record.sent, updates=record.updates.T.contiguous().T),
        )
        with self.begun(tmp_path / "history") as store:
            store.write_round(awkward)
            read = store.read_round(0)
        self.assert_same(read, record)
        assert not read.global_weights.requires_grad

    def test_memory_is_not_shared(self, tmp_path: Path) -> None:
        """Changing what was written, or what was read, in place does not change the history."""
        written = self.record(0)
        with self.begun(tmp_path / "history") as store:
            store.write_round(written)
            for tensor in tensors(written):
                tensor.zero_()
            for tensor in tensors(store.read_round(0)):
                tensor.fill_(9)
            self.assert_same(store.read_round(0), self.record(0))

    def test_what_was_read_survives_close(self, tmp_path: Path) -> None:
        """A round that was read can be used when the store is closed."""
        store = self.begun(tmp_path / "history", num_rounds=1)
        read = store.read_round(0)
        store.close()
        store.close()
        self.assert_same(read, self.record(0))

    @pytest.mark.parametrize("t", [0, 1, 3, 40])
    def test_other_than_the_next_round_is_refused(self, tmp_path: Path, t: int) -> None:
        """Rounds are written once, in order."""
        with self.begun(tmp_path / "history", num_rounds=2) as store:
            with pytest.raises(HistoryError, match="Expected round 2"):
                store.write_round(self.record(t))
            assert store.rounds() == range(2)
            store.write_round(self.record(2))
            self.assert_same(store.read_round(2), self.record(2))

    @pytest.mark.parametrize("t", [-1, 2, 2**40])
    def test_missing_round(self, tmp_path: Path, t: int) -> None:
        """The error names the round; there is no counting from the end."""
        with (
            self.begun(tmp_path / "history", num_rounds=2) as store,
            pytest.raises(RoundNotFoundError, match=f"Round {t} is not in"),
        ):
            store.read_round(t)

    def test_missing_client(self, tmp_path: Path) -> None:
        """The error names the client."""
        with (
            self.begun(tmp_path / "history", num_rounds=1) as store,
            pytest.raises(RoundNotFoundError, match="nobody"),
        ):
            store.read_round(0, [self.client_ids[0], "nobody"])

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("global_weights", torch.zeros(36), ShapeError),
            ("aggregate", torch.zeros(38), ShapeError),
            ("updates", torch.zeros(5, 37), ShapeError),
            ("updates", torch.zeros(6, 37, dtype=torch.float64), ShapeError),
            ("updates", torch.zeros(6, 37, dtype=torch.bfloat16), ShapeError),
            ("num_samples", torch.zeros(5, dtype=torch.int64), ShapeError),
            ("num_samples", torch.zeros(6), ShapeError),
            ("buffers", torch.zeros(1), ShapeError),
            ("updates", torch.full((6, 37), float("nan")), HistoryError),
            ("global_weights", torch.full((37,), float("inf")), HistoryError),
            ("aggregate", torch.full((37,), float("-inf")), HistoryError),
            ("cohort", ("client-0", "nobody"), HistoryError),
            ("refused", {"nobody": "unknown"}, HistoryError),
            ("client_ids", ("client-0",) * 6, HistoryError),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, tmp_path: Path, name: str, value: Any, error: type[Exception]
    ) -> None:
        """Nothing mis-shaped, non-finite or from an unknown client is stored."""
        with self.begun(tmp_path / "history", num_rounds=1) as store:
            with pytest.raises(error):
                store.write_round(self.record(1, **{name: value}))
            assert store.rounds() == range(1)
            store.write_round(self.record(1))
            self.assert_same(store.read_round(1), self.record(1))

    def test_reopen_and_go_on(self, tmp_path: Path) -> None:
        """A persistent store has all rounds when it is opened again, and takes the next one."""
        with self.begun(tmp_path / "history", num_rounds=3) as store:
            manifest = store.manifest
        with self.make(tmp_path / "history") as store:
            assert store.is_empty is not self.persistent
            if self.persistent:
                assert store.manifest == manifest
                store.write_round(self.record(3))
                assert store.rounds() == range(4)
                for t in range(4):
                    self.assert_same(store.read_round(t), self.record(t))

    def test_what_lies_beside_it(self, tmp_path: Path) -> None:
        """Content of files comes back; what is not encrypted does not look as if it was."""
        content = bytes(range(256))
        with self.begun(tmp_path / "history", 1) as store:
            for given in (content, b""):
                sealed = store.seal(given)
                assert store.unseal(sealed) == given
                assert sealed == given or sealed.startswith(SEALED)
            assert store.unseal(content) == content

    def test_num_bytes_grow(self, tmp_path: Path) -> None:
        """Thirty rounds take at least the bytes of their global weights and aggregates."""
        with self.begun(tmp_path / "history") as store:
            before = store.num_bytes()
            for t in range(30):
                store.write_round(self.record(t))
            assert store.num_bytes() - before >= 30 * 2 * 4 * self.num_parameters


def tensors(record: RoundRecord) -> list[Tensor]:
    """Return the tensors of a record without buffers."""
    return [record.global_weights, record.updates, record.num_samples, record.aggregate]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors are the same, bit by bit."""
    return torch.equal(a.view(torch.int32), b.detach().contiguous().view(torch.int32))
