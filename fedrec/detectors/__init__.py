"""Detectors: who of the clients is malicious."""

from fedrec.detectors.auror import Auror
from fedrec.detectors.base import Detector
from fedrec.detectors.cosine_outlier import CosineOutlier
from fedrec.detectors.cross_round_consistency import CrossRoundConsistency
from fedrec.detectors.ensemble import Ensemble
from fedrec.detectors.fldetector import FLDetector
from fedrec.detectors.imperfect_oracle import ImperfectOracle
from fedrec.detectors.known_malicious import KnownMalicious
from fedrec.detectors.mahalanobis import Mahalanobis
from fedrec.detectors.norm_outlier import NormOutlier
from fedrec.detectors.scores import ScoreDetector
from fedrec.detectors.spectral import Spectral
from fedrec.detectors.sybil_similarity import SybilSimilarity
from fedrec.detectors.update_autoencoder import UpdateAutoencoder

__all__ = [
    "Auror",
    "CosineOutlier",
    "CrossRoundConsistency",
    "Detector",
    "Ensemble",
    "FLDetector",
    "ImperfectOracle",
    "KnownMalicious",
    "Mahalanobis",
    "NormOutlier",
    "ScoreDetector",
    "Spectral",
    "SybilSimilarity",
    "UpdateAutoencoder",
]
