"""Every detector of fedrec keeps the contract."""

from __future__ import annotations

from fedrec.detectors import Detector, FLDetector, ImperfectOracle, KnownMalicious
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


class TestFLDetectorThatStops(DetectorContract):
    def make(self) -> Detector:
        return FLDetector(window=5, start_round=1, action="stop")
