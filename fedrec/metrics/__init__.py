"""Metrics: test error, attack success, and the costs of a recovery for clients."""

from fedrec.metrics.attack_success_rate import AttackSuccessRate
from fedrec.metrics.convergence import rounds_to_converge
from fedrec.metrics.cost import REASONS, CostLedger
from fedrec.metrics.membership_inference import MembershipInferenceAUC
from fedrec.metrics.test_error_rate import TestErrorRate

__all__ = [
    "REASONS",
    "AttackSuccessRate",
    "CostLedger",
    "MembershipInferenceAUC",
    "TestErrorRate",
    "rounds_to_converge",
]
