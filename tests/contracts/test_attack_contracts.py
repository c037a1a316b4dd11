"""Every attack of fedrec keeps the contract."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from fedrec.attacks import (
    ALIE,
    DBA,
    IPM,
    MPAF,
    Attack,
    BackdoorAttack,
    BlendedTrigger,
    EdgeCaseBackdoor,
    GaussianNoise,
    KrumAttack,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    ModelReplacement,
    Neurotoxin,
    PoisonedFL,
    Scheduled,
    SignFlip,
    SquareTrigger,
    TrimAttack,
)
from fedrec.testing import AttackContract


class TestTrimAttack(AttackContract):
    def make(self) -> Attack:
        return TrimAttack()


class TestTrimAttackPartialKnowledge(AttackContract):
    def make(self) -> Attack:
        return TrimAttack(full_knowledge=False)


class TestSignFlip(AttackContract):
    def make(self) -> Attack:
        return SignFlip(scale=3.0)


class TestLabelFlip(AttackContract):
    def make(self) -> Attack:
        return LabelFlip(num_classes=10)


class TestLabelFlipOfPairs(AttackContract):
    def make(self) -> Attack:
        return LabelFlip(pairs=[(5, 3), (3, 5), (1, 7)])


class TestGaussianNoise(AttackContract):
    def make(self) -> Attack:
        return GaussianNoise(std=2.0)


class TestGaussianNoiseAdded(AttackContract):
    def make(self) -> Attack:
        return GaussianNoise(std=2.0, additive=True)


class TestALIE(AttackContract):
    def make(self) -> Attack:
        return ALIE()


class TestALIEFullKnowledge(AttackContract):
    def make(self) -> Attack:
        return ALIE(z=1.5, sign=1, full_knowledge=True)


class TestIPM(AttackContract):
    def make(self) -> Attack:
        return IPM()


class TestMinMax(AttackContract):
    def make(self) -> Attack:
        return MinMax()


class TestMinMaxPartialKnowledge(AttackContract):
    def make(self) -> Attack:
        return MinMax(perturbation="unit", full_knowledge=False)


class TestMinSum(AttackContract):
    def make(self) -> Attack:
        return MinSum(perturbation="sign")


class TestMinSumPartialKnowledge(AttackContract):
    def make(self) -> Attack:
        return MinSum(full_knowledge=False)


class TestKrumAttack(AttackContract):
    def make(self) -> Attack:
        return KrumAttack()


class TestKrumAttackPartialKnowledge(AttackContract):
    def make(self) -> Attack:
        return KrumAttack(full_knowledge=False)


class TestMimic(AttackContract):
    def make(self) -> Attack:
        return Mimic()


class TestMPAF(AttackContract):
    def make(self) -> Attack:
        return MPAF(scale=10.0)


class TestPoisonedFL(AttackContract):
    def make(self) -> Attack:
        return PoisonedFL(period=2)


class TestScheduledInItsRounds(AttackContract):
    def make(self) -> Attack:
        return Scheduled(TrimAttack(), start=1, every=2)


class TestScheduledInOtherRounds(AttackContract):
    def make(self) -> Attack:
        return Scheduled(SignFlip(), start=4)


class TestScheduledDataPoisoning(AttackContract):
    def make(self) -> Attack:
        return Scheduled(LabelFlip(num_classes=10), stop=10)


class TestModelReplacement(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return ModelReplacement(BackdoorAttack(scale=1.0), local_lr=0.1)


class TestNeurotoxin(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return Neurotoxin(BackdoorAttack(scale=5.0), top_fraction=0.3)


class TestDBA(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return DBA(num_parts=3, pattern=SquareTrigger(size=3))


class TestEdgeCaseBackdoor(AttackContract):
    dataset_factor = 2

    def make(self) -> Attack:
        return EdgeCaseBackdoor(max_norm=1.0, scale=3.0)


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


class TestBlendedBackdoor(AttackContract):
    dataset_factor = 2
    trigger_is_idempotent = False

    def make(self) -> Attack:
        return BackdoorAttack(pattern=BlendedTrigger(ratio=0.3, seed=1))


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("crafts_updates", "test_crafts_updates_only_if_it_says_so"),
        ("poisons_data", "test_poisons_data_only_if_it_says_so"),
        ("colludes", "test_malicious_clients_collude_only_if_it_says_so"),
    ],
)
def test_the_contract_catches_a_wrong_flag(wrong: str, test: str) -> None:
    class Wrong(TrimAttack):
        full_knowledge = False

        def __init__(self) -> None:
            super().__init__(full_knowledge=False)

        def poison_dataset(self, dataset, client_id):
            return TensorDataset(*dataset.tensors)

    setattr(Wrong, wrong, False)

    class Case(AttackContract):
        def make(self) -> Attack:
            return Wrong()

    with pytest.raises(AssertionError):
        getattr(Case(), test)()
