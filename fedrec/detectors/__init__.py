"""Detectors: who of the clients is malicious."""

from fedrec.detectors.base import Detector
from fedrec.detectors.fldetector import FLDetector
from fedrec.detectors.imperfect_oracle import ImperfectOracle
from fedrec.detectors.known_malicious import KnownMalicious

__all__ = ["Detector", "FLDetector", "ImperfectOracle", "KnownMalicious"]
