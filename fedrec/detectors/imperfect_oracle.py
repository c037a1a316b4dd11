"""The detector that errs at given rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fedrec._checks import check_float, check_int
from fedrec.detectors.base import Detector
from fedrec.random import key
from fedrec.types import Detection, RoundRecord

__all__ = ["ImperfectOracle"]


class ImperfectOracle(Detector):
    r"""Knows who is malicious, and errs at given rates.

    Of $a$ malicious clients seen it misses $\mathrm{fnr} \cdot a$, of $b$ benign ones it flags
    $\mathrm{fpr} \cdot b$, both rounded to the nearest integer, halves up (4 malicious clients and
    `fnr=0.3`: 1 is missed). Which clients these are depends on `seed` and the clients' names alone.

    Args:
        fnr: False negative rate in [0, 1]: fraction of the malicious clients that is missed.
        fpr: False positive rate in [0, 1]: fraction of the benign clients that is flagged.
        seed: Seed of the draw.

    Raises:
        ConfigurationError: If a rate is outside of [0, 1].

    References:
        - Cao et al., FedRecover, IEEE S&P 2023 (effect of FNR and FPR).

    Examples:
        >>> ImperfectOracle(fnr=0.5)
        ImperfectOracle(fnr=0.5, fpr=0.0, seed=0)
    """

    needs_updates = False

    def __init__(self, *, fnr: float = 0.0, fpr: float = 0.0, seed: int = 0) -> None:
        self.fnr = check_float("fnr", fnr, minimum=0.0, maximum=1.0)
        self.fpr = check_float("fpr", fpr, minimum=0.0, maximum=1.0)
        self.seed = check_int("seed", seed, minimum=0)
        self.reset()

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: The clients that are malicious.
        """
        self._truth = set(truth)
        self._seen: set[str] = set()
        self._round: int | None = None

    def observe(self, record: RoundRecord) -> None:
        """Note who takes part."""
        self._seen.update(record.client_ids, record.cohort)
        if self._round is None:
            self._round = record.round

    def result(self) -> Detection:
        """Return the verdict on the clients seen; decided in the first round."""
        missed = self._draw(self._seen & self._truth, self.fnr)
        flagged = self._draw(self._seen - self._truth, self.fpr)
        return Detection(
            malicious=tuple(sorted((self._seen & self._truth) - missed | flagged)),
            seen=tuple(sorted(self._seen)),
            round=self._round,
        )

    def _draw(self, clients: set[str], rate: float) -> set[str]:
        """Draw this fraction of the clients: those with the smallest keys."""
        count = math.floor(Fraction(str(rate)) * len(clients) + Fraction(1, 2))
        order = sorted(clients, key=lambda c: key(self.seed, "imperfect-oracle", client_id=c))
        return set(order[:count])
