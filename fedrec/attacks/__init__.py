"""Attacks: what malicious clients train on and send."""

from fedrec.attacks.backdoor import BackdoorAttack
from fedrec.attacks.base import Attack
from fedrec.attacks.trim import TrimAttack

__all__ = ["Attack", "BackdoorAttack", "TrimAttack"]
