"""Every detector of fedrec keeps the contract."""

from __future__ import annotations

import importlib
import pkgutil

import fedrec.detectors
from fedrec.component import subclasses
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


def test_no_detector_is_missed() -> None:
    for module in pkgutil.iter_modules(fedrec.detectors.__path__, "fedrec.detectors."):
        importlib.import_module(module.name)
    cases = [case for case in DetectorContract.__subclasses__() if case.__module__ == __name__]
    ours = {
        cls
        for path, cls in subclasses(Detector).items()
        if path.startswith("fedrec.")
        # A class out of a doctest bears its module's name, but is not in it.
        and getattr(importlib.import_module(cls.__module__), cls.__name__, None) is cls
    }
    assert {type(case().make()) for case in cases} == ours
