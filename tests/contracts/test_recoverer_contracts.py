"""Every recoverer passes the contract."""

from fedrec.federation import Federation
from fedrec.recoverers import (
    AnchoredLBFGS,
    Crab,
    FedEraser,
    FedRecover,
    FineTune,
    GradientAscent,
    HistoricalOnly,
    KnowledgeDistillation,
    Recoverer,
    RollbackRetrain,
    TrainFromScratch,
    UpdateFilter,
    WeightNegation,
)
from fedrec.testing import RecovererContract
from fedrec.testing.problems import classifying_federation


class TestTrainFromScratch(RecovererContract):
    def make(self) -> Recoverer:
        return TrainFromScratch()

    def make_exact(self) -> Recoverer:
        return TrainFromScratch()


class TestHistoricalOnly(RecovererContract):
    def make(self) -> Recoverer:
        return HistoricalOnly()


class TestFedEraser(RecovererContract):
    def make(self) -> Recoverer:
        return FedEraser(interval=1, calibration_ratio=0.5)


class TestCrab(RecovererContract):
    def make(self) -> Recoverer:
        return Crab(max_sensitivity=0.01, round_ratio=0.8)

    def make_federation(self) -> Federation:
        return classifying_federation()


class TestRollbackRetrain(RecovererContract):
    def make(self) -> Recoverer:
        return RollbackRetrain(max_sensitivity=0.6, noise_std=0.01)

    def make_exact(self) -> Recoverer:
        return RollbackRetrain()


class TestFineTune(RecovererContract):
    def make(self) -> Recoverer:
        return FineTune(num_epochs=6, batch_size=4, num_samples=20, beta=0.5)

    def make_federation(self) -> Federation:
        return classifying_federation()


class TestKnowledgeDistillation(RecovererContract):
    def make(self) -> Recoverer:
        return KnowledgeDistillation(num_epochs=5, batch_size=4)

    def make_federation(self) -> Federation:
        return classifying_federation()


class TestGradientAscent(RecovererContract):
    def make(self) -> Recoverer:
        return GradientAscent(batch_size=4, lr=0.1, final_rounds=4)

    def make_federation(self) -> Federation:
        return classifying_federation()


class TestWeightNegation(RecovererContract):
    def make(self) -> Recoverer:
        return WeightNegation(num_rounds=5)


class TestFedRecoverPaired(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(
            warmup_rounds=4,
            correction_period=3,
            final_rounds=2,
            tolerance_rate=0.1,
            estimator="paired",
        )

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, final_rounds=2, estimator="paired")


class TestFedRecoverLateAndFiltered(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(
            warmup_rounds=3, final_rounds=2, start_round=2, update_filter=UpdateFilter()
        )


class TestFedRecoverPaper(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(
            warmup_rounds=4, correction_period=3, tolerance_rate=0.1, estimator="paper"
        )

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, estimator="paper")


class TestFedRecoverAnchored(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(
            warmup_rounds=4, correction_period=3, tolerance_rate=0.1, estimator="anchored"
        )

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, estimator="anchored")


class TestFedRecoverAverage(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(
            warmup_rounds=4, correction_period=3, tolerance_rate=0.1, estimator="average"
        )

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, estimator="average")


class TestFedRecoverAnchoredByAConstantGain(RecovererContract):
    def make(self) -> Recoverer:
        estimator = AnchoredLBFGS(gain=0.3, buffer_size=1)
        return FedRecover(
            warmup_rounds=3,
            correction_period=2,
            final_rounds=1,
            tolerance_rate=0.1,
            estimator=estimator,
        )


class TestFedRecoverWithoutEstimates(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, estimator="none")

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, estimator="none")


class TestFedRecoverHistory(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, estimator="history")

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, estimator="history")
