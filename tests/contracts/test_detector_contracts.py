"""Every detector of fedrec keeps the contract."""

from __future__ import annotations

from fedrec.detectors import (
    Auror,
    CosineOutlier,
    CrossRoundConsistency,
    Detector,
    Ensemble,
    FLDetector,
    ImperfectOracle,
    KnownMalicious,
    Mahalanobis,
    NormOutlier,
    Spectral,
    SybilSimilarity,
    UpdateAutoencoder,
)
from fedrec.testing import DetectorContract


class TestKnownMalicious(DetectorContract):
    def make(self) -> Detector:
        return KnownMalicious()


class TestKnownMaliciousByName(DetectorContract):
    max_false_positive_rate = 1 / 12  # "client-02" is named although it is benign

    def make(self) -> Detector:
        return KnownMalicious(ids=["client-02", "client-77"])


class TestImperfectOracle(DetectorContract):
    max_false_positive_rate = 0.25

    def make(self) -> Detector:
        return ImperfectOracle(fnr=0.5, fpr=0.25, seed=3)


class TestFLDetector(DetectorContract):
    def make(self) -> Detector:
        return FLDetector(window=10, start_round=5)


class TestNormOutlier(DetectorContract):
    def make(self) -> Detector:
        return NormOutlier(window=10)


class TestNormOutlierOnBothSides(DetectorContract):
    def make(self) -> Detector:
        return NormOutlier(window=5, start_round=25, two_sided=True)


class TestCosineOutlier(DetectorContract):
    def make(self) -> Detector:
        return CosineOutlier()


class TestSpectral(DetectorContract):
    def make(self) -> Detector:
        return Spectral(num_coordinates=6)


class TestMahalanobis(DetectorContract):
    num_benign_histories = 2  # slow

    def make(self) -> Detector:
        return Mahalanobis()


class TestMahalanobisOnRandomDirections(DetectorContract):
    num_benign_histories = 2  # slow

    def make(self) -> Detector:
        return Mahalanobis(projection="random")


class TestAuror(DetectorContract):
    def make(self) -> Detector:
        return Auror(alpha=2.0)


class TestSybilSimilarity(DetectorContract):
    def make(self) -> Detector:
        return SybilSimilarity()


class TestCrossRoundConsistency(DetectorContract):
    def make(self) -> Detector:
        return CrossRoundConsistency()


class TestCrossRoundConsistencyOfSigns(DetectorContract):
    def make(self) -> Detector:
        return CrossRoundConsistency(measure="sign")


class TestUpdateAutoencoder(DetectorContract):
    num_benign_histories = 2  # slow

    def make(self) -> Detector:
        return UpdateAutoencoder(num_features=8, code=2, epochs=100, train_rounds=10)


class TestEnsemble(DetectorContract):
    def make(self) -> Detector:
        return Ensemble([NormOutlier(), CosineOutlier(), Spectral()], votes=2)
