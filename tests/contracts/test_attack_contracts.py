"""Every attack of fedrec keeps the contract."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from fedrec.attacks import Attack, BackdoorAttack, TrimAttack
from fedrec.testing import AttackContract


class TestTrimAttack(AttackContract):
    def make(self) -> Attack:
        return TrimAttack()


class TestPixelBackdoor(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return BackdoorAttack(target_label=2, scale=5.0, adaptive=True)


class TestPixelBackdoorInFlatImages(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return BackdoorAttack(image_shape=[1, 8, 8])

    def make_dataset(self) -> TensorDataset:
        x, y = super().make_dataset().tensors
        return TensorDataset(x.flatten(start_dim=1), y)


class TestFeatureBackdoor(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return BackdoorAttack(pattern="features", scale=1.0)

    def make_dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.rand(12, 45, generator=generator), torch.arange(12) % 10)
