"""Attacks: what malicious clients train on and send."""

from fedrec.attacks.alie import ALIE
from fedrec.attacks.backdoor import BackdoorAttack
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.dba import DBA
from fedrec.attacks.edge_case import EdgeCaseBackdoor
from fedrec.attacks.gaussian_noise import GaussianNoise
from fedrec.attacks.ipm import IPM
from fedrec.attacks.krum import KrumAttack
from fedrec.attacks.label_flip import LabelFlip
from fedrec.attacks.mimic import Mimic
from fedrec.attacks.min_max import MinMax
from fedrec.attacks.min_sum import MinSum
from fedrec.attacks.model_replacement import ModelReplacement
from fedrec.attacks.mpaf import MPAF
from fedrec.attacks.neurotoxin import Neurotoxin
from fedrec.attacks.poisonedfl import PoisonedFL
from fedrec.attacks.scheduled import Scheduled
from fedrec.attacks.sign_flip import SignFlip
from fedrec.attacks.triggers import (
    BlendedTrigger,
    FeatureTrigger,
    FunctionTrigger,
    PixelTrigger,
    SquareTrigger,
    Trigger,
)
from fedrec.attacks.trim import TrimAttack
from fedrec.attacks.wrapper import AttackWrapper

__all__ = [
    "ALIE",
    "DBA",
    "IPM",
    "MPAF",
    "Attack",
    "AttackContext",
    "AttackWrapper",
    "BackdoorAttack",
    "BlendedTrigger",
    "EdgeCaseBackdoor",
    "FeatureTrigger",
    "FunctionTrigger",
    "GaussianNoise",
    "KrumAttack",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "Neurotoxin",
    "PixelTrigger",
    "PoisonedFL",
    "Scheduled",
    "SignFlip",
    "SquareTrigger",
    "Trigger",
    "TrimAttack",
]
