"""The contract of attacks, as tests."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedrec.aggregators.fedavg import FedAvg
from fedrec.attacks.base import Attack, AttackContext
from fedrec.parameters import ParameterVector
from fedrec.testing.component import ComponentContract
from fedrec.types import Phase

__all__ = ["AttackContract"]

_M, _D = 8, 7
_MALICIOUS = (1, 4, 6)


class _Listed(Dataset[Any]):
    """A data set that is not a `TensorDataset`."""

    def __init__(self, samples: list[tuple[Tensor, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.samples[index]


class AttackContract(ComponentContract):
    """Tests for an attack; subclass it in a test module and write `make`.

    Examples:
        >>> from fedrec.attacks import TrimAttack
        >>> class TestMyAttack(AttackContract):
        ...     def make(self):
        ...         return TrimAttack(b_max=3.0)
    """

    base = Attack

    #: Length of poisoned data as a multiple of the client's own data.
    dataset_factor: int = 1

    #: Number of classes of `make_dataset`.
    num_classes: int = 10

    #: Whether embedding the trigger twice is the same as once.
    trigger_is_idempotent: bool = True

    @abstractmethod
    def make(self) -> Attack:
        """Return a new attack, the same each time."""

    def make_dataset(self) -> TensorDataset:
        """Return honest data of one client: pairs of an input and a class index."""
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.rand(12, 1, 8, 8, generator=generator), torch.arange(12) % self.num_classes
        )

    def make_updates(self) -> Tensor:
        """Return honest updates, shape (m, d), with coordinates of either sign."""
        return torch.randn(_M, _D, generator=torch.Generator().manual_seed(0))

    def make_context(
        self, malicious: Tensor, phase: Phase = "record", rows: Tensor | None = None
    ) -> AttackContext:
        """Return the round's context, new each time; `rows` are the clients that take part."""
        rows = torch.arange(_M) if rows is None else rows
        return AttackContext(
            round=3,
            phase=phase,
            client_ids=tuple(f"client-{i}" for i in rows.tolist()),
            global_weights=torch.zeros(_D),
            layout=ParameterVector(nn.Linear(_D, 1, bias=False)),
            purpose="attack",
            aggregator=FedAvg(),
            server_lr=0.5,
            last_aggregate=torch.ones(_D),
            num_malicious=int(malicious.sum()),
            num_malicious_total=len(_MALICIOUS),
            cohort_size=_M,
            cohort_malicious=len(_MALICIOUS) if rows is not None else int(malicious.sum()),
        )

    def make_mask(self, *malicious: int) -> Tensor:
        """Return the mask of malicious rows, shape (m,)."""
        mask = torch.zeros(_M, dtype=torch.bool)
        mask[list(malicious)] = True
        return mask

    @pytest.mark.parametrize("phase", ["record", "recover"])
    @pytest.mark.parametrize("malicious", [_MALICIOUS, (0,), tuple(range(_M))])
    def test_leaves_benign_rows_alone(self, malicious: tuple[int, ...], phase: Phase) -> None:
        """Benign clients send what they computed; malicious clients send finite updates."""
        updates, mask = self.make_updates(), self.make_mask(*malicious)
        before = updates.clone()
        crafted = self.make().craft(updates, mask, self.make_context(mask, phase))
        assert torch.equal(updates, before), "the given updates were changed"
        assert crafted.shape == updates.shape
        assert crafted.dtype == updates.dtype
        assert torch.equal(crafted[~mask], updates[~mask])
        assert torch.isfinite(crafted).all()

    def test_same_seed_same_updates(self) -> None:
        """Nothing is drawn from a shared stream."""
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        once = self.make().craft(updates, mask, self.make_context(mask))
        torch.rand(3)
        again = self.make().craft(updates, mask, self.make_context(mask))
        assert torch.equal(once, again)

    def test_nobody_malicious_nothing_changes(self) -> None:
        """Without malicious clients there is no attack."""
        updates, mask = self.make_updates(), self.make_mask()
        assert torch.equal(self.make().craft(updates, mask, self.make_context(mask)), updates)

    def test_needs_benign_updates_only_if_it_says_so(self) -> None:
        """Without `full_knowledge`, malicious clients may be asked alone."""
        attack = self.make()
        if attack.full_knowledge:
            pytest.skip("`full_knowledge` of the attack is True")
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        rows, everyone = mask.nonzero().flatten(), mask[mask]
        alone = attack.craft(updates[mask], everyone, self.make_context(everyone, rows=rows))
        together = attack.craft(updates, mask, self.make_context(mask))
        assert torch.equal(alone, together[mask])

    def test_poisons_a_copy_of_the_data(self) -> None:
        """Length and labels are as declared, and the client's own data stay as they are."""
        dataset = self.make_dataset()
        before = [t.clone() for t in dataset.tensors]
        poisoned: Any = self.make().poison_dataset(dataset, "client-1")
        assert len(poisoned) == self.dataset_factor * len(dataset)
        for i in range(len(poisoned)):
            x, y = poisoned[i]
            assert x.shape == dataset[0][0].shape
            assert x.dtype == dataset[0][0].dtype
            assert 0 <= int(y) < self.num_classes
        assert all(torch.equal(a, b) for a, b in zip(dataset.tensors, before, strict=True))

    def test_poisons_any_data_set_alike(self) -> None:
        """A data set that makes its samples on demand gives the same as tensors."""
        dataset = self.make_dataset()
        listed = _Listed([(x, int(y)) for x, y in zip(*dataset.tensors, strict=True)])
        expected: Any = self.make().poison_dataset(dataset, "client-1")
        poisoned: Any = self.make().poison_dataset(listed, "client-1")
        assert len(poisoned) == len(expected)
        for i in range(len(expected)):
            assert torch.equal(poisoned[i][0], expected[i][0])
            assert int(poisoned[i][1]) == int(expected[i][1])

    def test_trigger_of_a_backdoor(self) -> None:
        """Triggered inputs have their old shape and differ, and the target is a class."""
        attack = self.make()
        if attack.target_label is None:
            pytest.skip("`target_label` of the attack is None")
        assert 0 <= attack.target_label < self.num_classes
        x = self.make_dataset().tensors[0]
        before = x.clone()
        triggered = attack.trigger(x)
        assert torch.equal(x, before), "the given inputs were changed"
        assert triggered.shape == x.shape
        assert triggered.dtype == x.dtype
        assert not torch.equal(triggered, x)
        if self.trigger_is_idempotent:
            assert torch.equal(attack.trigger(triggered), triggered)

    def test_order_of_clients_does_not_matter(self) -> None:
        """In any order of the clients, each sends the same, up to rounding."""
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        crafted = self.make().craft(updates, mask, self.make_context(mask))
        order = torch.tensor([5, 6, 0, 3, 1, 7, 4, 2])
        ctx = replace(self.make_context(mask, rows=order), cohort_malicious=len(_MALICIOUS))
        again = self.make().craft(updates[order], mask[order], ctx)
        torch.testing.assert_close(again, crafted[order])

    def test_crafts_updates_only_if_it_says_so(self) -> None:
        """Without `crafts_updates`, malicious clients send what they computed."""
        attack = self.make()
        if attack.crafts_updates:
            pytest.skip("`crafts_updates` of the attack is True")
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        assert torch.equal(attack.craft(updates, mask, self.make_context(mask)), updates)

    def test_poisons_data_only_if_it_says_so(self) -> None:
        """Without `poisons_data`, malicious clients train on their own data."""
        attack = self.make()
        if attack.poisons_data:
            pytest.skip("`poisons_data` of the attack is True")
        dataset = self.make_dataset()
        assert attack.poison_dataset(dataset, "client-1") is dataset

    def test_treats_columns_alone_if_it_says_so(self) -> None:
        """With `crafts_by_columns`, some columns are enough to craft these."""
        attack = self.make()
        if not attack.crafts_by_columns:
            pytest.skip("`crafts_by_columns` of the attack is False")
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        whole = attack.craft(updates, mask, self.make_context(mask))
        for columns in (slice(0, 3), slice(3, _D)):
            ctx = replace(self.make_context(mask), columns=columns)
            part = attack.craft(updates[:, columns], mask, ctx)
            torch.testing.assert_close(part, whole[:, columns])

    def test_malicious_clients_collude_only_if_it_says_so(self) -> None:
        """Without `full_knowledge` and `colludes`, each malicious client may be asked alone."""
        attack = self.make()
        if attack.full_knowledge or attack.colludes:
            pytest.skip("`full_knowledge` or `colludes` of the attack is True")
        updates, mask = self.make_updates(), self.make_mask(*_MALICIOUS)
        rows = torch.tensor([_MALICIOUS[1]])
        single = mask[rows]
        alone = attack.craft(updates[rows], single, self.make_context(single, rows=rows))
        together = attack.craft(updates, mask, self.make_context(mask))
        assert torch.equal(alone, together[rows])
