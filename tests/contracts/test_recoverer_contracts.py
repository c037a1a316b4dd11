"""Every recoverer passes the contract."""

from fedrec.recoverers import FedRecover, HistoricalOnly, Recoverer, TrainFromScratch
from fedrec.testing import RecovererContract


class TestTrainFromScratch(RecovererContract):
    def make(self) -> Recoverer:
        return TrainFromScratch()

    def make_exact(self) -> Recoverer:
        return TrainFromScratch()


class TestHistoricalOnly(RecovererContract):
    def make(self) -> Recoverer:
        return HistoricalOnly()


class TestFedRecover(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, final_rounds=2, tolerance_rate=0.1)

    def make_exact(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=1, final_rounds=2)


class TestFedRecoverPaperBuffer(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, tolerance_rate=0.1, buffer="paper")


class TestFedRecoverWithoutEstimates(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, estimate=None)


class TestFedRecoverHistory(RecovererContract):
    def make(self) -> Recoverer:
        return FedRecover(warmup_rounds=4, correction_period=3, estimate="history")
